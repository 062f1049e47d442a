"""The distribution of an action space."""

from __future__ import annotations

from podracer import spaces
from podracer.distributions.choices import categorical, multi_categorical
from podracer.distributions.distribution import Distribution
from podracer.distributions.gaussians import FREE_STD, Squashing, Std, clipped_gaussian, tanh_gaussian


def for_space(space: spaces.Space, policy: Squashing = "clipped", std: Std = FREE_STD) -> Distribution:
    """Makes the distribution for an action space.

    Args:
      space: of actions.
      policy: the way from samples to the bounds of a Box.
      std: of a Gaussian, for a Box.

    Raises:
      ValueError: for a Box without finite bounds, or a space that cannot be an action space.
    """
    if isinstance(space, spaces.Discrete):
        return categorical(space.num_values)
    if isinstance(space, spaces.MultiDiscrete):
        return multi_categorical(space.num_values)
    if isinstance(space, spaces.Box):
        return tanh_gaussian(space, std) if policy == "tanh" else clipped_gaussian(space, std)
    raise ValueError(f"action space {space} is not supported; use Discrete, MultiDiscrete or Box.")
