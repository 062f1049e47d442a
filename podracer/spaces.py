"""Spaces: the sets of valid actions and observations.

Four kinds cover every environment in the library: `Discrete` (one choice), `MultiDiscrete` (several choices taken
at once), `Box` (an array of numbers between bounds) and `Dict` (named observations). They are plain frozen
dataclasses, so they hash, compare and print well, and need JAX only where they are sampled.

Agents and this library's environments count choices from 0. Foreign environments may count from another number, the
`start`: the gate between the two adds and subtracts it (`podracer.environments.gate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax


MOST_COMBINATIONS = 10_000
"""The largest number of combinations of choices that become one choice, each an output of a network."""


@dataclasses.dataclass(frozen=True, repr=False)
class Discrete:
    """One of `num_values` choices: an int32 in [0, num_values). An environment may number the first one `start`."""

    num_values: int
    start: int = 0

    def __post_init__(self):
        if self.num_values < 1:
            raise ValueError(f"Discrete(num_values={self.num_values}): use at least 1 value.")

    def __repr__(self) -> str:
        return f"Discrete(num_values={self.num_values}{f', start={self.start}' if self.start else ''})"

    shape = ()
    dtype = np.dtype(np.int32)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws a uniform sample, int32 []."""
        import jax

        return jax.random.randint(key, (), 0, self.num_values)

    def contains(self, value: Any) -> bool:
        """Returns True if a concrete `value` (shape [] integer) lies in the space."""
        array = np.asarray(value)
        return array.shape == () and array.dtype.kind in "iu" and 0 <= int(array) < self.num_values


@dataclasses.dataclass(frozen=True, repr=False)
class MultiDiscrete:
    """Several choices at once, the i-th among `num_values[i]`: an int32 array [len(num_values)].

    `start` has the environment's number of each first value; it is () if all are 0.
    """

    num_values: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "num_values", tuple(int(n) for n in self.num_values))
        object.__setattr__(self, "start", tuple(int(n) for n in self.start) if any(self.start) else ())
        if not self.num_values or min(self.num_values) < 1:
            raise ValueError(f"MultiDiscrete(num_values={self.num_values}): give at least one head, each of 1 or more.")
        if self.start and len(self.start) != len(self.num_values):
            raise ValueError(f"{self}: give a start for each of its {len(self.num_values)} heads, or none.")

    def __repr__(self) -> str:
        return f"MultiDiscrete(num_values={self.num_values}{f', start={self.start}' if self.start else ''})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.num_values),)

    dtype = np.dtype(np.int32)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws a uniform sample, int32 [len(num_values)]."""
        import jax
        import jax.numpy as jnp

        return jax.random.randint(key, self.shape, 0, jnp.asarray(self.num_values))

    def contains(self, value: Any) -> bool:
        """Returns True if a concrete `value` (shape [len(num_values)] integer) lies in the space."""
        array = np.asarray(value)
        ok = array.shape == self.shape and array.dtype.kind in "iu"
        return bool(ok and np.all(array >= 0) and np.all(array < np.asarray(self.num_values)))


@dataclasses.dataclass(frozen=True)
class Box:
    """An array of `shape` and `dtype` with every element in [low, high].

    Bounds are numbers, or arrays or lists if elements differ: `Box([-1.0, -0.5], [1.0, 2.0])`. A bound is stored as a
    number if it is the same for all elements, and else as nested tuples of `shape`, so that spaces hash.

    Raises:
      ValueError: for bounds that do not fit the shape, or a low one above a high one.
    """

    low: Any
    high: Any
    shape: tuple[int, ...] = None  # type: ignore[assignment] - that of the bounds, unless given
    dtype: Any = np.float32

    def __post_init__(self):
        where = f"Box(low={self.low}, high={self.high})"
        low, high = np.asarray(self.low), np.asarray(self.high)
        shape = np.broadcast_shapes(low.shape, high.shape) if self.shape is None else tuple(int(n) for n in self.shape)
        if any(bound.shape and bound.shape != shape for bound in (low, high)):
            raise ValueError(f"{where}: its bounds have shapes {low.shape} and {high.shape}; use numbers, or {shape}.")
        if not np.all(low <= high):
            raise ValueError(f"{where}: low must not exceed high.")
        object.__setattr__(self, "low", _bound(self.low, low))
        object.__setattr__(self, "high", _bound(self.high, high))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def bounded(self) -> bool:
        """True if all bounds are finite."""
        return bool(np.all(np.isfinite(self.low)) and np.all(np.isfinite(self.high)))

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the smallest and largest values of `dtype` within the bounds: two arrays [] or of `shape`.

        The nearest number of fewer bits may lie outside: 0.85 as float32 is 0.85000002.
        """
        low, high = np.asarray(self.low), np.asarray(self.high)
        if self.dtype.kind in "iu":
            return np.ceil(low).astype(self.dtype), np.floor(high).astype(self.dtype)
        least, most = low.astype(self.dtype), high.astype(self.dtype)
        least = np.where(least < low, np.nextafter(least, self.dtype.type(np.inf)), least)
        return least, np.where(most > high, np.nextafter(most, self.dtype.type(-np.inf)), most)

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws a uniform sample in [low, high] (standard normal if a bound is infinite), of `shape` and `dtype`."""
        import jax
        import jax.numpy as jnp

        if self.bounded and self.dtype.kind in "iu":
            least, most = self.limits()
            count = np.minimum(most.astype(np.int64) - least.astype(np.int64) + 1, 2**32 - 1).astype(np.uint32)
            above = jax.random.randint(key, self.shape, 0, jnp.asarray(count), jnp.uint32)
            return jnp.asarray(least) + above.astype(self.dtype)
        low, high = (jnp.asarray(x) if isinstance(x, tuple) else x for x in (self.low, self.high))
        if not self.bounded:
            return jnp.clip(jax.random.normal(key, self.shape), low, high).astype(self.dtype)
        with np.errstate(over="ignore"):
            if not np.all(np.isfinite(np.asarray(self.high, self.dtype) - np.asarray(self.low, self.dtype))):
                share = jax.random.uniform(key, self.shape, self.dtype)  # of a width beyond the largest number
                return low * (1 - share) + high * share
        return jax.random.uniform(key, self.shape, self.dtype, low, high)

    def contains(self, value: Any) -> bool:
        """Returns True if a concrete `value` has this shape and dtype and lies within the bounds."""
        array = np.asarray(value)
        ok = array.shape == self.shape and array.dtype == self.dtype
        return bool(ok and np.all(array >= self.low) and np.all(array <= self.high))


def _bound(given: Any, array: np.ndarray) -> Any:
    """Converts a bound to a number, or to nested tuples if elements differ."""
    if not array.shape:
        return array.item() if isinstance(given, np.ndarray | np.generic) else given
    first = array.flat[0] if array.size else 0
    if np.all(array == first):
        return first.item() if isinstance(first, np.generic) else first
    return _tuples(array.tolist())


def _tuples(nested: Any) -> Any:
    return tuple(map(_tuples, nested)) if isinstance(nested, list) else nested


@dataclasses.dataclass(frozen=True)
class Dict:
    """Named spaces; a value is a dict with the same names. Pass a mapping; it is stored as sorted pairs to hash."""

    items: tuple[tuple[str, Space], ...]

    def __init__(self, spaces: Mapping[str, Space]):
        if not spaces:
            raise ValueError("Dict({}): give at least one named space.")
        object.__setattr__(self, "items", tuple(sorted(spaces.items())))

    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Draws a sample of every member."""
        import jax

        keys = jax.random.split(key, len(self.items))
        return {name: space.sample(k) for (name, space), k in zip(self.items, keys)}

    def contains(self, value: Any) -> bool:
        """Returns True for a mapping with exactly these names and values inside their spaces."""
        ok = isinstance(value, Mapping) and set(value) == {name for name, _ in self.items}
        return bool(ok and all(space.contains(value[name]) for name, space in self.items))


Space = Discrete | MultiDiscrete | Box | Dict


def zeros(space: Space) -> Any:
    """Makes a value of zeros with the space's structure, shapes and dtypes, as arrays of NumPy."""
    if isinstance(space, Dict):
        return {name: zeros(item) for name, item in space.items}
    return np.zeros(space.shape, space.dtype)


def to_json(space: Space) -> dict[str, Any]:
    """Converts a space to JSON."""
    if isinstance(space, Dict):
        return {"kind": "Dict", "spaces": {name: to_json(item) for name, item in space.items}}
    if isinstance(space, Box):
        low, high = (_json_bound(bound) for bound in (space.low, space.high))
        return {"kind": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    numbers = {"num_values": space.num_values} | ({"start": space.start} if space.start else {})
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}
    return {"kind": type(space).__name__} | plain


def _json_bound(bound: Any) -> Any:
    """Converts a bound to JSON; infinite numbers become strings, because JSON has none."""
    if isinstance(bound, tuple):
        return [_json_bound(item) for item in bound]
    return bound if np.isfinite(bound) else str(bound)


def from_json(value: Mapping[str, Any]) -> Space:
    """Inverts `to_json`."""
    if value["kind"] == "Dict":
        return Dict({name: from_json(item) for name, item in value["spaces"].items()})
    if value["kind"] == "Box":

        def bound(x: Any) -> Any:
            return tuple(map(bound, x)) if isinstance(x, list) else float(x)

        return Box(bound(value["low"]), bound(value["high"]), tuple(value["shape"]), np.dtype(value["dtype"]))
    kind = {"Discrete": Discrete, "MultiDiscrete": MultiDiscrete}[value["kind"]]
    return kind(**{name: value[name] for name in ("num_values", "start") if name in value})
