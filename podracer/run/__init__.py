"""A run from its start to its files: settings, the training session, evaluation, metrics, checkpoints and plots."""
