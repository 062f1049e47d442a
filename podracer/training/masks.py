"""Masks of legal actions that an agent does not look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from podracer import spaces
from podracer.agents.registry import AGENTS, PLANNERS
from podracer.types import Agent, EnvSpec

NAME = "action_mask"
"""The name of a mask in observations for agents that honour it."""

_LIKE_ONE = re.compile(r"mask|legal|valid|avail", re.IGNORECASE)


def ignored(agent: Agent, spec: EnvSpec) -> list[str]:
    """A line where observations have a mask that an agent of this library takes for numbers to see."""
    found = list(_masks(spec.observation_space, spec.action_space))
    honours = agent.name in PLANNERS
    if not found or agent.name not in AGENTS or (honours and NAME in found):
        return []
    message = f"{agent.name} takes {found[0]} in the observations of {spec.name} for numbers to see"
    if honours:
        return [f"{message}: a mask of legal actions is called {NAME}."]
    return [f"{message} and plays illegal actions too; {', '.join(PLANNERS)} honour a mask that is called {NAME}."]


def _masks(space: Any, actions: Any) -> Iterator[str]:
    """Names of observations that have a number for every action, and a name as masks have it."""
    if isinstance(actions, spaces.Box) or not isinstance(space, spaces.Dict):
        return
    for name, item in space.items:
        if isinstance(item, spaces.Dict):
            yield from _masks(item, actions)
        elif _LIKE_ONE.search(name) and np.prod(item.shape, dtype=int) == np.sum(actions.num_values):
            yield name
