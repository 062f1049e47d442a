"""Making an update: gradients, optimisers, and what is learnt from when."""
