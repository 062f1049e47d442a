"""Oracles, probes and machinery that tests share."""
