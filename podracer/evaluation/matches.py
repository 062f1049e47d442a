"""Matches between players of a game, from both seats, and ratings.

    a, b = matches.player(game, "tactical"), matches.player(game, "mcts:100")
    print(matches.play(game, a, b, games=400))

A self-play return says nothing of strength: the better both sides play, the more games are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import ratings, search
from podracer.types import ActorParams, Agent, ArrayTree, Environment, TimeStep

RESAMPLES = 2000
"""Bootstrap samples behind an interval."""


class Player(NamedTuple):
    """Someone who plays a game.

    Attributes:
      name: what a table calls it.
      start: `(num_lanes) -> memory`, before a game.
      act: `(params, memory, TimeStep [N], key) -> (move int32 [N], memory)`; pure.
      params: what was learnt, or (); players that differ in nothing else share what is compiled.
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
    simple = {"random": lambda: _random, "tactical": lambda: functools.partial(_tactical, environment)}
    simple["perfect"] = lambda: _perfect(environment)
    if number or kind not in simple:
        raise ValueError(
            f"no player is called {name!r}; there are random, tactical, perfect, mcts:SIMULATIONS and run directories, "
            "RUN_DIR[@STEP][:SIMULATIONS]."
        )
    return _without_memory(name, simple[kind]())


def of(agent: Agent, params: ActorParams, name: str) -> Player:
    """An agent as it plays in evaluation."""

    def act(params: Any, memory: ArrayTree, timestep: TimeStep, key: jax.Array) -> tuple[jax.Array, ArrayTree]:
        action, _, memory = agent.act(params, memory, timestep, key, True)
        return action, memory

    return Player(name, lambda lanes: agent.start(jnp.arange(lanes, dtype=jnp.int32), lanes), act, params)


def check(environment: Any) -> None:
    """Checks that an environment is a game that matches can be played of.

    Raises:
      ValueError: where it is not.
    """
    if environment.spec.num_players != 2:
        raise ValueError(f"{environment.spec.name} has one player: there is nobody to play against.")
    if not hasattr(environment, "position") or not hasattr(environment, "start"):
        raise ValueError(f"{environment.spec.name} lacks start() and position(observation), which matches need.")


def _without_memory(name: str, move: Callable[[ArrayTree, jax.Array], jax.Array]) -> Player:
    return Player(name, lambda lanes: (), lambda _, memory, timestep, key: (move(timestep.observation, key), memory))


def _draw(weights: jax.Array, key: jax.Array) -> jax.Array:
    """One of those with the largest weight [N, A], at random."""
    best = weights >= jnp.max(weights, axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32)


def _random(observation: ArrayTree, key: jax.Array) -> jax.Array:
    return _draw(observation["action_mask"].astype(jnp.float32), key)


def _after(environment: Environment, state: ArrayTree) -> tuple[ArrayTree, Any]:
    """What each move [A] leads to from one state: states and transitions [A]."""
    actions = jnp.arange(environment.spec.action_space.num_values, dtype=jnp.int32)  # type: ignore[union-attr]
    return jax.vmap(lambda action: environment.step(state, action, jax.random.key(0)))(actions)


def _tactical(environment: Environment, observation: ArrayTree, key: jax.Array) -> jax.Array:
    """Wins if it can, else leaves no win if it can, else moves at random."""

    def weights(observation: ArrayTree) -> jax.Array:
        legal = observation["action_mask"] > 0
        state, transition = _after(environment, environment.position(observation))  # type: ignore[attr-defined]
        wins = legal & (transition.reward > 0)

        def is_lost(state: ArrayTree, over: jax.Array) -> jax.Array:
            replies = environment.observe(state)["action_mask"] > 0  # type: ignore[index]
            return ~over & jnp.any(replies & (_after(environment, state)[1].reward > 0))

        loses = jax.vmap(is_lost)(state, transition.discount == 0)
        return jnp.where(legal, jnp.where(wins, 2.0, jnp.where(loses, 0.0, 1.0)), -1.0)

    return _draw(jax.vmap(weights)(observation), key)


def _mcts(environment: Environment, simulations: int, observation: ArrayTree, key: jax.Array) -> jax.Array:
    """PUCT with a uniform prior, and one random game from every position as its value."""

    def value(state: ArrayTree) -> jax.Array:
        """What the mover comes to in a random game from a state, which itself says how it goes."""
        words = [jnp.ravel(x).astype(jnp.uint32) for x in jax.tree.leaves(state)]
        words = jnp.concatenate(words)
        mixed = (words + jnp.arange(1, len(words) + 1, dtype=jnp.uint32)) * jnp.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        key = jax.random.key(lax.reduce(mixed, jnp.uint32(0), lax.bitwise_xor, (0,)) + jnp.sum(mixed))

        def move(carry: Any) -> Any:
            state, total, scale, key = carry
            key, now = jax.random.split(key)
            observation = jax.tree.map(lambda x: x[None], environment.observe(state))
            state, transition = environment.step(state, _random(observation, now)[0], now)
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
    """Moves that keep the value of a position, at random among those, from a table of all positions.

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
    """Every position that is not final, by backward induction.

    Returns:
      Sorted codes of the boards, int32 [n], and which moves keep the value, bool [n, A].

    Raises:
      ValueError: for a board of more than `MOST_CELLS` cells, or states without a `board`.
    """
    start = environment.start()  # type: ignore[attr-defined]
    if not hasattr(start, "board"):
        raise ValueError(f"{environment.spec.name} keeps no board in its states to number them by; nobody solves it.")
    if start.board.size > MOST_CELLS:
        raise ValueError(f"{environment.spec.name} is too large to be solved; nobody plays it perfectly.")
    expand = jax.jit(jax.vmap(lambda state: (_after(environment, state), environment.observe(state)["action_mask"])))
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


@dataclasses.dataclass(frozen=True)
class Match:
    """What became of a match.

    Attributes:
      players: the names of both.
      scores: [pairs, 2]; of the first player, 1 for a win and 1/2 for a draw: when it moved first, and second. The
        games of a pair have the same opening.
    """

    players: tuple[str, str]
    scores: np.ndarray

    @property
    def mean(self) -> float:
        """The share of the points that the first player made."""
        return float(self.scores.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95% of `mean` over pairs drawn with replacement."""
        rng = np.random.default_rng(0)
        pairs = self.scores.mean(axis=1)
        means = rng.choice(pairs, (RESAMPLES, len(pairs))).mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float(low), float(high)

    def counts(self, seat: int | None = None) -> tuple[int, int, int]:
        """Games won, drawn and lost by the first player: all, or those in which it moved first (0) or second (1)."""
        scores = self.scores if seat is None else self.scores[:, seat]
        won, drawn, lost = (int((scores == score).sum()) for score in (1.0, 0.5, 0.0))
        return won, drawn, lost

    def __str__(self) -> str:
        low, high = self.interval
        seats = [f"{won} won, {drawn} drawn, {lost} lost" for won, drawn, lost in map(self.counts, (0, 1))]
        return (
            f"{self.players[0]} against {self.players[1]}: {100 * self.mean:.1f}% of the points (95% interval "
            f"{100 * low:.1f}% to {100 * high:.1f}%) in {self.scores.size} games; moving first {seats[0]}; second "
            f"{seats[1]}"
        )


def play(environment: Environment, a: Player, b: Player, games: int, seed: int = 0, openings: int = 4) -> Match:
    """Plays a match, half of the games from each seat.

    Args:
      environment: the game.
      a: a player.
      b: another one.
      games: how many, even.
      seed: of openings and players.
      openings: random moves before the players take over, the same for both games of a pair.

    Raises:
      ValueError: for an odd number of games, or openings so long that they end games.
    """
    if games < 2 or games % 2:
        raise ValueError(f"games={games} must be an even number, so that both players move first equally often.")
    both = _both(environment, a._replace(name="", params=()), b._replace(name="", params=()), games // 2, openings)
    results, over = jax.device_get(both(a.params, b.params, jax.random.key(seed)))
    if over.any():
        raise ValueError(f"openings={openings} random moves end games of {environment.spec.name}; use fewer.")
    return Match((a.name, b.name), 0.5 + 0.5 * results)


@functools.lru_cache(maxsize=64)
def _both(environment: Environment, a: Player, b: Player, pairs: int, openings: int) -> Callable[..., Any]:
    """`(params, params, key) -> ([pairs, 2], [pairs])`: how `a` did from both seats, and which openings were games."""

    @jax.jit
    def both(a_params: ArrayTree, b_params: ArrayTree, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = a._replace(params=a_params), b._replace(params=b_params)
        opening_key, first_key, second_key = jax.random.split(key, 3)
        state, row = opened(environment, pairs, openings, opening_key)
        first, _ = outcome(environment, one, other, state, row, first_key)
        second, _ = outcome(environment, other, one, state, row, second_key)
        return jnp.stack([first, -second], axis=1), row.last

    return both


def opened(environment: Environment, lanes: int, plies: int, key: jax.Array) -> tuple[ArrayTree, TimeStep]:
    """States and rows [lanes] of games from their start, after so many random moves."""
    begin = environment.start()  # type: ignore[attr-defined]
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), begin)
    zeros = jnp.zeros(lanes)
    row = TimeStep(jax.vmap(environment.observe)(state), zeros, zeros + 1.0, zeros == 0, zeros > 0)
    for now in jax.random.split(key, plies):
        state, row = _moved(environment, state, row, _random(row.observation, now))
    return state, row


def _moved(environment: Environment, state: ArrayTree, row: TimeStep, action: jax.Array) -> tuple[ArrayTree, TimeStep]:
    """States and rows after moves [lanes]; games that are over stay as they are, with rewards of 0."""
    state, transition = jax.vmap(environment.step, (0, 0, None))(state, action, jax.random.key(0))
    over = row.last | (transition.discount == 0)
    reward = jnp.where(row.last, 0.0, transition.reward)
    observation = jax.vmap(environment.observe)(state)
    return state, TimeStep(observation, reward, transition.discount, jnp.zeros_like(over), over)


def outcome(
    environment: Environment, mover: Player, other: Player, state: ArrayTree, row: TimeStep, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Plays games to their ends; pure, for any program.

    Args:
      environment: the game.
      mover: who is to move.
      other: who answers.
      state: [N], of games that are not over.
      row: what is seen of them.
      key: consumed.

    Returns:
      float32 [N], 1 where `mover` won, 0 for a draw, -1; and how many moves there were, float32 [N].
    """
    lanes = row.last.shape[0]

    def ply(player: Player, sign: float, carry: Any, memory: ArrayTree, opens: jax.Array, key: jax.Array) -> Any:
        state, row, total, plies = carry
        action, memory = player.act(player.params, memory, row._replace(first=opens), key)
        plies += (~row.last).astype(jnp.float32)
        state, row = _moved(environment, state, row, action)
        return (state, row, total + sign * row.reward, plies), memory

    def turn(carry: Any) -> Any:
        game, memory, other_memory, opens, key = carry
        key, mover_key, other_key = jax.random.split(key, 3)
        game, memory = ply(mover, 1.0, game, memory, opens, mover_key)
        game, other_memory = ply(other, -1.0, game, other_memory, opens, other_key)
        return game, memory, other_memory, jnp.zeros_like(opens), key

    game = state, row._replace(first=jnp.zeros(lanes, bool)), jnp.zeros(lanes), jnp.zeros(lanes)
    start = game, mover.start(lanes), other.start(lanes), jnp.ones(lanes, bool), key
    _, _, total, plies = lax.while_loop(lambda carry: ~jnp.all(carry[0][1].last), turn, start)[0]
    return jnp.sign(total), plies


class Rating(NamedTuple):
    """A player's Elo, relative to the first player's, and the 95% interval."""

    name: str
    elo: float
    interval: tuple[float, float]


def elo(matches: Sequence[Match], anchor: str = "random") -> list[Rating]:
    """Ratings of maximum likelihood in Bradley and Terry's model, a draw being half a win, the best first.

    Args:
      matches: between players that are all connected by them.
      anchor: whose rating is 0.

    Raises:
      ValueError: where nobody is called `anchor`, or matches leave players unconnected.
    """
    names = list(dict.fromkeys(name for match in matches for name in match.players))
    if anchor not in names:
        raise ValueError(f"nobody is called {anchor!r}; there are {', '.join(names)}.")
    points = _points(names, matches, [match.scores for match in matches])
    if not (connected := ratings.connected(points)).all():
        others = ", ".join(name for name, reached in zip(names, connected) if not reached)
        raise ValueError(f"no matches connect {others} with {names[0]}, so nothing says how they compare; add one.")
    rng = np.random.default_rng(0)
    best = ratings.bradley_terry(points)
    samples = []
    for _ in range(200):
        drawn = [match.scores[rng.integers(len(match.scores), size=len(match.scores))] for match in matches]
        samples.append(ratings.bradley_terry(_points(names, matches, drawn)))
    zero = names.index(anchor)
    spread = np.stack(samples) - np.stack(samples)[:, zero : zero + 1]
    low, high = np.quantile(spread, (0.025, 0.975), axis=0)
    found = [Rating(name, float(best[i] - best[zero]), (float(low[i]), float(high[i]))) for i, name in enumerate(names)]
    return sorted(found, key=lambda rating: -rating.elo)


def _points(names: list[str], matches: Sequence[Match], scores: Sequence[np.ndarray]) -> np.ndarray:
    """Points [n, n] of each player against each other, with one drawn game added to every match, so that who never
    lost has a rating too."""
    points = np.zeros((len(names), len(names)))
    for match, score in zip(matches, scores):
        a, b = (names.index(name) for name in match.players)
        points[a, b] += score.sum() + 0.5
        points[b, a] += score.size - score.sum() + 0.5
    return points
