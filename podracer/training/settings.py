"""Settings as differences, in layers: those of a preset, a protocol and a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """Differences from the defaults, or from the settings of the layer below.

    Attributes:
      agent: fields of the agent's config.
      run: fields of `RunConfig`.
      env: fields of the environment's options.
      names: `preset` and `protocol`, where there are such.
    """

    agent: Mapping[str, Any] = {}
    run: Mapping[str, Any] = {}
    env: Mapping[str, Any] = {}
    names: Mapping[str, str] = {}


def merged(*layers: Settings) -> Settings:
    """The settings of several layers, from the lowest one; the later one goes first."""
    return Settings(*({k: v for part in parts for k, v in part.items()} for parts in zip(*layers)))
