"""Frames of `Dict` observations: what networks see of them is stacked, and their masks are the newest ones alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets, spaces
from podracer.types import EnvSpec, TimeStep, Trajectory

N, T = 3, 7
MASK = spaces.Box(0, 1, (4,), np.int8)
SPACE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2, 2), np.uint8),
        "speed": spaces.Box([-1.0, -2.0], [1.0, 3.0]),
        "kind": spaces.Discrete(5),
        "inner": spaces.Dict({"height": spaces.Box(0.0, 9.0, ()), "action_mask": MASK, "_key": MASK}),
        "action_mask": MASK,
        "_state": spaces.Box(0, 255, (3,), np.uint8),
    }
)
SPEC = EnvSpec("named", SPACE, spaces.Discrete(4))
FIRST = np.array([[1, 0], [0, 0], [0, 1], [1, 0], [1, 0], [0, 0], [0, 1]], bool)
"""Lane 1 goes on with an episode from before row 0, of which nothing is known."""


def drawn() -> Any:
    """Observations [T, 2]."""
    rng = np.random.default_rng(0)
    numbers = lambda n, *shape: rng.integers(0, n, (T, 2, *shape))  # noqa: E731
    inner = {
        "height": rng.uniform(0, 9, (T, 2)).astype(np.float32),
        "action_mask": numbers(2, 4).astype(np.int8),
        "_key": numbers(2, 4).astype(np.int8),
    }
    return {
        "image": numbers(256, 2, 2, 2).astype(np.uint8),
        "speed": rng.uniform(-1, 1, (T, 2, 2)).astype(np.float32),
        "kind": numbers(5).astype(np.int32),
        "inner": inner,
        "action_mask": numbers(2, 4).astype(np.int8),
        "_state": numbers(256, 3).astype(np.uint8),
    }


def by_hand(rows: Any, t: int, lane: int) -> Any:
    """The observation of a row as a network sees it, from the rows of its episode."""
    begins = max(s for s in range(t + 1) if FIRST[s, lane] or s == 0)

    def frames(x: np.ndarray) -> list[np.ndarray]:
        return [x[t - back, lane] if t - back >= begins else np.zeros_like(x[t, lane]) for back in reversed(range(N))]

    inner = rows["inner"]
    return {
        "image": np.concatenate(frames(rows["image"]), axis=-1),
        "speed": np.stack(frames(rows["speed"]), axis=-1),
        "kind": np.stack(frames(rows["kind"]), axis=-1),
        "inner": {
            "height": np.stack(frames(inner["height"]), axis=-1),
            "action_mask": np.stack(frames(inner["action_mask"]), axis=-1),  # here it is a number like any other
            "_key": inner["_key"][t, lane],
        },
        "action_mask": rows["action_mask"][t, lane],
        "_state": rows["_state"][t, lane],
    }


def timesteps(rows: Any) -> TimeStep:
    zeros = jnp.zeros((T, 2))
    return TimeStep(jax.tree.map(jnp.asarray, rows), zeros, zeros, jnp.asarray(FIRST), zeros > 0)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.map(np.dtype, jax.tree.map(lambda x: x.dtype, found)) == jax.tree.map(lambda x: x.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_members_are_stacked_but_for_the_mask_and_those_with_an_underscore() -> None:
    """In acting, row by row, in learning, all rows at once, and from a replay; the space holds what is seen."""
    rows, memory = drawn(), nets.start(nets.FRAME_STACKER, SPEC, 2, N)
    all_rows, space = timesteps(rows), nets.stacked_spec(SPEC, N).observation_space
    trajectory = Trajectory(all_rows, jnp.zeros((T - 1, 2), jnp.int32), {}, memory, *[jnp.zeros(2, jnp.int32)] * 2)
    learnt_from = jax.device_get(jax.jit(lambda x: nets.inputs(nets.FRAME_STACKER, x).observation)(trajectory))
    step = jax.jit(lambda memory, row: nets.step(nets.FRAME_STACKER, (), memory, row))
    for t in range(T):
        seen, _, memory = jax.device_get(step(memory, jax.tree.map(lambda x, t=t: x[t], all_rows)))
        for lane in range(2):
            expected = by_hand(rows, t, lane)
            assert_same(jax.tree.map(lambda x, lane=lane: x[lane], seen), expected)
            assert_same(jax.tree.map(lambda x, t=t, lane=lane: x[t, lane], learnt_from), expected)
            assert space.contains(expected)

    # A replay keeps no frames, and rebuilds them from the rows before.
    context = nets.frame_context(N)
    kept = context["keep"](memory)
    assert not jax.tree.leaves(kept)
    before = jax.tree.map(lambda x: x[T - context["context"] :], all_rows)
    rebuilt = jax.jit(context["restore"])(kept, before.observation, before.first)
    jax.tree.map(np.testing.assert_array_equal, rebuilt.frames, memory.frames)
    assert set(memory.frames) == {"image", "speed", "kind", "inner"}


def test_bounds_are_stacked_by_number_and_choices_stay_choices() -> None:
    space: Any = nets.stacked_spec(SPEC, N).observation_space
    members = dict(space.items)
    assert members["speed"].low == ((-1.0,) * N, (-2.0,) * N)
    assert members["kind"] == spaces.MultiDiscrete((5,) * N)
    assert (members["action_mask"], members["_state"]) == (MASK, dict(SPACE.items)["_state"])
    assert nets.encode(spaces.zeros(space), space, leading=0).shape == (8 * N + 2 * N + 5 * N + N + 4 * N,)


def test_several_choices_in_one_array_are_refused() -> None:
    spec = EnvSpec("test", spaces.Dict({"a": spaces.MultiDiscrete((2, 3))}), spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"frame_stack=2: test shows MultiDiscrete\(.*\), which cannot be stacked"):
        nets.stacked_spec(spec, 2)
