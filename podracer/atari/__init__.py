"""Atari as papers run and report it: games, protocols, presets and human-normalised scores."""

from podracer.atari.games import GAMES26, GAMES57, NATURE49
from podracer.atari.protocols import PROTOCOLS, Protocol, protocol
from podracer.atari.scores import human_normalised

__all__ = ["GAMES26", "GAMES57", "NATURE49", "PROTOCOLS", "Protocol", "human_normalised", "protocol"]
