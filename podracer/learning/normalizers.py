"""Normalisation of observations and rewards by running statistics, and the settings of it that agents inherit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, spaces
from podracer.learning import moments
from podracer.types import ArrayTree, EnvSpec, TimeStep, Trajectory


class Normalizers(NamedTuple):
    """Running statistics: `learning.moments.Moments`, or () where a normalisation is off.

    Attributes:
      observation: of each part of an observation; () of parts that are not float32.
      returns: of the running discounted return.
    """

    observation: Any
    returns: Any


@dataclasses.dataclass(frozen=True)
class ObservationNormalizerConfig:
    """The settings of normalised observations.

    Attributes:
      normalize_observations: by running mean and variance. Of named observations only parts of float32 are normalised.
      statistics_min_std: m; an observation is divided by the root of its variance plus m^2 (brax: 1e-6; rsl_rl: 1e-2).
      statistics_clip: the largest normalised observation, in standard deviations; None for no limit (brax, rsl_rl).
    """

    normalize_observations: bool = False
    statistics_min_std: float = configs.field(1e-4, low=0.0)
    statistics_clip: float | None = configs.field(10.0, low=0.0)

    def check_observations(self, spec: EnvSpec) -> None:
        """Checks that an environment has observations to normalise.

        Raises:
          ValueError: where it has none.
        """
        if not self.normalize_observations:
            return
        if all(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(spaces.zeros(spec.observation_space))):
            raise ValueError(
                f"normalize_observations=True needs float32 observations, which {spec.name} does not have; leave it "
                "out."
            )

    def initial_moments(self, spec: EnvSpec) -> ArrayTree:
        """The moments of each part of an observation before the first row; () of parts that are not normalised."""
        if not self.normalize_observations:
            return ()
        of_floats = lambda x: moments.initial(x.shape) if x.dtype == jnp.float32 else ()  # noqa: E731
        return jax.tree.map(of_floats, spaces.zeros(spec.observation_space))

    def merge_observations(self, running: ArrayTree, observation: ArrayTree, weight: jax.Array) -> ArrayTree:
        """The moments with those of observations [T, B, ...] of weights [T, B], on all shards."""
        if not self.normalize_observations:
            return running
        return _map_moments(lambda m, x: moments.merge(m, x, weight) if m else m, running, observation)

    def with_normalized_observations(self, timesteps: TimeStep, running: ArrayTree) -> TimeStep:
        """Rows with normalised observations."""
        if not self.normalize_observations:
            return timesteps
        limits = {"min_std": self.statistics_min_std, "largest": self.statistics_clip}
        normalize = lambda m, x: moments.normalize(x, m, **limits) if m else x  # noqa: E731
        return timesteps._replace(observation=_map_moments(normalize, running, timesteps.observation))


@dataclasses.dataclass(frozen=True)
class NormalizerConfig(ObservationNormalizerConfig):
    """The settings of normalisation, beside those of `ObservationNormalizerConfig`.

    Attributes:
      clip_rewards: to [-1, 1], as is usual for Atari.
      normalize_rewards: by the running standard deviation of the discounted return, clipped to [-10, 10].
      reward_scale: factor of rewards that are not normalised; reported returns are without it.
    """

    clip_rewards: bool = False
    normalize_rewards: bool = True
    reward_scale: float = configs.field(1.0, low=0.0, tunable=True)

    def check_normalization(self, spec: EnvSpec | None = None) -> None:
        """Checks that settings go together, and that they fit an environment.

        Raises:
          ValueError: where they do not.
        """
        check_reward_scale(self.reward_scale, self.normalize_rewards)
        if spec is not None:
            self.check_observations(spec)

    def initial_normalizers(self, spec: EnvSpec) -> Normalizers:
        """The statistics before the first row."""
        return Normalizers(self.initial_moments(spec), moments.initial(()) if self.normalize_rewards else ())

    def preprocess(self, timesteps: TimeStep, observation_moments: ArrayTree) -> TimeStep:
        """Clips rewards and normalises observations."""
        if self.clip_rewards:
            timesteps = timesteps._replace(reward=jnp.clip(timesteps.reward, -1.0, 1.0))
        return self.with_normalized_observations(timesteps, observation_moments)

    def update_normalizers(self, normalizers: Normalizers, trajectory: Trajectory) -> Normalizers:
        """Adds a rollout; its `extras` hold `discounted_return` [T, B] where rewards are normalised."""
        timesteps = jax.tree.map(lambda x: x[:-1], trajectory.timesteps)
        observation, discounted_return = normalizers
        # Where two rows in succession are `first`, the earlier one is a filler: its lane waited for an environment.
        valid = (~(timesteps.first & trajectory.timesteps.first[1:])).astype(jnp.float32)
        observation = self.merge_observations(observation, timesteps.observation, valid)
        if self.normalize_rewards:
            valid = 1.0 - timesteps.first.astype(jnp.float32)  # a first row has no reward
            discounted_return = moments.merge(discounted_return, trajectory.extras["discounted_return"], valid)
        return Normalizers(observation, discounted_return)

    def scale_rewards(self, reward: jax.Array, return_moments: Any, hyper: Mapping[str, jax.Array]) -> jax.Array:
        """Rewards as values are learnt of them (Engstrom et al. 2020)."""
        if not self.normalize_rewards:
            return hyper["reward_scale"] * reward
        return jnp.clip(reward * lax.rsqrt(return_moments.variance + 1e-8), -10.0, 10.0)


def check_reward_scale(reward_scale: float, normalize_rewards: bool) -> None:
    """Checks that a factor of rewards has an effect.

    Raises:
      ValueError: where rewards are normalised.
    """
    if normalize_rewards and reward_scale != 1.0:
        raise ValueError(
            f"reward_scale={reward_scale} has no effect with normalize_rewards=True, which divides by the scale of "
            "returns; use normalize_rewards=False."
        )


def _map_moments(function: Callable[..., Any], running: ArrayTree, *trees: ArrayTree) -> ArrayTree:
    """`function(moments, *leaves)` of every part of an observation; moments are () of parts without any."""
    return jax.tree.map(function, running, *trees, is_leaf=lambda m: isinstance(m, tuple))
