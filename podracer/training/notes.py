"""Notes to the user before a run: what an agent makes of its environment that may not be meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from podracer import spaces
from podracer.agents.registry import AGENTS
from podracer.nets import action_masks
from podracer.run.record import Experiment
from podracer.system.console import note
from podracer.training import choices
from podracer.training.resolve import num_updates
from podracer.types import Agent, EnvSpec

_LIKE_ONE = re.compile(r"mask|legal|valid|avail", re.IGNORECASE)


def tell(experiment: Experiment) -> None:
    """Writes the notes of a run, one line each."""
    agent, spec = experiment.agent, experiment.environment.spec
    lines = ignored_masks(agent, spec) + rows_between_traces(agent)
    lines += choices.flat_images(agent, spec, experiment.description["chosen"])
    for line in lines + choices.no_resets(agent, num_updates(agent, experiment.run)):
        note(line)


def ignored_masks(agent: Agent, spec: EnvSpec) -> list[str]:
    """A line where observations have a mask, by its name and size, that an agent of this library does not follow."""
    if agent.name not in AGENTS or action_masks.present(spec):
        return []
    return [
        f"{agent.name} takes {name} in the observations of {spec.name} for numbers to see and plays illegal actions: "
        f"a mask that agents follow is called {action_masks.NAME} and stands at the top of a Dict."
        for name in _found(spec.observation_space, spec.action_space)
    ][:1]


def rows_between_traces(agent: Agent) -> list[str]:
    """A line where sequences of R2D2 begin at a larger distance than they learn from."""
    trace = getattr(agent.config, "trace_length", None)
    if trace is None or trace >= (distance := agent.config.rollout_length):
        return []
    return [
        f"{distance - trace} of every {distance} rows are never learnt from: a sequence begins every "
        f"rollout_length={distance} rows and learns from trace_length={trace}; rollout_length={trace} leaves none out."
    ]


def _found(space: Any, actions: Any) -> Iterator[str]:
    """Names of observations that have a number for every action, and a name as masks have it."""
    if isinstance(actions, spaces.Box) or not isinstance(space, spaces.Dict):
        return
    for name, item in space.items:
        if isinstance(item, spaces.Dict):
            yield from _found(item, actions)
        elif _LIKE_ONE.search(name) and np.prod(item.shape, dtype=int) == np.sum(actions.num_values):
            yield name
