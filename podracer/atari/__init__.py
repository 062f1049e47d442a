"""Atari as papers run and report it: protocols and human-normalised scores."""

from podracer.atari.protocols import impala, ppo, preset, seed
from podracer.atari.scores import human_normalised

__all__ = ["human_normalised", "impala", "ppo", "preset", "seed"]
