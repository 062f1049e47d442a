"""Masks of actions: an observation's member `action_mask` says which actions are legal, and agents take no other.

    legal = masks.legal(spec, observation)     # bool [..., P], or None without a mask
    q = masks.lower(q, legal)

P is the number of actions; of `MultiDiscrete` the sum of its numbers of values, one choice after another, as a
policy's outputs are. `masked` does both around a network.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.nets.network import Inputs, Network
from podracer.types import ArrayTree, EnvSpec

NAME = "action_mask"
"""The member of a `Dict` of observations, at its top level, that marks legal actions by 1."""

LOWEST = float(np.finfo(np.float32).min)
"""An illegal output. It is finite, so that a softmax over illegal outputs alone is not NaN; no logit is below it."""


def present(spec: EnvSpec) -> bool:
    """Returns True if the observations of an environment have a mask."""
    space = spec.observation_space
    return isinstance(space, spaces.Dict) and NAME in dict(space.items)


def without(space: spaces.Space) -> spaces.Space:
    """Removes the mask from a space of observations: agents follow it, and do not see it."""
    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({name: item for name, item in space.items if name != NAME})


def check(spec: EnvSpec) -> None:
    """Checks that the mask of an environment, if it has one, fits its actions.

    Raises:
      ValueError: for a mask that does not.
    """
    if not present(spec):
        return
    space, members = spec.action_space, dict(spec.observation_space.items)  # type: ignore[union-attr]
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        raise ValueError(f"{spec.name} shows {NAME} with {space}: only choices can be masked; call it another name.")
    mask, size = members[NAME], sum(_num_values(space))
    if isinstance(mask, spaces.Dict) or mask.shape != (size,) or mask.dtype.kind not in "iub":
        found = "a Dict" if isinstance(mask, spaces.Dict) else f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(f"{spec.name}: {NAME} is {found}, and {space} needs whole numbers or truth values [{size}].")
    if all(name == NAME or name.startswith("_") for name in members):
        raise ValueError(
            f"{spec.name} shows nothing but {NAME}, which agents follow and do not see; show it under a second name."
        )


def legal(spec: EnvSpec, observation: ArrayTree) -> jax.Array | None:
    """Reads the mask of observations [...]: bool [..., P], or None if the environment has none.

    A choice of which nothing is legal counts as one of which everything is: EnvPool's last rows are all 0.
    """
    if not present(spec):
        return None
    heads = _heads(spec, observation)
    return jnp.concatenate([head | ~jnp.any(head, axis=-1, keepdims=True) for head in heads], axis=-1)


def lower(outputs: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Sets illegal outputs [..., P] to `LOWEST`; the gradient of what they were is 0."""
    return outputs if legal is None else jnp.where(legal, outputs, LOWEST)


def mean(x: jax.Array, legal: jax.Array | None, axis: int = -1) -> jax.Array:
    """The mean over legal actions, whose axis is kept with size 1; `legal` is of the shape of x."""
    if legal is None:
        return jnp.mean(x, axis=axis, keepdims=True)
    # The mean of all, times A / n: with nothing illegal that is 1, and no bit changes.
    n = jnp.sum(legal.astype(jnp.float32), axis=axis, keepdims=True)
    return jnp.mean(jnp.where(legal, x, 0.0), axis=axis, keepdims=True) * (x.shape[axis] / n)


def masked(network: Network, spec: EnvSpec) -> Network:
    """Wraps a network so that its outputs [T, B, P] are lowered where they are illegal; itself without a mask.

    Raises:
      ValueError: for a mask that does not fit the actions.
    """
    check(spec)
    if not present(spec):
        return network

    def apply(params: ArrayTree, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        outputs, values, state = network.apply(params, inputs, state)
        return lower(outputs, legal(spec, inputs.observation)), values, state

    return network._replace(apply=apply)


def shares(spec: EnvSpec, observation: ArrayTree, weight: jax.Array) -> dict[str, jax.Array]:
    """Sums of a mask's numbers over rows, float32 []: of `legal`, the share of actions, and of `none_legal`.

    Args:
      spec: of an environment with a mask.
      observation: [...].
      weight: float32 [...]; of rows.
    """
    heads = _heads(spec, observation)
    # One sum serves both metrics: with small batches the number of operations decides.
    counts = jnp.stack([jnp.sum(head, axis=-1, dtype=jnp.float32) for head in heads])
    return {
        "mask/legal": jnp.sum(weight * jnp.sum(counts, axis=0)) / sum(_num_values(spec.action_space)),
        "mask/none_legal": jnp.sum(weight * jnp.any(counts == 0, axis=0).astype(jnp.float32)),
    }


def _heads(spec: EnvSpec, observation: ArrayTree) -> list[jax.Array]:
    """The mask of each choice, bool [..., P_i]. Bytes are compared as bytes, for wider numbers take longer."""
    mask = observation[NAME]
    mask = mask if mask.dtype == jnp.bool_ else mask > 0
    return jnp.split(mask, [int(n) for n in np.cumsum(_num_values(spec.action_space))[:-1]], axis=-1)


def _num_values(space: Any) -> tuple[int, ...]:
    """The number of values of each choice."""
    return (space.num_values,) if isinstance(space, spaces.Discrete) else space.num_values
