"""A gate is worth what fails it: AlphaZero learns tic-tac-toe in seconds, and with a part of it broken it does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import nets
from podracer.agents import AlphaZeroConfig, alphazero
from podracer.evaluation import players
from podracer.search import search
from podracer.types import Agent, Transition
from tests.support import harness

pytestmark = pytest.mark.learns

GAME: Any = envs_jax.make("tic_tac_toe", opening_plies=8)
SIZES = (64,)
STEPS = 16_000
GATE = 0.85
"""The fraction of all 4,520 positions in which the network's move must keep the value: 92% is usual, and 60 to 74% with
a broken part."""

CONFIG = AlphaZeroConfig(
    simulations=6,
    hidden_sizes=SIZES,
    learning_rate=3e-3,
    batch_size=256,
    replay_ratio=8.0,
    replay_capacity=20_000,
    replay_min_size=2_000,
)


def optimal(agent: Agent, environment: Any = GAME) -> float:
    """Trains; the share of positions where the network alone then plays optimally."""
    run = harness.make_program(agent, environment, num_envs=128)
    state, report = run.step(harness.initial(run, agent, [0]), run.limits(STEPS, STEPS, 10_000))
    assert np.all(report.finite)
    codes, best = players.solve(envs_jax.make("tic_tac_toe"))
    N = len(codes)
    boards = jnp.asarray((codes[:, None] // 3 ** np.arange(9)) % 3 - 1, jnp.int8).reshape(N, 3, 3)
    begin = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), GAME.start())
    observation = jax.jit(jax.vmap(GAME.observe))(begin._replace(board=boards))
    rows = nets.Inputs(jax.tree.map(lambda x: x[None], observation), jnp.zeros((1, N)), jnp.zeros((1, N), bool), ())
    network, params = nets.make_board(GAME.spec, hidden_sizes=SIZES), jax.tree.map(lambda x: x[0], state.learner.params)
    logits = np.asarray(jax.jit(lambda params: network.apply(params, rows, ())[0][0])(params))
    moves = np.argmax(np.where(np.asarray(observation["action_mask"]) > 0, logits, -np.inf), axis=1)
    return float(best[np.arange(N), moves].mean())


def test_it_learns() -> None:
    assert optimal(alphazero.make(GAME, CONFIG)) > GATE


def test_targets_of_other_positions_teach_nothing() -> None:
    """Policies are those of the next sample, as far as they are legal."""

    def shuffled(logits: Any, value: Any, batch: alphazero.Samples, *rest: Any) -> Any:
        legal = (batch.observation["action_mask"] > 0).astype(jnp.float32)  # type: ignore[index]
        policy = legal * (jnp.roll(batch.policy, 1, axis=0) + 1e-6)
        policy = policy / jnp.sum(policy, axis=-1, keepdims=True)
        return alphazero.loss(logits, value, batch._replace(policy=policy), *rest)

    assert optimal(alphazero.make(GAME, CONFIG, loss=shuffled)) < GATE


def test_a_search_that_guesses_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "search", harness.guessing(search.search))
    assert optimal(alphazero.make(GAME, CONFIG)) < GATE


def test_who_takes_the_opponents_gain_for_its_own_does_not_learn() -> None:
    """With a discount of 1 where players alternate, in the search and in the targets."""

    class Friends:
        def __getattr__(self, name: str) -> Any:
            return getattr(GAME, name)

        def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
            state, transition = GAME.step(state, action, key)
            return state, transition._replace(discount=jnp.abs(transition.discount))

    friends: Any = Friends()
    assert optimal(alphazero.make(friends, CONFIG), friends) < GATE
