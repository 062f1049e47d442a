"""One lane under NEXT_STEP: rows, episode sums, and that nothing leaks over an episode's end."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import spaces
from podracer.environments import autoreset
from podracer.types import EnvSpec, Transition
from tests.support import counting, harness

COUNTING = counting.CountingEnvironment()


class Costly(counting.CountingEnvironment):
    """The counting environment, of which only lanes that are over are reset; notes each lane that is."""

    costly_reset = True
    resets: ClassVar[list[int]] = []

    def reset(self, key: jax.Array) -> counting.CountingState:
        jax.debug.callback(lambda _: self.resets.append(1), jax.random.key_data(key))
        return super().reset(key)


def walk(environment: Any, steps: int) -> tuple[list[autoreset.Lane], list[int]]:
    """The lanes after 0, 1, ..., and the actions between them."""
    step = jax.jit(lambda lane, a, k, fresh: autoreset.step(environment, lane, a, k, fresh))
    reset = jax.jit(environment.reset)
    lanes, actions = [jax.jit(lambda key: autoreset.reset(environment, key))(jax.random.key(0))], []
    for i in range(steps):
        step_key, reset_key = jax.random.split(jax.random.key(i + 1))
        actions.append(i % 5)
        lanes.append(step(lanes[-1], jnp.int32(i % 5), step_key, reset(reset_key)))
    return lanes, actions


def test_a_lane_opens_with_a_first_row() -> None:
    lane = autoreset.reset(COUNTING, jax.random.key(3))
    row = lane.timestep
    assert (float(row.reward), float(row.discount), bool(row.first), bool(row.last)) == (0.0, 1.0, True, False)
    np.testing.assert_array_equal(row.observation, COUNTING.observe(COUNTING.reset(jax.random.key(3))))
    assert [x.dtype for x in row[1:]] == [jnp.float32, jnp.float32, jnp.bool_, jnp.bool_]
    assert [float(x) for x in (lane.episode_return, lane.episode_length)] == [0.0, 0.0]


def test_rows_and_episode_sums() -> None:
    """Every row against the tag it shows, and what finished episodes sum to."""
    lanes, actions = walk(COUNTING, 60)
    ended = []
    for now, then, action in zip(lanes, lanes[1:], actions, strict=False):
        row, (tag, step, previous) = then.timestep, np.asarray(then.timestep.observation)
        length, terminates = int(tag) // 2 % 32, int(tag) % 2 == 1
        assert bool(row.first) == bool(now.timestep.last) == (step == 0)
        assert bool(row.last) == (step == length)
        assert float(row.reward) == step
        assert float(row.discount) == float(not (step == length and terminates))
        assert previous == (-1 if row.first else action)
        assert int(then.env.step) == step  # the state that the observation is of
        assert (float(then.episode_return), float(then.episode_length)) == (step * (step + 1) / 2, step)
        stats = autoreset.finished(then)
        assert [float(x) for x in stats[:3]] == ([length * (length + 1) / 2, length, 1.0] if row.last else [0.0] * 3)
        ended.append((length, terminates)) if row.last else None
    assert len(ended) > 8
    assert {terminates for _, terminates in ended} == {True, False}


def test_nothing_after_the_end_matters() -> None:
    """The result of `environment.step` on a state that is over is dropped: state, reward, discount and `last`."""
    for plain, spoiled in zip(walk(COUNTING, 30)[0], walk(harness.AfterTheEnd(COUNTING), 30)[0], strict=True):
        harness.assert_same(plain, spoiled)


def test_the_fresh_state_opens_the_next_episode_only() -> None:
    lanes, _ = walk(COUNTING, 12)
    fresh = COUNTING.reset(jax.random.key(99))
    for lane in lanes:
        after = autoreset.step(COUNTING, lane, jnp.int32(2), jax.random.key(0), fresh)
        assert (int(after.env.tag) == int(fresh.tag)) == bool(lane.timestep.last)


@dataclasses.dataclass(frozen=True)
class Nested:
    """Observations in a dict, rewards of -2, and states with every kind of leaf."""

    spec = EnvSpec(
        "nested", spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Box(0.0, 9.0, (2,))}), spaces.Discrete(2)
    )

    def reset(self, key: jax.Array) -> dict[str, jax.Array]:
        return {"time": jnp.int32(0), "grid": jnp.zeros((2, 3), bool), "random": jax.random.uniform(key)}

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        state = {"time": state["time"] + 1, "grid": ~state["grid"], "random": jax.random.uniform(key)}
        return state, Transition(jnp.float32(-2.0), jnp.float32(1.0), state["time"] == 3)

    def observe(self, state: Any) -> Any:
        return {"a": state["time"], "b": jnp.full((2,), state["random"])}


def test_trees_of_states_and_observations() -> None:
    lanes, _ = walk(Nested(), 9)
    assert [int(lane.timestep.observation["a"]) for lane in lanes] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [float(lane.timestep.reward) for lane in lanes] == [0, -2, -2, -2, 0, -2, -2, -2, 0, -2]
    assert [float(lane.episode_return) for lane in lanes] == [0, -2, -4, -6, 0, -2, -4, -6, 0, -2]
    assert [bool(lane.env["grid"].any()) for lane in lanes] == [False, True, False, True] * 2 + [False, True]
    assert len({float(lane.env["random"]) for lane in lanes}) == 10


def lanes_and_keys(over: np.ndarray) -> Any:
    """Lanes in the middle of episodes, those that are over as told, with keys for a step of each."""
    keys = jax.random.split(jax.random.key(7), (3, *over.shape))
    lanes = jax.vmap(lambda key: autoreset.reset(COUNTING, key))
    for _ in over.shape[1:]:
        lanes = jax.vmap(lanes)
    made = lanes(keys[0])
    return made._replace(timestep=made.timestep._replace(last=jnp.asarray(over))), *keys[1:]


@pytest.mark.slow
def test_only_lanes_that_are_over_are_reset_with_the_same_result() -> None:
    """Alone, and under vmap over shards and members, where all their lanes share one loop."""
    rng, size = np.random.default_rng(0), autoreset.RESETS_AT_ONCE_ON_CPU
    for shape, shares in (((70,), (0.0, 0.01, 0.2, 1.0)), ((2, 3, 12), (0.0, 0.1, 1.0))):
        plain, costly = (functools.partial(autoreset.step_lanes, env) for env in (COUNTING, Costly()))
        for _ in shape[1:]:
            plain, costly = jax.vmap(plain), jax.vmap(costly)
        plain, costly = jax.jit(plain), jax.jit(costly)
        for share in shares:
            over = rng.random(shape) < share
            if len(shape) > 1 and share < 1:
                over[1:] = False  # a loop of each member's own would go round for the others, too
            lanes, keys, reset_keys = lanes_and_keys(over)
            arguments = (lanes, jnp.full(shape, 2, jnp.int32), keys, reset_keys)
            expected = plain(*arguments)
            jax.effects_barrier()
            Costly.resets.clear()
            found = costly(*arguments)
            jax.block_until_ready(found)
            jax.effects_barrier()
            harness.assert_same(found, expected)
            np.testing.assert_array_equal(found.timestep.first, over)
            groups = -(-int(over.sum()) // size)
            assert len(Costly.resets) == groups * size, "as many as episodes end, in whole groups"


def test_costly_resets_are_those_of_large_states_or_of_environments_that_say_so() -> None:
    class Large(counting.CountingEnvironment):
        def reset(self, key: jax.Array) -> Any:
            return super().reset(key), jnp.zeros(self.size, jnp.uint8)

    assert not autoreset.resets_are_costly(COUNTING)
    assert autoreset.resets_are_costly(Costly())
    for size, costly in ((4096 - 12, False), (4096 - 11, True)):
        Large.size = size
        assert autoreset.resets_are_costly(Large()) == costly
