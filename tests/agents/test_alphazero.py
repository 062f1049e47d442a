"""AlphaZero: targets of two players, symmetries, moves, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import agents, nets, spaces
from podracer.agents import AlphaZeroConfig, alphazero
from podracer.types import Agent, Batch, TimeStep, Trajectory
from tests.support import harness

A = 9
SMALL: dict[str, Any] = {"hidden_sizes": (16,), "simulations": 8, "n_step": 3}
GAME: Any = envs_jax.make("tic_tac_toe")


@functools.cache
def made(**overrides: Any) -> Agent:
    return agents.alphazero.make(GAME, AlphaZeroConfig(**(SMALL | overrides)))


@functools.cache
def positions(name: str = "tic_tac_toe", plies: int = 3, lanes: int = 40) -> Any:
    """States after random moves, none of them over."""
    game: Any = envs_jax.make(name, opening_plies=plies)
    return game, jax.jit(jax.vmap(game.reset))(jax.random.split(jax.random.key(3), lanes))


def rows_of(states: Any, game: Any = GAME) -> TimeStep:
    """Rows [N] that open games at states."""
    observation = jax.vmap(game.observe)(states)
    zeros = jnp.zeros(len(observation["to_play"]))
    return TimeStep(observation, zeros, zeros + 1.0, zeros == 0, zeros > 0)


def learner_of(agent: Agent) -> Any:
    return jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))


def act(agent: Agent, row: TimeStep, key: int = 0, evaluation: bool = False, memory: Any = None) -> Any:
    lanes = jnp.arange(row.reward.shape[0], dtype=jnp.int32)
    params = agent.actor_params(learner_of(agent), jnp.float32(0))
    memory = agent.start(lanes, len(lanes)) if memory is None else memory
    return jax.jit(agent.act, static_argnums=4)(params, memory, row, jax.random.key(key), evaluation)


# Learning.


def windows(n: int, seed: int = 0) -> Batch:
    """Samples of n + 2 rows whose discounts are -1, 0 at ends, and 1 at truncations and breaks."""
    rows = jax.tree.map(np.asarray, harness.timesteps(seed, 60, 8))
    starts = [(r, i) for i in range(8) for r in range(60 - n - 1) if not rows.first[r + 1, i]]
    row, lane = (np.array(x) for x in zip(*starts))
    take = lambda x, m: x[row[None] + np.arange(m)[:, None], lane[None]]  # noqa: E731
    B, rng = len(starts), np.random.default_rng(seed)
    inside = ~(rows.first | rows.last)
    discount = np.where(inside, -rows.discount, rows.discount)
    boards = rng.integers(0, 2, (1, B, 3, 3, 2), np.uint8)
    mask = np.ones((1, B, A), np.uint8)
    observation = {"board": boards, "action_mask": mask}  # all that is asked of games
    columns = (take(x, n + 2) for x in (rows.reward, discount, rows.first, rows.last))
    extras = {"policy": rng.dirichlet(np.ones(A), (n + 1, B)), "value": rng.normal(size=(n + 1, B))}
    extras = {name: x.astype(np.float32) for name, x in extras.items()}
    actions = np.zeros((n + 1, B), np.int32)
    lanes: Any = np.zeros(B, np.int32)
    trajectory = Trajectory(TimeStep(observation, *columns), actions, extras, (), actions, lanes)  # type: ignore[arg-type]
    return jax.tree.map(jnp.asarray, Batch(trajectory, rng.random(B).astype(np.float32), lanes))  # type: ignore[arg-type]


def values_by_loop(batch: Batch, n: int, value_mix: float) -> np.ndarray:
    rows, nu = batch.trajectory.timesteps, np.asarray(batch.trajectory.extras["value"], np.float64)
    reward, discount, first = (np.asarray(x) for x in (rows.reward, rows.discount, rows.first))
    found = []
    for i in range(nu.shape[1]):
        z, sign, row = 0.0, 1.0, 0
        while row < n and not first[row + 1, i]:
            z += sign * reward[row + 1, i]
            sign *= discount[row + 1, i]
            row += 1
        found.append((1 - value_mix) * (z + sign * nu[row, i]) + value_mix * nu[0, i])
    return np.array(found)


@pytest.mark.parametrize(("n", "value_mix"), [(3, 0.0), (9, 0.25)])
def test_values_are_the_movers_own(n: int, value_mix: float) -> None:
    """Rewards of the other player count against, until the end, or the search's value n moves on."""
    batch = windows(n)
    samples = jax.jit(alphazero._samples, static_argnums=1)(batch, n, jnp.float32(value_mix))
    np.testing.assert_allclose(samples.value, values_by_loop(batch, n, value_mix), rtol=1e-4, atol=1e-5)
    signs = np.asarray(batch.trajectory.timesteps.discount)
    assert {-1.0, 0.0, 1.0} == set(np.unique(signs)), "moves, ends and truncations"


def test_the_loss_is_the_formulas() -> None:
    agent = made(symmetries=False, value_cost=0.7, learning_rate_schedule="linear")
    batch, learner = windows(3), learner_of(agent)
    learn = harness.alone(agent.learn)
    (begun, metrics, _), (done, _, _) = (
        learn(learner, batch, jnp.float32(progress), jax.random.key(0)) for progress in (0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, done.params, learner.params)
    assert all(np.any(x != y) for x, y in zip(jax.tree.leaves(begun.params), jax.tree.leaves(learner.params)))
    network = nets.make_board(GAME.spec, hidden_sizes=(16,))
    observation, weight = batch.trajectory.timesteps.observation, np.asarray(batch.weight)
    B = len(weight)
    inputs = nets.Inputs(observation, jnp.zeros((1, B)), jnp.zeros((1, B), bool), ())
    said = network.apply(learner.params, inputs, ())
    logits, value = (np.asarray(x[0], np.float64) for x in said[:2])
    log_policy = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    policy = -np.sum(np.asarray(batch.trajectory.extras["policy"][0]) * log_policy, axis=1)
    error = np.square(value - values_by_loop(batch, 3, 0.0))
    assert np.abs(value).max() <= 1
    assert float(metrics["loss/policy"]) == pytest.approx(np.mean(weight * policy), rel=1e-4)
    assert float(metrics["loss/value"]) == pytest.approx(np.mean(weight * error), rel=1e-4)
    total = np.mean(weight * (policy + 0.7 * error))
    assert float(metrics["loss/total"]) == pytest.approx(total, rel=1e-4)


def test_a_loss_of_ones_own() -> None:
    batch, learner = windows(3), learner_of(made())

    def doubled(*args: Any) -> Any:
        total, metrics = alphazero.loss(*args)
        return 2.0 * total, {"loss/mine": metrics["loss/total"]}

    config = AlphaZeroConfig(**SMALL)
    agents_ = made(), agents.alphazero.make(GAME, config, loss=doubled)
    (_, plain, _), (_, own, _) = (
        harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(0)) for agent in agents_
    )
    assert set(own) == {"loss/mine", "grad/norm", "mask/legal", "mask/none_legal"}
    assert float(own["loss/mine"]) == pytest.approx(float(plain["loss/total"]), rel=1e-6)
    assert float(own["grad/norm"]) == pytest.approx(2 * float(plain["grad/norm"]), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["tic_tac_toe", *(pytest.param(game, marks=pytest.mark.slow) for game in ("connect_four", "othello"))]
)
def test_a_position_that_is_turned_is_a_position(name: str) -> None:
    """Its mask is that of its board, its policy turns as its mask does, and all symmetries come."""
    game, states = positions(name, 6, 64)
    observation = jax.vmap(game.observe)(states)
    mask = observation["action_mask"].astype(jnp.float32)
    number = jnp.arange(1.0, 1.0 + mask.shape[1])[None]
    samples = alphazero.Samples(observation, mask * number, jnp.zeros(len(mask)))
    turned = jax.jit(lambda key: alphazero.transform(samples, game.symmetries, key))(jax.random.key(1))
    seen = jax.vmap(lambda x: game.observe(game.position(x)))(turned.observation)
    jax.tree.map(np.testing.assert_array_equal, seen, turned.observation)
    np.testing.assert_array_equal(turned.policy > 0, turned.observation["action_mask"] > 0)
    np.testing.assert_array_equal(np.sort(turned.policy), np.sort(samples.policy))
    boards, before = np.asarray(turned.observation["board"]), np.asarray(observation["board"])
    assert len(np.unique(boards, axis=0)) > 0.8 * len(np.unique(before, axis=0))
    assert 0.05 < np.mean(np.all(boards == before, axis=(1, 2, 3))) < 0.75, "some stay as they are, some turn"


# Acting.


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("search", ["gumbel", pytest.param("puct", marks=pytest.mark.slow)])
def test_moves_are_legal_and_so_are_policies(search: Any) -> None:
    agent, (game, states) = made(search=search), positions()
    row = rows_of(states, game)
    legal = np.asarray(row.observation["action_mask"]) > 0
    for evaluation in (False, True):
        action, extras, memory = act(agent, row, evaluation=evaluation)
        assert legal[np.arange(len(legal)), action].all()
        assert np.all(np.asarray(extras["policy"])[~legal] == 0)
        np.testing.assert_allclose(np.sum(extras["policy"], axis=1), 1.0, atol=1e-5)
        assert np.all(np.abs(extras["value"]) <= 1)
        np.testing.assert_array_equal(memory.ply, 1)


@pytest.mark.slow
def test_early_moves_are_drawn_and_late_ones_are_the_best() -> None:
    """From the same board: many different ones in the first plies, and then the most visited."""
    agent = made(sampled_plies=2, search="puct", simulations=48)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (60, *x.shape)), GAME.start())
    row = rows_of(state)
    memory = alphazero.Memory(jnp.full(60, 5, jnp.int32))
    for opens, before, ply, is_best in ((True, None, 1, False), (True, memory, 1, False), (False, memory, 6, True)):
        action, extras, after = act(agent, row._replace(first=jnp.full(60, opens)), memory=before)
        np.testing.assert_array_equal(after.ply, ply)
        policy = np.asarray(extras["policy"])
        assert np.all(policy[np.arange(60), action] == policy.max(axis=1)) == is_best
        assert len(np.unique(action)) >= 6, "noise at the root"
    assert len(np.unique(act(agent, row, evaluation=True)[0])) == 1


def test_a_win_in_one_is_found_without_having_learnt() -> None:
    """And a loss in one is prevented, by a search that sees two moves ahead."""
    agent = made(simulations=64, root_value="mean")
    win = jnp.int8([[1, 1, 0], [-1, -1, 0], [0, 0, 0]])
    save = jnp.int8([[-1, -1, 0], [1, 0, 0], [0, 0, 1]])
    boards = jnp.stack([win, save])
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), GAME.start())._replace(board=boards)
    action, extras, _ = act(agent, rows_of(state), evaluation=True)
    np.testing.assert_array_equal(action, [2, 2])
    assert float(extras["value"][0]) > 0.2 > float(extras["value"][1])


# What it refuses.


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ValueError, match="one player; use muzero"):
        agents.alphazero.make(envs_jax.make("catch"))
    recurrent = nets.make(GAME.spec, hidden_sizes=(4,), core=nets.CoreSettings("lstm", 4))
    with pytest.raises(ValueError, match="feed-forward"):
        agents.alphazero.make(GAME, network=recurrent)

    class Blind:
        """A game that does not say what it is in."""

        spec = GAME.spec

    with pytest.raises(ValueError, match="position"):
        agents.alphazero.make(Blind())  # type: ignore[arg-type]

    class Continuous(Blind):
        spec = GAME.spec._replace(action_space=spaces.Box(-1.0, 1.0, (2,)))

    with pytest.raises(ValueError, match="Discrete"):
        agents.alphazero.make(Continuous())  # type: ignore[arg-type]

    class Unmasked:
        """A game that does not say what is legal."""

        reset, position, step, observe = GAME.reset, GAME.position, GAME.step, GAME.observe
        spec = GAME.spec._replace(observation_space=spaces.Box(0, 1, (3, 3, 2), np.uint8))

    with pytest.raises(ValueError, match="observations with a board and an action_mask"):
        agents.alphazero.make(Unmasked())  # type: ignore[arg-type]

    class Slippery:
        """A game where moves may go wrong."""

        spec, reset, observe, position = GAME.spec, GAME.reset, GAME.observe, GAME.position

        def step(self, state: Any, action: jax.Array, key: jax.Array) -> Any:
            return GAME.step(state, jnp.where(jax.random.bernoulli(key), action, 0), key)

    with pytest.raises(ValueError, match="tic_tac_toe has chance: its step uses its key"):
        agents.alphazero.make(Slippery())  # type: ignore[arg-type]

    class Mistaken(Slippery):
        def step(self, state: Any, action: jax.Array, key: jax.Array) -> Any:
            return GAME.step(state.bord, action, key)

    with pytest.raises(AttributeError, match="bord"):
        agents.alphazero.make(Mistaken())  # type: ignore[arg-type]
    wrong: Any = ({"simulations": 0}, {"max_depth": 0}, {"considered": 0}, {"value_mix": 1.5}, {"search": "mcts"})
    for settings in wrong:
        with pytest.raises(ValueError, match=next(iter(settings))):
            AlphaZeroConfig(**settings)
