"""The part of observations that networks see, and the features that are made of it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.nets import action_masks
from podracer.types import ArrayTree, EnvSpec

FEW = 32
"""Arrays of bytes below this are codes, such as MiniGrid's kinds of objects, if they have more than two values."""


def is_image(space: spaces.Space) -> bool:
    """Returns True if observations are images, uint8 [H, W] or [H, W, C]."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def visible(space: spaces.Space) -> dict[str, spaces.Space]:
    """The members of observations that a network sees, by name; "" is what is no `Dict`."""
    if not isinstance(space, spaces.Dict):
        return {"": space}
    return {name: item for name, item in space.items if name != action_masks.NAME and not name.startswith("_")}


def seen_spec(spec: EnvSpec, members: Sequence[str]) -> EnvSpec:
    """The spec of what a network sees that is shown these members of a `Dict`; () for all."""
    if not members:
        return spec
    space = spaces.Dict({name: item for name, item in visible(spec.observation_space).items() if name in members})
    return spec._replace(observation_space=space)


def images(space: spaces.Space) -> dict[str, spaces.Box]:
    """The images among the visible members of observations, by name."""
    return {name: item for name, item in visible(space).items() if is_image(item)}  # type: ignore[misc]


def encode(value: ArrayTree, space: spaces.Space, leading: int) -> jax.Array:
    """Flattens a value of a space into features [..., F], float32.

    Choices become one-hot, and so do bytes below `FEW`, which are codes. Other bytes are scaled to [0, 1]. Left out are
    a mask of actions (`nets.action_masks`), and members whose names begin with an underscore, which are for searches.
    """
    return _encode(value, action_masks.without(space), leading)


def _encode(value: ArrayTree, space: spaces.Space, leading: int) -> jax.Array:
    """`encode` of a space that has no mask, or of a member."""
    if isinstance(space, spaces.Dict):
        visible = [(name, item) for name, item in space.items if not name.startswith("_")]
        return jnp.concatenate([_encode(value[name], item, leading) for name, item in visible], axis=-1)
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(value, space.num_values)
    if isinstance(space, spaces.MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(value[..., i], n) for i, n in enumerate(space.num_values)], axis=-1)
    flat = value.reshape(*value.shape[:leading], int(np.prod(space.shape)))
    if space.dtype != np.uint8:
        return flat.astype(jnp.float32)
    largest = np.max(space.high)
    if 1 < largest < FEW:
        return jax.nn.one_hot(flat, int(largest) + 1).reshape(*flat.shape[:-1], -1)
    return flat.astype(jnp.float32) / (1.0 if largest <= 1 else 255.0)
