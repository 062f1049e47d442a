"""The messages of session.proto, and the payloads of rows and actions, checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer import spaces
from podracer.remote import bounds
from podracer.types import EnvSpec, HostStep

PROTOCOL = 1
MAX_TEXT = 2048
MAX_LANES = 2**16
OVERHEAD = 64 * 1024
"""Bytes of a message beside its payload."""

_FLOAT32 = np.dtype("<f4")
_PAYLOAD_TAG = 15 << 3 | 2


class ProtocolError(ValueError):
    """A peer sent what it must not; the message says what, in one line."""


def printable(text: str) -> str:
    """A peer's text for our messages: one line of bounded length."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_TEXT])


# Messages


def pack(message: Any, parts: Sequence[Any] = ()) -> bytes:
    """A message with a payload, the concatenation of parts, in front: `unpack` need not copy it."""
    if not parts:
        return message.SerializeToString()
    size = sum(memoryview(part).nbytes for part in parts)
    return b"".join((bytes((_PAYLOAD_TAG,)), _varint(size), *parts, message.SerializeToString()))


def unpack(kind: Any, data: bytes) -> tuple[Any, memoryview]:
    """A message and its payload.

    Raises:
      ProtocolError: where this is none.
    """
    payload, rest = memoryview(b""), data
    try:
        if data and data[0] == _PAYLOAD_TAG:
            size, at = _read_varint(data)
            if at + size > len(data):
                raise ProtocolError("a message is cut short.")
            payload, rest = memoryview(data)[at : at + size], data[at + size :]
        message = kind.FromString(rest)
    except ProtocolError:
        raise
    except Exception:  # protobuf's own, whose type is not public
        raise ProtocolError(f"{len(data)} bytes are no {kind.DESCRIPTOR.name}.") from None
    if message.payload:  # of a sender that writes its fields in another order; the last one counts
        payload = memoryview(message.payload)
    return message, payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes) -> tuple[int, int]:
    """The number behind the first byte, and where it ends."""
    value = 0
    for i, byte in enumerate(data[1:6]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, i + 2
    raise ProtocolError("a payload has no length.")


# Payloads


class Leaf(NamedTuple):
    """An array of an observation or action, without its lanes.

    Attributes:
      name: for messages.
      space: what its values are.
      dtype: little-endian.
    """

    name: str
    space: Any
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one lane."""
        return math.prod(self.space.shape) * self.dtype.itemsize


def leaves(space: spaces.Space, name: str) -> list[Leaf]:
    """The leaves of a space, by sorted name."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, item in space.items for leaf in leaves(item, f"{name}[{printable(key)!r}]")]
    return [Leaf(name, space, space.dtype.newbyteorder("<"))]


class Layout:
    """The places of the numbers of rows and actions in payloads.

    Args:
      spec: of the environment.
      largest: that rewards, scores, and numbers of observations without bounds may be, in either direction.
    """

    def __init__(self, spec: EnvSpec, largest: float = float(np.finfo(np.float32).max)):
        self.spec, self.largest = spec, largest
        self.scalar_rows = 6 if spec.raw_scores else 4
        self.observation = leaves(spec.observation_space, "observation")
        self.action = leaves(spec.action_space, "action")
        fixed = 4 * (self.scalar_rows + len(spec.metrics))
        self.row_bytes = fixed + sum(leaf.num_bytes for leaf in self.observation)
        self.action_bytes = sum(leaf.num_bytes for leaf in self.action)
        self._checks = [_value_check(leaf, largest) for leaf in self.observation]

    def pack_rows(self, step: HostStep) -> list[Any]:
        """Rows [n] as the parts of a payload."""
        arrays = [step.scalars, *([step.metrics] if self.spec.metrics else [])]
        arrays += _flat(step.observation)
        return [_bytes(x) for x in arrays]

    def require(self, step: HostStep, num_lanes: int) -> None:
        """Checks dtypes and shapes of rows [n], which do not cross with them.

        Raises:
          ValueError: naming the leaf, and what it is and should be.
        """
        arrays = _flat(step.observation)
        if len(arrays) != len(self.observation):
            raise ValueError(f"observations have {len(arrays)} leaves, not {len(self.observation)}.")
        for leaf, x in zip(self.observation, arrays):
            _require_array(leaf.name, x, leaf.dtype, (num_lanes, *leaf.space.shape))
        _require_array("scalars", step.scalars, _FLOAT32, (self.scalar_rows, num_lanes))
        if self.spec.metrics:
            _require_array("metrics", step.metrics, _FLOAT32, (len(self.spec.metrics), num_lanes))

    def unpack_rows(self, payload: memoryview, num_lanes: int) -> HostStep:
        """Rows [n] whose arrays are the payload's bytes.

        Raises:
          ProtocolError: for a payload of another length.
        """
        self._require(len(payload), num_lanes * self.row_bytes, "rows", num_lanes)
        at = 0

        def take(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
            nonlocal at
            count = math.prod(shape)
            array = np.frombuffer(payload, dtype, count, at).reshape(shape)
            at += array.nbytes
            return array

        scalars = take("<f4", (self.scalar_rows, num_lanes))
        metrics = take("<f4", (len(self.spec.metrics), num_lanes)) if self.spec.metrics else ()
        arrays = iter([take(leaf.dtype, (num_lanes, *leaf.space.shape)) for leaf in self.observation])
        return HostStep(_nested(self.spec.observation_space, arrays), scalars, metrics)

    def pack_actions(self, actions: Any) -> list[Any]:
        """Actions [n] as the parts of a payload."""
        return [_bytes(np.asarray(x, leaf.dtype)) for x, leaf in zip(_flat(actions), self.action)]

    def unpack_actions(self, payload: memoryview, num_lanes: int) -> Any:
        """Actions [n].

        Raises:
          ProtocolError: for a payload of another length.
        """
        self._require(len(payload), num_lanes * self.action_bytes, "actions", num_lanes)
        (leaf,) = self.action
        return np.frombuffer(payload, leaf.dtype).reshape(num_lanes, *leaf.space.shape)

    @staticmethod
    def _require(got: int, expected: int, what: str, num_lanes: int) -> None:
        if got != expected:
            raise ProtocolError(f"{what} of {num_lanes} lanes have {got} bytes, not {expected}.")

    def check_rows(self, step: HostStep, opens: np.ndarray) -> None:
        """Checks that rows keep the contract of `podracer.types`.

        Args:
          step: rows [n].
          opens: bool [n]; whether these are the first rows, or the ones before were `last`.

        Raises:
          ProtocolError: naming lane, leaf and value.
        """
        scalars = step.scalars
        reward, first, last = scalars[0], scalars[2], scalars[3]
        flags = scalars[1:4]
        sound = (
            np.array_equal(first, opens)
            and not ((flags != 0) & (flags != 1)).any()
            and not ((first > 0) & ((reward != 0) | (last > 0))).any()
            and (np.abs(scalars) <= self.largest).all()
            and (not self.spec.metrics or np.isfinite(step.metrics).all())
        )
        if not sound:
            self._explain(step, opens)
        for check, x in zip(self._checks, _flat(step.observation)):
            if check:
                check(x)

    def _explain(self, step: HostStep, opens: np.ndarray) -> None:
        reward, discount, first, last = step.scalars[:4]
        names = ("reward", "discount", "first", "last", "score", "over")
        binary = {"discount": discount, "first": first, "last": last}
        wrong: list[tuple[str, np.ndarray, np.ndarray]] = [
            (name, x, ~np.isfinite(x)) for name, x in zip(names, step.scalars)
        ]
        wrong += [(name, x, (x != 0) & (x != 1)) for name, x in binary.items()]
        wrong += [
            ("first", first, first != opens),
            ("last", last, (first == 1) & (last == 1)),
            ("reward of a first row", reward, (first == 1) & (reward != 0)),
        ]
        if self.spec.metrics:
            wrong += [(f"metric {n}", x, ~np.isfinite(x)) for n, x in zip(self.spec.metrics, step.metrics)]
        for name, x, bad in wrong:
            if bad.any():
                lane = int(np.argmax(bad))
                raise ProtocolError(f"lane {lane}: {name} is {x[lane]:g}, which it cannot be there.")
        index, lane = np.argwhere(np.abs(step.scalars) > self.largest)[0]
        raise ProtocolError(
            f"lane {lane}: {names[index]} is {step.scalars[index, lane]:g}, beyond the learner's "
            f"max_magnitude={self.largest:g}."
        )


def _value_check(leaf: Leaf, largest: float) -> Callable[[np.ndarray], None] | None:
    """The check of a leaf: its values lie within limits, or are one of so many choices."""

    def complain(x: np.ndarray, bad: np.ndarray, low: Any, high: Any) -> None:
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        low, high = (np.broadcast_to(bound, x.shape)[at] for bound in (low, high))
        raise ProtocolError(
            f"lane {at[0]}: {leaf.name}{list(at[1:]) or ''} is {x[at]:g}, which it cannot be: its space, or "
            f"max_magnitude where that has no bounds, allows {low:g} to {high:g}."
        )

    if isinstance(leaf.space, spaces.Discrete | spaces.MultiDiscrete):
        limit = np.asarray(leaf.space.num_values)

        def known(x: np.ndarray) -> None:
            if ((x < 0) | (x >= limit)).any():
                complain(x, (x < 0) | (x >= limit), 0, limit - 1)

        return known
    if (found := bounds.limits(leaf.space, largest)) is None:
        return None
    low, high = found

    def within(x: np.ndarray) -> None:
        if not (ok := (x >= low) & (x <= high)).all():
            complain(x, ~ok, low, high)

    return within


def _require_array(name: str, x: Any, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if (x.dtype != dtype and x.dtype.newbyteorder("<") != dtype) or x.shape != shape:
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}, and not {dtype}{list(shape)}, as the environment says.")


def _flat(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [x for key in sorted(tree) for x in _flat(tree[key])]
    return [tree]


def _nested(space: spaces.Space, arrays: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _nested(item, arrays) for name, item in space.items}
    return next(arrays)


def _bytes(x: np.ndarray) -> memoryview:
    x = np.ascontiguousarray(x, x.dtype.newbyteorder("<"))
    return memoryview(x.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
