"""The gate between an environment and an agent: converts observations and actions between their two forms.

A foreign environment may number its choices from another number than 0, put the channels of images first, and use
64-bit numbers, which JAX does not have. Spaces (`podracer.spaces`) describe the agent's form. Every value passes here:
the rows of host environments, and the observations and actions of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from podracer import spaces
from podracer.types import ArrayTree, EnvSpec, HostStep

MOST_CHANNELS = 4
"""An image has channels first if its first axis is at most this long, and its last axis longer."""

Choices = spaces.Discrete | spaces.MultiDiscrete


def to_agent(
    value: Any, space: spaces.Space, lead: tuple[int, ...] = (), *, name: str = "the observation", copy: bool = False
) -> ArrayTree:
    """Converts an environment's observation to the agent's form.

    Args:
      value: array [*lead, ...], or a mapping of arrays.
      space: the agent's space.
      lead: leading dims, (B,) for a batch.
      name: name of the value, for messages.
      copy: True never returns the arrays of `value`.

    Returns:
      Arrays [*lead, *space.shape] of the space's dtype.

    Raises:
      ValueError: for a value that does not fit the space.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or not {key for key, _ in space.items} <= set(value):
            found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{name} is {found}; the environment shows {space}.")
        return {key: to_agent(value[key], item, lead, name=f"{name}[{key!r}]", copy=copy) for key, item in space.items}
    array = np.asarray(value)
    if array.shape != (*lead, *space.shape):
        array = _channels_last(array, space.shape, lead)
    if array is None or not (array.dtype == space.dtype or np.can_cast(array.dtype, space.dtype, "same_kind")):
        array, batch = np.asarray(value), f" in a batch of {lead[0]}" if lead else ""
        raise ValueError(f"{name} holds {array.dtype} {array.shape}; the environment shows {space}{batch}.")
    if not isinstance(space, spaces.Box):
        array = array.astype(np.int64) - np.asarray(space.start) if space.start else array
        _require_choices(array, space, name)
    elif space.dtype.kind in "iu" and not np.can_cast(array.dtype, space.dtype):
        limits = np.iinfo(space.dtype)
        _require((array >= limits.min) & (array <= limits.max), array, name, f"too large for {space.dtype}")
    return array.astype(space.dtype) if copy or array.dtype != space.dtype else array


def to_environment(value: ArrayTree, space: spaces.Space) -> ArrayTree:
    """Converts a value of a space to the environment's form: choices are counted from the space's `start`."""
    if isinstance(space, spaces.Dict):
        return {key: to_environment(value[key], item) for key, item in space.items}
    return value + np.asarray(space.start) if isinstance(space, Choices) and space.start else value


def choices(actions: Any, space: Choices) -> np.ndarray:
    """Converts actions [B, ...], counted from 0, to int32.

    Raises:
      ValueError: for an action outside the space.
    """
    actions = np.asarray(actions, np.int32)
    codes = actions.view(np.uint32)  # negative ones are huge
    if isinstance(space, spaces.Discrete) and codes.size:
        outside = codes.ravel()[codes.argmax()] >= space.num_values  # every step of an actor: faster than any()
    else:
        outside = (codes >= np.asarray(space.num_values, np.uint32)).any()
    if outside:
        raise ValueError(f"actions {actions.min()} to {actions.max()} are not in {space}.")
    return actions


def check_choices(rows: ArrayTree, space: spaces.Space, name: str = "the observation") -> None:
    """Checks the choices in observations [B, ...]: the one-hot code of one outside its space would be all 0.

    Raises:
      ValueError: naming the choice.
    """
    if isinstance(space, spaces.Dict):
        for key, item in space.items:
            check_choices(rows[key], item, f"{name}[{key!r}]")
    elif not isinstance(space, spaces.Box):
        _require_choices(rows, space, name)


def check_dtypes(spec: EnvSpec) -> None:
    """Checks that JAX has the dtypes of an environment's observations.

    Raises:
      ValueError: for a space of 64-bit numbers.
    """

    def check(space: spaces.Space, name: str) -> None:
        if isinstance(space, spaces.Dict):
            for key, item in space.items:
                check(item, f"{name}[{key!r}]")
        elif space.dtype.itemsize > 4 and not _has_64_bits():
            raise ValueError(f"{spec.name}: {name} is {space}, and JAX has no {space.dtype}; use float32 or int32.")

    check(spec.observation_space, "the observation")


def _has_64_bits() -> bool:
    import jax  # not needed by processes that only step environments

    return jax.config.jax_enable_x64  # type: ignore[attr-defined]


def _channels_last(array: np.ndarray, shape: tuple[int, ...], lead: tuple[int, ...]) -> np.ndarray | None:
    """Moves the channels of images [*lead, C, H, W] last, or drops a single one; None for other shapes."""
    n = len(lead)
    if array.shape[:n] != lead or array.ndim != n + 3 or array.shape[n] > MOST_CHANNELS:
        return None
    channels, *size = array.shape[n:]
    if shape != (*size, channels) and (channels != 1 or shape != tuple(size)):
        return None
    return np.ascontiguousarray(np.moveaxis(array, n, -1)).reshape(*lead, *shape)


def _require_choices(counted: np.ndarray, space: Choices, name: str) -> None:
    _require(
        (counted >= 0) & (counted < np.asarray(space.num_values)), counted, name, f"counted from 0, not in {space}"
    )


def _require(ok: np.ndarray, array: np.ndarray, name: str, problem: str) -> None:
    if not ok.all():
        value = array[tuple(np.argwhere(~ok)[0])]
        raise ValueError(f"{name} is {value}, {problem}; widen the environment's space, or scale what it shows.")


def check_rows(lanes: np.ndarray, rows: HostStep, spec: EnvSpec, num_lanes: int | None = None) -> None:
    """Checks the first rows of host environments that return those of all lanes at once.

    Args:
      lanes: int [B]; whose rows they are.
      rows: of the environments, [B].
      spec: of the environments; messages have its name.
      num_lanes: B; None for as many as there are rows.

    Raises:
      ValueError: where they are not of all lanes, or not what the spec says.
    """
    import jax  # not needed by processes that only step environments

    B = rows.scalars.shape[1] if num_lanes is None else num_lanes
    if not np.array_equal(lanes, np.arange(B)):
        raise ValueError(f"{spec.name} returned lanes {lanes}; actors need all {B}, in order, at every step.")
    declared, received = (
        {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (HostStep.zeros(spec, B), rows)
    )
    for name in sorted({*declared, *received}):
        if declared.get(name) != received.get(name):
            raise ValueError(
                f"{spec.name}'s rows have {received.get(name, 'nothing')} in {name[1:]}, where its spec says "
                f"{declared.get(name, 'nothing')}; [6, B] scalars need EnvSpec(raw_scores=True)."
            )
    check_choices(rows.observation, spec.observation_space)
