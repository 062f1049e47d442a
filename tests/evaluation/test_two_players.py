"""Two players and one signed discount: whose an episode's return is, on every way from `step` to a number."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import spaces
from podracer.agents.registry import AGENTS, make_agent
from podracer.environments import autoreset
from podracer.environments.from_jax import SteppedEnvironments
from podracer.evaluation import evaluation
from podracer.sebulba import actor_program
from podracer.types import ActorParams, Agent, EnvSpec, LearnerState, Transition
from tests.support import counting

PLAYERS = (0, 1, 1, 0, 1, 0)
"""The player to move at each row of an episode; one moves twice."""
DISCOUNTS = (-1, 1, -1, -1, -1)
RETURN = 1 - 2 - 3 + 4 - 5
"""The return of the first mover: the player who acts at row t gets t + 1."""


class State(NamedTuple):
    row: jax.Array
    truncates: jax.Array


class Turns:
    """A game whose movers are `PLAYERS`, whatever is played; half of the games are truncated."""

    spec = EnvSpec("turns", spaces.Box(0.0, 9.0, ()), spaces.Discrete(2), 5, num_players=2)

    def reset(self, key: jax.Array) -> State:
        return State(jnp.int32(0), jax.random.bernoulli(key))

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        last = state.row == 4
        discount = jnp.where(last & ~state.truncates, 0.0, jnp.asarray(DISCOUNTS, jnp.float32)[state.row])
        return State(state.row + 1, state.truncates), Transition((state.row + 1).astype(jnp.float32), discount, last)

    def observe(self, state: State) -> jax.Array:
        return state.row.astype(jnp.float32)


def act(params: Any, memory: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
    return jnp.zeros(timestep.reward.shape, jnp.int32), (), memory


IDLE = Agent(
    name="idle",
    config=None,
    init=lambda key, hyper: LearnerState((), (), {}, jnp.int32(0)),
    actor_params=lambda learner, progress: ActorParams((), learner.num_updates),
    start=lambda lanes, num_lanes: (),
    act=act,
    learn=lambda *args: args[0],
    hyper={},
)
NOTHING = ActorParams((), jnp.int32(0))


def test_a_lane_sums_for_the_first_mover() -> None:
    environment = Turns()
    step = jax.jit(lambda lane, key: autoreset.step(environment, lane, jnp.int32(0), key, environment.reset(key)))
    lane, ends = autoreset.reset(environment, jax.random.key(0)), set()
    totals = np.cumsum([0, 1, -2, -3, 4, -5])
    for i in range(24):
        row = i % 6
        assert float(lane.episode_return) == totals[row]
        assert float(lane.timestep.reward) == row
        first = float(lane.timestep.discount)
        assert first == ([1, *DISCOUNTS][row] if row < 5 or bool(lane.env.truncates) else 0)
        ends |= {first} if row == 5 else set()
        assert float(autoreset.finished(lane).return_sum) == (RETURN if row == 5 else 0)
        lane = step(lane, jax.random.key(i))
    assert ends == {0.0, -1.0}


def test_one_player_needs_no_sign() -> None:
    """Programs and saved states stay as they were."""
    lane = jax.eval_shape(lambda key: autoreset.reset(counting.CountingEnvironment(), key), jax.random.key(0))
    assert lane.sign == ()
    start = actor_program.make(IDLE, counting.CountingEnvironment().spec, 3, 2).start
    assert jax.eval_shape(start, jnp.arange(2, dtype=jnp.int32), jax.random.key(0)).games.sign == ()


def test_host_rows_keep_the_sign_and_sebulba_sums_for_the_first_mover() -> None:
    T, B = 4, 3
    environment = SteppedEnvironments(Turns()).make(B, 5)
    lanes, row = environment.recv()
    functions = actor_program.make(IDLE, environment.spec, T, B)
    begin, play, finish = map(jax.jit, functions[1:])
    carry = jax.jit(functions.start)(lanes, jax.random.key(0))
    buffer, episodes, discounts = begin(carry), [], []
    for _ in range(9):
        for _ in range(T):
            buffer, actions = play(buffer, NOTHING, carry.keys, row)
            environment.send(lanes, np.asarray(actions))
            _, row = environment.recv()
            discounts.append(row.timestep.discount)
        trajectory, sums, buffer, carry = finish(buffer, carry, jnp.asarray(lanes), jnp.zeros(T, jnp.int32), row)
        np.testing.assert_array_equal(trajectory.timesteps.discount[1:], discounts[-T:])
        episodes.append(sums)
    count = sum(float(x.count) for x in episodes)
    assert count == 6 * B
    assert sum(float(x.return_sum) for x in episodes) == RETURN * count
    np.testing.assert_array_equal(
        np.stack(discounts)[:6], np.stack([*np.tile(DISCOUNTS[:4], (B, 1)).T, *discounts[4:6]])
    )
    assert {0.0, -1.0} <= set(np.stack(discounts)[4])


def test_evaluation_sums_for_the_first_mover() -> None:
    returns, lengths, finished = evaluation.make(IDLE, Turns(), 4)(NOTHING, jax.random.key(0))
    host = evaluation.on_host(IDLE, SteppedEnvironments(Turns()), 4)(NOTHING, 0)
    np.testing.assert_array_equal(returns, [RETURN] * 4)
    np.testing.assert_array_equal(host.returns, [RETURN] * 4)
    np.testing.assert_array_equal(lengths, host.lengths)
    assert finished.all()


@pytest.mark.parametrize("name", sorted(set(AGENTS) - {"alphazero", "muzero"}))
def test_agents_that_cannot_play_themselves_say_so(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^tic_tac_toe is a game for two, and {name} cannot play against itself; use "
    ):
        make_agent(name, envs_jax.make("tic_tac_toe"))
