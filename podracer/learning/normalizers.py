"""Running statistics by which an agent that replays normalises what it samples: observations and rewards.

Statistics are of the rows that updates are made of, and are merged in `learn`: acting only reads them. So they are the
same for any number of devices, and rows from long ago follow their present scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import spaces
from podracer.learning import moments
from podracer.topology import collectives
from podracer.types import ArrayTree, Batch, EnvSpec, TimeStep, Trajectory

LEAST_VARIANCE = 1e-4
"""Added to the variance of observations: their least standard deviation is 0.01 (Seo et al. 2025, by their code)."""


class Statistics(NamedTuple):
    """Statistics of the rows so far.

    Attributes:
      observation: a tree of `Moments`, () for parts that are not float32; or () without normalisation.
      returns: `Moments` of lanes' discounted returns, [], or ().
      largest_return: float32 []; the largest magnitude of them, or ().
    """

    observation: ArrayTree = ()
    returns: Any = ()
    largest_return: Any = ()


@dataclasses.dataclass(frozen=True)
class Normalizers:
    """The statistics that are kept, and what is made of them.

    Attributes:
      observations: whether observations become (x - mean) / std, clipped to [-10, 10].
      rewards: whether rewards are divided by max(std G, max |G| / max_value), G a lane's running discounted return
        (Lee et al. 2025, arXiv 2502.15280, section 4).
      max_value: the largest return to come; None for no such limit.
    """

    observations: bool
    rewards: bool
    max_value: float | None = None

    def initial(self, spec: EnvSpec) -> Statistics:
        """Statistics of nothing.

        Raises:
          ValueError: for observations without a part that can be normalised.
        """
        observation, returns, largest = (), (), ()
        if self.observations:
            example = spaces.zeros(spec.observation_space)
            if not any(x.dtype == jnp.float32 for x in jax.tree.leaves(example)):
                raise ValueError(
                    f"normalize_observations=True needs float32 observations, which {spec.name} does not have; leave "
                    "it out."
                )
            observation = jax.tree.map(lambda x: moments.initial(x.shape) if x.dtype == jnp.float32 else (), example)
        if self.rewards:
            returns, largest = moments.initial(()), jnp.float32(0)
        return Statistics(observation, returns, largest)

    def merged(self, statistics: Statistics, trajectory: Trajectory) -> Statistics:
        """Adds row 0 of samples [T, B] on all shards."""
        rows = jax.tree.map(lambda x: x[:1], trajectory.timesteps)
        ones = jnp.ones(rows.first.shape)
        if self.observations:
            merge = lambda m, x: moments.merge(m, x, ones) if m else m  # noqa: E731
            statistics = statistics._replace(observation=_by_part(merge, statistics.observation, rows.observation))
        if self.rewards:
            # A first row has no reward.
            G, valid = trajectory.extras["discounted_return"][:1], 1.0 - rows.first.astype(jnp.float32)
            largest = collectives.global_max(jnp.abs(G) * valid)
            statistics = statistics._replace(
                returns=moments.merge(statistics.returns, G, valid),
                largest_return=jnp.maximum(statistics.largest_return, largest),
            )
        return statistics

    def observed(self, statistics: Statistics, timesteps: TimeStep) -> TimeStep:
        """Rows with normalised observations."""
        if not self.observations:
            return timesteps
        normalize = lambda m, x: moments.normalize(x, m, LEAST_VARIANCE) if m else x  # noqa: E731
        return timesteps._replace(observation=_by_part(normalize, statistics.observation, timesteps.observation))

    def sampled(self, statistics: Statistics, batch: Batch) -> tuple[Statistics, Batch]:
        """Statistics with those of samples, and the samples with normalised observations and rewards."""
        trajectory: Any = batch.trajectory
        statistics = self.merged(statistics, trajectory)
        timesteps = self.observed(statistics, trajectory.timesteps)
        if self.rewards:
            scale = jnp.sqrt(statistics.returns.variance + 1e-8)
            if self.max_value is not None:
                scale = jnp.maximum(scale, statistics.largest_return / self.max_value)
            timesteps = timesteps._replace(reward=timesteps.reward / scale)
        return statistics, batch._replace(trajectory=trajectory._replace(timesteps=timesteps))


@dataclasses.dataclass(frozen=True)
class NormalizersConfig:
    """The settings of what is normalised.

    Attributes:
      normalize_observations: by running mean and variance of what is sampled, clipped to [-10, 10]. Of named
        observations only parts of float32.
      normalize_rewards: by the scale of returns (see `Normalizers`; SimbaV2: True).
    """

    normalize_observations: bool = False
    normalize_rewards: bool = False

    def normalizers(self, spec: EnvSpec, max_value: float | None) -> Normalizers:
        """The normalisers for an environment.

        Raises:
          ValueError: for observations without a part that can be normalised.
        """
        made = Normalizers(self.normalize_observations, self.normalize_rewards, max_value)
        made.initial(spec)
        return made


def _by_part(function: Callable[..., Any], running: ArrayTree, *trees: ArrayTree) -> ArrayTree:
    """`function(moments, *leaves)` of every part of an observation; moments are () of parts without any."""
    return jax.tree.map(function, running, *trees, is_leaf=lambda m: isinstance(m, tuple))
