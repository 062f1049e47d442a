"""The settings of population based training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from podracer import configs
from podracer.types import Agent, EnvSpec

Rule = Literal["truncation", "impala"]
"""The choice of whom to copy (see `podracer.population.evolution`)."""


@dataclasses.dataclass(frozen=True)
class PBT:
    """The settings of population based training. Paper values: Jaderberg et al. 2017, and IMPALA (appendix E).

    Attributes:
      interval: environment steps of a member between two generations (Jaderberg: 1M to 10M).
      burn_in: steps before the first generation; `interval` if 0 (IMPALA: 20M frames).
      rule: "truncation": the worst `fraction` of the members copy random ones of the best, and only these vary their
        numbers (Jaderberg). "impala": every member looks at a random other one and copies it if its score is better by
        more than `threshold`; all vary their numbers.
      fraction: of "truncation" (Jaderberg: 0.2).
      threshold: of "impala", in units of the score (IMPALA: 0.05).
      factor: a number that varies is multiplied by `factor` or 1 / `factor` (IMPALA: 1.2; Jaderberg: 1.2 or 0.8).
      probability: of each number to vary; if None that of the rule's paper, 1 for "truncation" and 0.33 for "impala".
      min_episodes: a member takes part once so many of its episodes have ended since it last did (IMPALA: 5,000).
      hyper: names of the tunable numbers that vary (IMPALA: RMSProp's epsilon, learning rate, entropy cost).
      score: returns that count as 0 and as 1, of each task in turn: its mean return is scaled by them and cut at 1, and
        fitness is the mean over tasks. None takes returns as they are, which "impala" cannot compare.
    """

    interval: int = dataclasses.field(metadata={"low": 1})
    burn_in: int = configs.field(0, low=0)
    rule: Rule = "truncation"
    fraction: float = configs.field(0.2, low=0.0, high=0.5)
    threshold: float = configs.field(0.05, low=0.0)
    factor: float = configs.field(1.2, low=1.0)
    probability: float | None = configs.field(None, low=0.0, high=1.0)
    min_episodes: int = configs.field(20, low=1)
    hyper: tuple[str, ...] = ("learning_rate",)
    score: tuple[float, ...] | None = None

    def __post_init__(self):
        configs.check(self)
        if not self.hyper or len(set(self.hyper)) < len(self.hyper):
            raise ValueError(f"PBT.hyper={self.hyper!r}: must name tunable numbers, each once.")
        if self.rule == "impala" and self.score is None:
            raise ValueError(
                "PBT.rule='impala' compares scores with an absolute threshold: give score=(low, high), the returns "
                "that count as 0 and as 1, or use rule='truncation'."
            )
        pairs = list(zip(self.score[::2], self.score[1::2])) if self.score else []
        if self.score is not None and (len(self.score) % 2 or not pairs or any(low >= high for low, high in pairs)):
            raise ValueError(f"PBT.score={self.score!r}: must be low and high, with low < high, for each task in turn.")

    @classmethod
    def impala(cls, interval: int, score: tuple[float, ...], **others: Any) -> PBT:
        """The settings of IMPALA's appendix E, where a frame is a quarter of a step."""
        paper = {"burn_in": 5_000_000, "rule": "impala", "min_episodes": 5_000}
        paper |= {"hyper": ("optimizer_eps", "learning_rate", "entropy_cost")}
        return cls(interval, score=score, **(paper | others))

    @property
    def chance(self) -> float:
        """The probability of each number to vary, where the rule allows it."""
        of_paper = 0.33 if self.rule == "impala" else 1.0
        return of_paper if self.probability is None else self.probability

    def milestone(self, generation: int) -> int:
        """The environment steps at which a generation ends, from 0 on."""
        return (self.burn_in or self.interval) + generation * self.interval

    def generations(self, env_steps: int) -> int:
        """The number of generations that end within so many steps."""
        return max(0, (env_steps - self.milestone(0)) // self.interval + 1)


def of(pbt: PBT | Mapping[str, Any] | None) -> PBT | None:
    """The settings of a mapping, which may come from JSON.

    Raises:
      ValueError: without an interval, and for fields that there are not.
    """
    if pbt is None or isinstance(pbt, PBT):
        return pbt
    if pbt.get("interval") is None:
        raise ValueError("pbt needs an interval (--pbt.interval), the environment steps between two generations.")
    return configs.from_json(PBT, pbt)


def check_start(pbt: PBT, hyper: Mapping[str, np.ndarray]) -> None:
    """Checks that the numbers which vary can: one that begins at 0 stays there, whatever it is multiplied by.

    Args:
      pbt: the settings.
      hyper: the numbers of members [P] at the start, by name.

    Raises:
      ValueError: for a number that begins at 0 in any of them.
    """
    for name in pbt.hyper:
        if not np.all(hyper[name]):
            raise ValueError(
                f"PBT.hyper: {name} begins at 0, which no factor moves; give each member a number above 0 "
                f"(hyper={{{name!r}: ...}}), or leave it out of PBT.hyper."
            )


def check(pbt: PBT, agent: Agent, spec: EnvSpec, population: int | None, rows_per_update: int) -> None:
    """Checks that a run can be trained so.

    Args:
      pbt: the settings.
      agent: the agent.
      spec: of the environment.
      population: number of members; None where each is a run of its own.
      rows_per_update: of a member, over all lanes.

    Raises:
      ValueError: where it cannot.
    """
    if population is None and pbt.rule != "impala":
        raise ValueError(
            f"PBT.rule={pbt.rule!r} ranks all members, and runs with pbt_dir look at one other; use rule='impala' and "
            "score=(low, high)."
        )
    if population is not None and population < 2:
        raise ValueError("pbt: population=1 has nobody to copy; use population=8 or more.")
    if spec.num_players != 1:
        raise ValueError(f"pbt: in {spec.name}, a game for two, the return says nothing of strength; leave pbt out.")
    for name in pbt.hyper:
        if name not in agent.hyper:
            raise ValueError(
                f"PBT.hyper: {name!r} is no number that {agent.name} tunes; {configs.suggest(name, agent.hyper)}"
            )
    schedule = getattr(agent.config, "learning_rate_schedule", "constant")
    if "learning_rate" in pbt.hyper and schedule != "constant":
        raise ValueError(
            f"learning_rate_schedule={schedule!r}: the population finds the schedule of its learning rate; use "
            "learning_rate_schedule='constant' (--agent.learning-rate-schedule constant), or leave learning_rate out "
            "of PBT.hyper."
        )
    target_kl = getattr(agent.config, "target_kl", None)
    if "learning_rate" in pbt.hyper and target_kl is not None:
        raise ValueError(
            f"target_kl={target_kl} sets the learning rate itself, which a population cannot vary; use target_kl=None, "
            "or leave learning_rate out of PBT.hyper."
        )
    if pbt.interval < rows_per_update:
        raise ValueError(
            f"PBT.interval={pbt.interval:,}: must be at least the {rows_per_update:,} steps of an update, and many "
            "times that to tell good members from bad ones."
        )
    tasks = max(1, len(getattr(spec, "tasks", ())))
    if pbt.score is not None and len(pbt.score) != 2 * tasks:
        raise ValueError(f"PBT.score={pbt.score!r}: must have low and high of each of the {tasks} task(s).")
