"""Environments in other processes, which connect to the learner and send rows (docs/adr/0025-remote.md)."""
