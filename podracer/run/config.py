"""The settings of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from podracer import configs
from podracer.environments.seeds import MAX_SEED

Mode = Literal["async", "lockstep", "serial"]
"""The order of acting and learning (see `podracer.sebulba.actor.ActorContext.publication`)."""


SEBULBA = (
    *("replicas", "actor_devices", "actor_threads", "reanalyser_devices", "prepare_ahead", "updates_per_batch"),
    *("queue_capacity", "env_timeout", "env_restarts", "updates_per_call", "replay_memory"),
)
"""The settings of a run that only Sebulba has."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run, whatever its agent.

    Attributes:
      total_steps: real transitions to train for, over all environments and devices (per member of a population).
      seed: seed of everything random; member i of a population has seed + i, or its own in member_seeds.
      num_envs: environment lanes over all devices; the agent's `envs_per_device` times the devices if None.
      num_shards: logical shards; one per device if None. Equal shards give equal results on any number of devices.
      population: members that train side by side in one program.
      member_seeds: a seed for each member; without any, member i has seed + i.
      reset_pool: number of fresh environment states per shard and rollout, from which episodes start, for environments
        whose reset is expensive. Without a pool, None resets only lanes that are over where states are large or the
        environment says `costly_reset`, and 0 makes a fresh state for every lane at every step, with equal results.
      arch: "anakin", for pure-JAX environments, or "sebulba", for all; "auto" chooses by the environment.
      mode: the order of acting and learning (docs/glossary.md). Of Sebulba: "async" learns from rollouts as they come;
        "lockstep" and "serial" keep a fixed order, bit for bit: "lockstep" acts the next rollouts while it learns from
        the last ones, "serial" acts them afterwards. Anakin is serial by itself; with "lockstep" agents that replay
        learn as late as in Sebulba.
      replicas: of Sebulba; parts with actor threads, environments and shards of their own, and one update for the
        rollouts of all. One per process if None; equal replicas give equal results on any number of processes.
      actor_devices: of Sebulba; a quarter of the devices of a process if None.
      actor_threads: of Sebulba, per actor device.
      reanalyser_devices: of Sebulba, with agents that reanalyse; devices of a process that hold the replay and
        reanalyse; 0 leaves both to the learners.
      prepare_ahead: with reanalysers; True prepares the next group of updates while the learners do this one.
      updates_per_batch: of Sebulba; parts of each batch, with an update for each in turn.
      queue_capacity: of Sebulba; rollouts of each actor thread that may wait for the learner.
      env_timeout: of Sebulba; seconds that environments may take to answer, in evaluations too.
      env_restarts: of Sebulba; how often environments that do not answer are replaced, as a break in their streams,
        before the run ends with an error; an evaluation is restarted as often.
      updates_per_call: of Sebulba, with agents that replay; updates between two looks at signals, a tenth of a second
        of them if None.
      final_updates: with agents that replay; updates after the last step, without acting, at the learning rate that the
        schedule ends with, which has to be above 0.
      replay_memory: of Sebulba; "host" keeps a replay that is too large for the learner devices in the host's memory.
      eval_every: steps between evaluations; a tenth of `total_steps` if None.
      eval_episodes: episodes of each evaluation; 128, or 32 on the host, if None.
      checkpoint_every: steps between checkpoints; if None, a fifth of `total_steps`, but none within ten seconds of the
        one before.
      checkpoint_minutes: minutes between checkpoints at most, whatever `checkpoint_every` is; a run that dies loses no
        more.
      checkpoint_replay: True stores the replay in checkpoints; without it they are small, and a resumed run fills a new
        replay before it learns.
      keep_checkpoints: number of the newest checkpoints that are kept.
    """

    total_steps: int = configs.field(500_000, low=1, high=2**50)
    seed: int = configs.field(0, low=0, high=MAX_SEED)
    num_envs: int | None = configs.field(None, low=1)
    num_shards: int | None = configs.field(None, low=1)
    population: int = configs.field(1, low=1)
    member_seeds: tuple[int, ...] = configs.field((), low=0, high=MAX_SEED)
    reset_pool: int | None = configs.field(None, low=0)
    arch: Literal["auto", "anakin", "sebulba"] = "auto"
    mode: Mode = "async"
    replicas: int | None = configs.field(None, low=1)
    actor_devices: int | None = configs.field(None, low=1)
    actor_threads: int = configs.field(1, low=1)
    reanalyser_devices: int = configs.field(0, low=0)
    prepare_ahead: bool = True
    updates_per_batch: int = configs.field(1, low=1)
    queue_capacity: int = configs.field(1, low=1)
    env_timeout: float = configs.field(60.0, low=0.1)
    env_restarts: int = configs.field(0, low=0)
    updates_per_call: int | None = configs.field(None, low=1)
    final_updates: int = configs.field(0, low=0)
    replay_memory: Literal["device", "host"] = "device"
    eval_every: int | None = configs.field(None, low=1)
    eval_episodes: int | None = configs.field(None, low=1)
    checkpoint_every: int | None = configs.field(None, low=1)
    checkpoint_minutes: float = configs.field(15.0, low=0.001)
    checkpoint_replay: bool = True
    keep_checkpoints: int = configs.field(3, low=1)

    def __post_init__(self):
        configs.check(self)
        if self.member_seeds and len(self.member_seeds) != self.population:
            raise ValueError(
                f"member_seeds has {len(self.member_seeds)} seeds and population={self.population} members; use "
                f"population={len(self.member_seeds)}."
            )
        if not self.member_seeds and self.seed > MAX_SEED + 1 - self.population:
            raise ValueError(
                f"RunConfig.seed={self.seed}: must be at most {MAX_SEED + 1 - self.population} with "
                f"population={self.population}, whose members have the next seeds."
            )

    @property
    def seeds(self) -> np.ndarray:
        """The seeds of the members, int32 [population]."""
        return seeds_of(vars(self))


def seeds_of(run: Mapping[str, Any]) -> np.ndarray:
    """The seeds of the members of a run, int32 [population], from its settings, which a file may hold."""
    first = run["seed"]
    return np.asarray(run.get("member_seeds") or range(first, first + run["population"]), np.int32)
