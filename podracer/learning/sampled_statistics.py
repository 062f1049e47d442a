"""Running statistics by which an agent that replays normalises what it samples: observations and rewards.

Statistics are of the rows that updates are made of, and are merged in `learn`: acting only reads them. So they are the
same for any number of devices, and rows from long ago follow their present scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import configs
from podracer.learning import moments
from podracer.learning.normalizers import ObservationNormalizerConfig
from podracer.topology import collectives
from podracer.types import ArrayTree, Batch, EnvSpec, Trajectory


class SampledStatistics(NamedTuple):
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
class SampledStatisticsConfig(ObservationNormalizerConfig):
    """The settings of what is normalised of samples, beside those of `ObservationNormalizerConfig`.

    Attributes:
      statistics_min_std: m of `ObservationNormalizerConfig`, with a larger default (FastTD3: 1e-2, by their code).
      normalize_rewards: whether rewards are divided by max(std G, max |G| / largest), G a lane's running discounted
        return and `largest` the largest value that critics know (Lee et al. 2025, arXiv 2502.15280, section 4; SimbaV2:
        True).
      reward_scale: factor of rewards that are not normalised; reported returns are without it (SAC's paper: 1, as alpha
        is learnt).
    """

    statistics_min_std: float = configs.field(1e-2, low=0.0)
    normalize_rewards: bool = False
    reward_scale: float = configs.field(1.0, low=0.0, tunable=True)

    def initial_statistics(self, spec: EnvSpec) -> SampledStatistics:
        """Statistics of nothing."""
        returns, largest = (moments.initial(()), jnp.float32(0)) if self.normalize_rewards else ((), ())
        return SampledStatistics(self.initial_moments(spec), returns, largest)

    def normalize_samples(
        self, statistics: SampledStatistics, batch: Batch, largest: float | None, hyper: Mapping[str, jax.Array]
    ) -> tuple[SampledStatistics, Batch, jax.Array]:
        """Statistics with those of samples, the samples with normalised observations, and the factor of their rewards.

        Rewards stay as they are, because a network may see them, and it sees them so when it acts.

        Args:
          statistics: before.
          batch: its trajectory's `extras` hold `discounted_return` [T, B] where rewards are normalised.
          largest: the largest value that critics know; None for no limit.
          hyper: tunable numbers: `discount`, that of lanes' returns, and `reward_scale` where it has an effect.
        """
        trajectory: Any = batch.trajectory
        statistics = self._merge(statistics, trajectory, hyper["discount"])
        timesteps = self.with_normalized_observations(trajectory.timesteps, statistics.observation)
        batch = batch._replace(trajectory=trajectory._replace(timesteps=timesteps))
        if not self.normalize_rewards:
            return statistics, batch, hyper["reward_scale"]
        scale = jnp.sqrt(statistics.returns.variance + 1e-8)
        if largest is not None:
            scale = jnp.maximum(scale, statistics.largest_return / largest)
        return statistics, batch, 1.0 / scale

    def _merge(self, statistics: SampledStatistics, trajectory: Trajectory, discount: jax.Array) -> SampledStatistics:
        """Adds samples [T, B] on all shards: the observation of row 0, and the discounted return of row 1."""
        rows = jax.tree.map(lambda x: x[:1], trajectory.timesteps)
        ones = jnp.ones(rows.first.shape)
        observation = self.merge_observations(statistics.observation, rows.observation, ones)
        if not self.normalize_rewards:
            return statistics._replace(observation=observation)
        # Row 1 is of the same episode, and may be its last one, which no sample has as row 0.
        G = trajectory.timesteps.reward[1:2] + discount * trajectory.extras["discounted_return"][:1]
        largest = collectives.global_max(jnp.abs(G))
        return SampledStatistics(
            observation,
            moments.merge(statistics.returns, G, ones),
            jnp.maximum(statistics.largest_return, largest),
        )
