"""The plan of a sweep: its configurations, their seeds, and the waves in which they are trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer import configs, spaces, topology
from podracer.environments.seeds import MAX_SEED
from podracer.run.config import RunConfig
from podracer.run.record import Experiment
from podracer.sweeps import ranges
from podracer.types import Agent

MOST_AT_ONCE = {"cpu": 64}
"""The most members of a wave by platform, whatever memory there is: on a CPU, twice as many take twice as long."""

BYTES_OF_A_ROW = (16_384, 64)
"""Bytes for a row of training, and for each number of its observation: activations and gradients of a small network."""


class Member(NamedTuple):
    """One member of a wave: the number of a configuration, and a seed."""

    configuration: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The configurations of a sweep and the seeds that each of them is trained with.

    Attributes:
      hyper: the values of each number.
      configurations: the numbers of each configuration, by name.
      seed: of the draws, and the first seed of training.
      seeds: number of seeds.
    """

    hyper: Mapping[str, ranges.Values]
    configurations: list[dict[str, float]]
    seed: int
    seeds: int

    @property
    def members(self) -> list[Member]:
        """All members: every configuration with the same seeds."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [Member(i, seed) for i in range(len(self.configurations)) for seed in seeds]

    def fresh(self, configuration: int) -> list[Member]:
        """Members of one configuration with as many seeds that the sweep has not used."""
        first = self.seed + self.seeds
        return [Member(configuration, seed) for seed in range(first, first + self.seeds)]

    def request(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        hyper = {name: str(x) if isinstance(x, ranges.Range) else list(x) for name, x in self.hyper.items()}
        return {"hyper": hyper, "members": len(self.configurations), "seeds": self.seeds, "seed": self.seed}


def make(hyper: Mapping[str, Any], members: int | None, seeds: int, seed: int) -> Plan:
    """A plan: lists make a grid, and each of its points has equally many draws from the ranges.

    Args:
      hyper: for each tunable number a range, some numbers, or one.
      members: number of configurations; all points of the grid if None, which a range does not allow.
      seeds: number of seeds of each.
      seed: of the draws, and the first seed of training.

    Raises:
      ValueError: for numbers that make no plan.
    """
    found = {name: ranges.values(name, given) for name, given in hyper.items()}
    grid = {name: x for name, x in found.items() if not isinstance(x, ranges.Range)}
    drawn = {name: x for name, x in found.items() if isinstance(x, ranges.Range)}
    points = [dict(zip(grid, point)) for point in itertools.product(*grid.values())]
    if not found:
        raise ValueError('hyper is empty: name a tunable number and its values, as {"learning_rate": [1e-3, 1e-2]}.')
    for name, value in (("seeds", seeds), ("members", members)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1.")
    if not 0 <= seed <= MAX_SEED + 1 - 2 * seeds:
        raise ValueError(f"seed={seed}: must be 0 to {MAX_SEED + 1 - 2 * seeds}.")
    if members is None and drawn:
        raise ValueError(f"members is missing: say how many configurations to draw of {', '.join(drawn)}.")
    members = len(points) if members is None else members
    if members % len(points) or (members != len(points) and not drawn):
        nearest = max(1, round(members / len(points))) * len(points) if drawn else len(points)
        raise ValueError(
            f"members={members}: the lists make a grid of {len(points)}, each with "
            f"{'equally many draws' if drawn else 'one configuration'}; use {nearest}."
        )
    draws = {
        name: x.draw(members, np.random.default_rng([seed, zlib.crc32(name.encode())])) for name, x in drawn.items()
    }
    configurations = [
        {name: points[i % len(points)][name] if name in grid else draws[name][i] for name in found}
        for i in range(members)
    ]
    return Plan(found, configurations, seed, seeds)


def check_names(names: Iterable[str], config: type) -> None:
    """Checks that a sweep can vary numbers.

    Args:
      names: their names.
      config: the class of the agent's config.

    Raises:
      ValueError: for a setting that decides a program.
    """
    tunables = {item.name for item in dataclasses.fields(config) if item.metadata.get("tunable")}
    others = {item.name for part in (config, RunConfig) for item in dataclasses.fields(part)} - tunables
    for name in names:
        if name in others:
            raise ValueError(
                f"hyper[{name!r}]: a sweep varies tunable numbers ({', '.join(sorted(tunables))}), which may differ "
                f"between members of one program. Start a sweep for each value of {name}, or on games of Atari and "
                "MinAtar a `podracer suite` for each."
            )


def check(plan: Plan, experiment: Experiment) -> None:
    """Checks the numbers of all configurations.

    Raises:
      ValueError: for a setting that is not tunable, or a value outside its limits.
    """
    config = experiment.agent.config
    check_names(plan.hyper, type(config))
    columns = {name: [one[name] for one in plan.configurations] for name in plan.hyper}
    configs.population_hyper(config, len(plan.configurations), columns, experiment.agent.hyper)


def waves(members: Sequence[Member], at_once: int) -> list[list[Member]]:
    """Equally large waves of at most so many members; the last member fills the last one up.

    So all have one program, which is compiled once.
    """
    size = math.ceil(len(members) / math.ceil(len(members) / at_once))
    filled = [*members, *[members[-1]] * (-len(members) % size)]
    return [filled[i : i + size] for i in range(0, len(filled), size)]


def at_once(experiment: Experiment) -> int:
    """The number of members that memory allows side by side, 1 with host environments.

    Args:
      experiment: the run of one member.
    """
    if experiment.run.arch == "sebulba":
        return 1
    devices = experiment.driver.devices
    limit = topology.memory_limit(devices)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if limit is None else limit * len(devices)
    most = MOST_AT_ONCE.get(devices[0].platform, 1024)
    return max(1, min(most, there // 2 // _bytes(experiment)))


def _bytes(experiment: Experiment) -> int:
    """A rough upper bound of what one member takes: its state twice over, and the rows that it learns from."""
    agent: Agent = experiment.agent
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    observation = sum(x.size for x in jax.tree.leaves(spaces.zeros(experiment.environment.spec.observation_space)))
    a_row = BYTES_OF_A_ROW[0] + BYTES_OF_A_ROW[1] * observation
    return 2 * size(experiment.driver.like()) + experiment.run.num_envs * agent.config.rollout_length * a_row  # type: ignore[operator]
