"""XLand-MiniGrid (Nikulin et al. 2024, https://github.com/dunnolab/xland-minigrid): grid worlds with rules and goals.

`xminigrid:MiniGrid-DoorKey-6x6` is a task after MiniGrid's, `xminigrid:XLand-MiniGrid-R1-9x9` a world of rules.

It is not MiniGrid: there are 6 actions, of which forward is the first; tiles have codes of its own, (kind, colour); the
agent sees through walls. Scores of the two do not compare.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from typing import Any

import jax
import numpy as np

from envs_jax.adapters import convert
from podracer import configs, spaces

LARGEST_CODE = 12
"""The largest number of a tile's kind; colours have smaller ones."""


@dataclasses.dataclass(frozen=True)
class XminigridOptions:
    """Options of XLand-MiniGrid.

    Attributes:
      max_steps: the time limit, a truncation; by default XLand-MiniGrid's.
      ruleset: of worlds of rules, `BENCHMARK:NUMBER`: a benchmark's name, such as `trivial-21k`, which is downloaded
        once, or a file of one; "" has no rules.
    """

    max_steps: int | None = configs.field(None, low=1)
    ruleset: str = ""

    def __post_init__(self):
        configs.check(self)
        if self.ruleset and not self.ruleset.rpartition(":")[2].isdecimal():
            raise ValueError(f"ruleset={self.ruleset!r}: write BENCHMARK:NUMBER, such as trivial-21k:7.")


def tasks() -> list[str]:
    """Returns the ids of XLand-MiniGrid's environments."""
    return list(importlib.import_module("xminigrid").registered_environments())


def make(name: str, options: XminigridOptions) -> convert.Adapted:
    """Builds an environment of XLand-MiniGrid.

    Raises:
      ValueError: for an unknown id, a ruleset that there is not, or rules in a task that has none.
    """
    convert.check_known("xminigrid", name, tasks())
    library = importlib.import_module("xminigrid")
    if options.ruleset and not name.startswith("XLand"):
        raise ValueError(f"xminigrid:{name} has no rules; ruleset goes with names that begin with XLand-MiniGrid.")
    with convert.making(f"xminigrid:{name}"):
        env, params = library.make(name)
        if options.max_steps is not None:
            params = params.replace(max_steps=options.max_steps)
        if options.ruleset:
            params = params.replace(ruleset=_ruleset(library, options.ruleset))
    return from_xminigrid(env, params, name=f"xminigrid:{name}")


def _ruleset(library: Any, text: str) -> Any:
    benchmark, _, number = text.rpartition(":")
    is_file = pathlib.Path(benchmark).is_file()
    load = library.benchmarks.load_benchmark_from_path if is_file else library.load_benchmark
    found = load(benchmark)
    if int(number) >= found.num_rulesets():
        raise ValueError(f"{benchmark} has {found.num_rulesets()} rulesets, from 0 on")
    return found.get_ruleset(int(number))


def from_xminigrid(env: Any, params: Any, *, name: str = "") -> convert.Adapted:
    """Adapts an environment with XLand-MiniGrid's interface, `reset(params, key)` and `step(params, timestep, action)`.

    Args:
      env: the environment.
      params: its parameters, `max_steps` among them.
      name: for run directories and messages; by default the class's.

    Raises:
      ValueError: for a wrapper, or parameters without `max_steps`.
    """
    name = name or type(env).__name__
    convert.check_bare(env, name)
    with convert.making(name):
        max_steps, actions = int(params.max_steps), spaces.Discrete(int(env.num_actions(params)))

    def step(timestep: Any, action: jax.Array, key: jax.Array) -> convert.Step:
        del key  # theirs is in the state
        timestep = env.step(params, timestep, action)
        last = timestep.last()
        return convert.Step(timestep, timestep.reward, last & (timestep.discount == 0), last)

    return convert.Adapted(
        name,
        lambda key: env.reset(params, key),
        step,
        lambda timestep: timestep.observation,
        actions,
        declared=spaces.Box(0, LARGEST_CODE, (), np.uint8),
        max_steps=max_steps,
    )
