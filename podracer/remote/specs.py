"""Specs of environments as messages, checked where they come from a peer, and compared."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from podracer import spaces
from podracer.remote import session_pb2 as pb
from podracer.remote.wire import Layout, ProtocolError, leaves, printable
from podracer.types import EnvSpec

MAX_OPTIONS = 16 * 1024
MAX_LEAVES, MAX_DIMS, MAX_ROW_BYTES = 64, 8, 16 * 1024 * 1024
MACHINE = ("num_threads", "vectorization")
"""Options that say where environments run, and not what they are: they are neither compared nor taken over."""

_DTYPES = {np.dtype(code): code for code in ("u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4")}


def to_proto(spec: EnvSpec) -> Any:
    """A spec as a message.

    Raises:
      ValueError: where it cannot be one.
    """
    if spec.num_players != 1:
        raise ValueError(f"{spec.name} is a game for two, whose rows do not cross the wire.")
    return pb.Spec(
        name=spec.name,
        observation=_space_to_proto(spec.observation_space),
        action=_space_to_proto(spec.action_space),
        max_episode_steps=spec.max_episode_steps or 0,
        scalar_rows=6 if spec.raw_scores else 4,
        metrics=spec.metrics,
    )


def _space_to_proto(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        items = space.items
        return pb.Space(dict=pb.Named(name=[n for n, _ in items], space=[_space_to_proto(s) for _, s in items]))
    if isinstance(space, spaces.Discrete):
        return pb.Space(discrete=space.num_values, start=[space.start] if space.start else [])
    if isinstance(space, spaces.MultiDiscrete):
        return pb.Space(multi=pb.Heads(n=space.num_values), start=space.start)
    if space.dtype not in _DTYPES:
        raise ValueError(f"{space.dtype} does not cross the wire; {', '.join(map(str, _DTYPES))} do.")
    bounds = {n: np.ravel(np.asarray(x, np.float64)) for n, x in (("low", space.low), ("high", space.high))}
    return pb.Space(box=pb.Box(**bounds, shape=space.shape, dtype=_DTYPES[space.dtype]))


def from_proto(message: Any) -> EnvSpec:
    """The spec that a peer sent.

    Raises:
      ProtocolError: where it makes no sense, or is too large.
    """
    try:
        if message.scalar_rows not in (4, 6):
            raise ProtocolError(f"a spec has {message.scalar_rows} scalars a row; there are 4 or 6.")
        spec = EnvSpec(
            name=printable(message.name),
            observation_space=_space_from_proto(message.observation),
            action_space=_space_from_proto(message.action),
            max_episode_steps=message.max_episode_steps or None,
            metrics=tuple(map(printable, message.metrics)),
            raw_scores=message.scalar_rows == 6,
        )
        layout = Layout(spec)
    except ProtocolError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"a spec makes no sense ({printable(str(error))}).") from None
    if isinstance(spec.action_space, spaces.Dict):
        raise ProtocolError("a spec has named actions, which there are not.")
    if len(layout.observation) > MAX_LEAVES or len(spec.metrics) > MAX_LEAVES or layout.row_bytes > MAX_ROW_BYTES:
        raise ProtocolError(
            f"a spec has {len(layout.observation)} leaves and {layout.row_bytes} bytes a row: too large."
        )
    return spec


def _space_from_proto(message: Any, depth: int = 0) -> Any:
    kind = message.WhichOneof("kind")
    if kind == "discrete":
        if len(message.start) > 1:
            raise ProtocolError("a spec has a choice with several starts.")
        return spaces.Discrete(message.discrete, *message.start)
    if kind == "multi":
        if max(len(message.multi.n), len(message.start)) > MAX_LEAVES:
            raise ProtocolError("a spec has too many heads.")
        return spaces.MultiDiscrete(tuple(message.multi.n), tuple(message.start))
    if kind == "box":
        box, shape = message.box, tuple(message.box.shape[: MAX_DIMS + 1])
        size = math.prod(shape)
        if len(shape) > MAX_DIMS or size > MAX_ROW_BYTES:
            raise ProtocolError(f"a spec has a Box of shape {shape[:MAX_DIMS]}: too large.")
        codes = {code: dtype for dtype, code in _DTYPES.items()}
        if box.dtype not in codes:
            raise ProtocolError(f"a spec has a Box of {printable(box.dtype)!r}; there are {', '.join(codes)}.")
        bounds = []
        for values in (box.low, box.high):
            if len(values) not in (1, size):
                raise ProtocolError(f"a spec has {len(values)} bounds for {size} elements.")
            bounds.append(values[0] if len(values) == 1 else np.reshape(values, shape))
        low, high = bounds
        return spaces.Box(low, high, shape, codes[box.dtype])
    if kind == "dict":
        names = list(message.dict.name)
        if depth >= MAX_DIMS or len(names) > MAX_LEAVES:
            raise ProtocolError("a spec has too many named spaces.")
        if not names or len(set(names)) < len(names) or len(names) != len(message.dict.space):
            raise ProtocolError("a spec has named spaces without names of their own.")
        return spaces.Dict({n: _space_from_proto(s, depth + 1) for n, s in zip(names, message.dict.space)})
    raise ProtocolError("a spec has a space of no kind.")


def difference(learner: EnvSpec, worker: EnvSpec) -> str:
    """The first thing in which two specs differ, with both values, or ""; names are not compared."""
    for field in ("raw_scores", "metrics", "max_episode_steps"):
        if getattr(learner, field) != getattr(worker, field):
            return _differ(field, getattr(worker, field), getattr(learner, field))
    for name in ("observation", "action"):
        wanted, found = (leaves(getattr(spec, f"{name}_space"), name) for spec in (learner, worker))
        if [leaf.name for leaf in wanted] != [leaf.name for leaf in found]:
            return _differ(name, [leaf.name for leaf in found], [leaf.name for leaf in wanted])
        for one, other in zip(wanted, found):
            if _space_to_proto(one.space) != _space_to_proto(other.space):
                return _differ(one.name, other.space, one.space)
    return ""


def _differ(what: str, worker: Any, learner: Any) -> str:
    return f"{what} is {worker} at the worker and {learner} at the learner"


def options_difference(learner: str, worker: str) -> str:
    """The first option in which two environments differ, with both values, or "".

    Raises:
      ProtocolError: where the worker's are no JSON object.
    """
    if worker == learner:
        return ""
    try:
        there = json.loads(worker)
        if not isinstance(there, dict):
            raise TypeError
        here, there = ({k: v for k, v in x.items() if k not in MACHINE} for x in (json.loads(learner), there))
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                return _differ(printable(name), printable(str(there.get(name))), here.get(name))
        if json.dumps(here, sort_keys=True) == json.dumps(there, sort_keys=True):
            return ""
    except (ValueError, TypeError, RecursionError):
        raise ProtocolError("its options are no JSON object.") from None
    return "its options are written otherwise than the learner's"
