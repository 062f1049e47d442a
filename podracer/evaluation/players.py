"""Players of a game: by name, or a trained agent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer.search import search
from podracer.types import ActorParams, Agent, ArrayTree, Environment, TimeStep


class Player(NamedTuple):
    """A player of a game: functions that choose moves, and their parameters.

    Attributes:
      name: the player's name in tables.
      start: `(num_lanes) -> memory`, before a game.
      act: `(params, memory, TimeStep [N], key) -> (move int32 [N], memory)`; pure.
      params: learnt parameters, or (); players that differ in nothing else share compiled programs.
    """

    name: str
    start: Callable[[int], ArrayTree]
    act: Callable[[ArrayTree, ArrayTree, TimeStep, jax.Array], tuple[jax.Array, ArrayTree]]
    params: ArrayTree = ()


def player(environment: Environment, name: str) -> Player:
    """A player by name: "random", "tactical", "mcts:SIMULATIONS", or "perfect".

    Raises:
      ValueError: for another name, or a game that is too large to be played perfectly.
    """
    kind, _, number = name.partition(":")
    if kind == "mcts" and number.isdigit() and int(number):
        return _without_memory(name, functools.partial(_mcts, environment, int(number)))
    simple = {"random": lambda: random_move, "tactical": lambda: functools.partial(_tactical, environment)}
    simple["perfect"] = lambda: _perfect(environment)
    if number or kind not in simple:
        raise ValueError(
            f"no player is called {name!r}; there are random, tactical, perfect, mcts:SIMULATIONS and run directories, "
            "RUN_DIR[@STEP][:SIMULATIONS]."
        )
    return _without_memory(name, simple[kind]())


def from_agent(agent: Agent, params: ActorParams, name: str) -> Player:
    """The player of an agent: its actions in evaluation."""

    def act(params: Any, memory: ArrayTree, timestep: TimeStep, key: jax.Array) -> tuple[jax.Array, ArrayTree]:
        action, _, memory = agent.act(params, memory, timestep, key, True)
        return action, memory

    return Player(name, lambda lanes: agent.start(jnp.arange(lanes, dtype=jnp.int32), lanes), act, params)


def check(environment: Any) -> None:
    """Checks that an environment is a game for matches.

    Raises:
      ValueError: if it is not.
    """
    if environment.spec.num_players != 2:
        raise ValueError(f"{environment.spec.name} has one player: there is nobody to play against.")
    if not hasattr(environment, "position") or not hasattr(environment, "start"):
        raise ValueError(f"{environment.spec.name} lacks start() and position(observation), which matches need.")


def _without_memory(name: str, move: Callable[[ArrayTree, jax.Array], jax.Array]) -> Player:
    return Player(name, lambda lanes: (), lambda _, memory, timestep, key: (move(timestep.observation, key), memory))


def _draw(weights: jax.Array, key: jax.Array) -> jax.Array:
    """One of the actions with the largest weight [N, A], at random."""
    best = weights >= jnp.max(weights, axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32)


def random_move(observation: ArrayTree, key: jax.Array) -> jax.Array:
    """Moves int32 [N], each of the legal ones with the same chance."""
    return _draw(observation["action_mask"].astype(jnp.float32), key)


def _successors(environment: Environment, state: ArrayTree) -> tuple[ArrayTree, Any]:
    """The state and the transition after each move, both [A], from one state."""
    actions = jnp.arange(environment.spec.action_space.num_values, dtype=jnp.int32)  # type: ignore[union-attr]
    return jax.vmap(lambda action: environment.step(state, action, jax.random.key(0)))(actions)


def _tactical(environment: Environment, observation: ArrayTree, key: jax.Array) -> jax.Array:
    """Wins if it can, else leaves no win if it can, else moves at random."""

    def weights(observation: ArrayTree) -> jax.Array:
        legal = observation["action_mask"] > 0
        state, transition = _successors(environment, environment.position(observation))  # type: ignore[attr-defined]
        wins = legal & (transition.reward > 0)

        def is_lost(state: ArrayTree, over: jax.Array) -> jax.Array:
            replies = environment.observe(state)["action_mask"] > 0  # type: ignore[index]
            return ~over & jnp.any(replies & (_successors(environment, state)[1].reward > 0))

        loses = jax.vmap(is_lost)(state, transition.discount == 0)
        return jnp.where(legal, jnp.where(wins, 2.0, jnp.where(loses, 0.0, 1.0)), -1.0)

    return _draw(jax.vmap(weights)(observation), key)


def _mcts(environment: Environment, simulations: int, observation: ArrayTree, key: jax.Array) -> jax.Array:
    """PUCT with a uniform prior, and one random game from every position as its value."""

    def value(state: ArrayTree) -> jax.Array:
        """The mover's return in a random game from a state. The key is a hash of the state, so equal states have equal
        values."""
        words = [jnp.ravel(x).astype(jnp.uint32) for x in jax.tree.leaves(state)]
        words = jnp.concatenate(words)
        mixed = (words + jnp.arange(1, len(words) + 1, dtype=jnp.uint32)) * jnp.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        key = jax.random.key(lax.reduce(mixed, jnp.uint32(0), lax.bitwise_xor, (0,)) + jnp.sum(mixed))

        def move(carry: Any) -> Any:
            state, total, scale, key = carry
            key, move_key = jax.random.split(key)
            observation = jax.tree.map(lambda x: x[None], environment.observe(state))
            state, transition = environment.step(state, random_move(observation, move_key)[0], move_key)
            return state, total + scale * transition.reward, scale * transition.discount, key

        start = state, jnp.float32(0), jnp.float32(1), key
        return lax.while_loop(lambda carry: carry[2] != 0, move, start)[1]

    def legal(state: ArrayTree) -> jax.Array:
        return jax.vmap(environment.observe)(state)["action_mask"] > 0  # type: ignore[index]

    def step(variables: ArrayTree, state: ArrayTree, action: jax.Array) -> search.Step:
        state, transition = jax.vmap(environment.step, (0, 0, None))(state, action, jax.random.key(0))
        found = jnp.where(transition.discount == 0, 0.0, jax.vmap(value)(state))
        mask = legal(state)
        return search.Step(transition.reward, transition.discount, jnp.zeros(mask.shape), found, state, mask)

    state = jax.vmap(environment.position)(observation)  # type: ignore[attr-defined]
    mask = observation["action_mask"] > 0
    root = search.Root(jnp.zeros(mask.shape), jax.vmap(value)(state), state, mask)
    config = search.SearchConfig(algorithm="puct", simulations=simulations, bounds=(-1.0, 1.0))
    model = search.Model(lambda variables, observation: root, step)
    return search.search(model, (), root, key, config, explore=False, temperature=0.0).action


MOST_CELLS = 16
"""Boards up to this size can be numbered in 32 bits, and their games searched to the end."""


def _perfect(environment: Environment) -> Callable[[ArrayTree, jax.Array], jax.Array]:
    """A move function that plays at random among the moves that keep a position's value, from a table of all positions.

    Raises:
      ValueError: for a game that is too large.
    """
    codes, best = solve(environment)
    codes, best = jnp.asarray(codes), jnp.asarray(best)

    def move(observation: ArrayTree, key: jax.Array) -> jax.Array:
        state = jax.vmap(environment.position)(observation)  # type: ignore[attr-defined]
        return _draw(best[jnp.searchsorted(codes, _code(state.board))].astype(jnp.float32), key)

    return move


def _code(board: Any) -> Any:
    """A number for each board [N, H, W] of -1, 0 and 1."""
    cells = board.reshape(len(board), math.prod(board.shape[1:])).astype(np.int32) + 1
    return (cells * (3 ** np.arange(cells.shape[1], dtype=np.int32))[None]).sum(axis=1, dtype=np.int32)


@functools.cache
def solve(environment: Environment) -> tuple[np.ndarray, np.ndarray]:
    """Solves every position that is not final, by backward induction.

    Returns:
      Sorted codes of the boards, int32 [n], and True for the moves that keep the value, bool [n, A].

    Raises:
      ValueError: for a board of more than `MOST_CELLS` cells, or states without a `board`.
    """
    start = environment.start()  # type: ignore[attr-defined]
    if not hasattr(start, "board"):
        raise ValueError(f"{environment.spec.name} keeps no board in its states to number them by; nobody solves it.")
    if start.board.size > MOST_CELLS:
        raise ValueError(f"{environment.spec.name} is too large to be solved; nobody plays it perfectly.")
    expand = jax.jit(
        jax.vmap(lambda state: (_successors(environment, state), environment.observe(state)["action_mask"]))
    )
    layers = []
    layer = jax.tree.map(lambda x: np.asarray(x)[None], start)
    while len(layer.board):
        (after, transition), legal = jax.device_get(expand(layer))
        goes_on = (legal > 0) & (transition.discount != 0)
        layers.append((_code(layer.board), legal > 0, transition.reward, goes_on, _code_each(after.board)))
        layer = jax.tree.map(lambda x, on=goes_on: x[on], after)
        _, first = np.unique(_code(layer.board), return_index=True)
        layer = jax.tree.map(lambda x, at=first: x[at], layer)
    values: dict[int, float] = {}
    found = []
    for codes, legal, reward, goes_on, following in reversed(layers):
        later = np.array([[values.get(code, 0.0) for code in row] for row in following.tolist()])
        q = np.where(legal, reward - goes_on * later, -np.inf)
        values |= dict(zip(codes.tolist(), q.max(axis=1).tolist()))
        found.append((codes, q >= q.max(axis=1, keepdims=True)))
    codes, best = (np.concatenate(x) for x in zip(*found))
    order = np.argsort(codes)
    return codes[order], best[order]


def _code_each(boards: np.ndarray) -> np.ndarray:
    """Codes [n, A] of boards [n, A, H, W]."""
    return _code(boards.reshape(math.prod(boards.shape[:2]), *boards.shape[2:])).reshape(boards.shape[:2])
