"""Atari as papers run and report it: games, protocols, presets, human-normalised and capped scores."""

from podracer.atari.games import GAMES26, GAMES57, NATURE49
from podracer.atari.protocols import PROTOCOLS, Protocol, protocol
from podracer.atari.scores import capped_scores, human_normalised, random_and_human

__all__ = [
    "GAMES26",
    "GAMES57",
    "NATURE49",
    "PROTOCOLS",
    "Protocol",
    "capped_scores",
    "human_normalised",
    "protocol",
    "random_and_human",
]
