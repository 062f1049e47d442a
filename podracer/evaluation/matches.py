"""Matches between players of a game, from both seats.

    a, b = players.player(game, "tactical"), players.player(game, "mcts:100")
    print(matches.play(game, a, b, games=400))

A self-play return says nothing of strength: the better both sides play, the more games are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer.environments.seeds import check_seed
from podracer.evaluation.players import Player, random_move
from podracer.types import ArrayTree, Environment, TimeStep

RESAMPLES = 2000
"""The number of bootstrap samples for an interval."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The scores of a match.

    Attributes:
      players: the names of both.
      scores: [pairs, 2]; the first player's scores when it moved first, and second: 1 for a win and 1/2 for a draw. The
        games of a pair have the same opening.
    """

    players: tuple[str, str]
    scores: np.ndarray

    @property
    def mean(self) -> float:
        """The first player's share of the points."""
        return float(self.scores.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% bootstrap interval of `mean`, over pairs."""
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
      games: number of games, even.
      seed: seed of openings and players.
      openings: random moves before the players take over, the same for both games of a pair.

    Raises:
      ValueError: for an odd number of games, a seed below 0 or above `MAX_SEED`, or openings so long that they end
        games.
    """
    check_seed(seed)
    if games < 2 or games % 2:
        raise ValueError(f"games={games} must be an even number, so that both players move first equally often.")
    both = _play_pairs(
        environment, a._replace(name="", params=()), b._replace(name="", params=()), games // 2, openings
    )
    results, over = jax.device_get(both(a.params, b.params, jax.random.key(seed)))
    if over.any():
        raise ValueError(f"openings={openings} random moves end games of {environment.spec.name}; use fewer.")
    return Match((a.name, b.name), 0.5 + 0.5 * results)


class PairsFn(Protocol):
    """Plays openings from both seats."""

    def __call__(self, a_params: ArrayTree, b_params: ArrayTree, key: jax.Array, /) -> tuple[jax.Array, jax.Array]:
        """Returns the outcomes [pairs, 2] for `a`, and True, bool [pairs], where the opening has ended the game."""
        ...


@functools.lru_cache(maxsize=64)
def _play_pairs(environment: Environment, a: Player, b: Player, pairs: int, openings: int) -> PairsFn:
    """Makes a function that plays both seats of an opening."""

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
    """States and rows [lanes] of games after `plies` random moves."""
    begin = environment.start()  # type: ignore[attr-defined]
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), begin)
    zeros = jnp.zeros(lanes)
    row = TimeStep(jax.vmap(environment.observe)(state), zeros, zeros + 1.0, zeros == 0, zeros > 0)
    for move_key in jax.random.split(key, plies):
        state, row = _step(environment, state, row, random_move(row.observation, move_key))
    return state, row


def _step(environment: Environment, state: ArrayTree, row: TimeStep, action: jax.Array) -> tuple[ArrayTree, TimeStep]:
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
      mover: the player to move.
      other: the player who answers.
      state: [N]; states that are not over.
      row: TimeStep [N]; their observations.
      key: consumed.

    Returns:
      The outcome for `mover`, float32 [N], 1, 0 (draw) or -1; and the number of moves, float32 [N].
    """
    lanes = row.last.shape[0]

    def ply(player: Player, sign: float, carry: Any, memory: ArrayTree, opens: jax.Array, key: jax.Array) -> Any:
        state, row, total, plies = carry
        action, memory = player.act(player.params, memory, row._replace(first=opens), key)
        plies += (~row.last).astype(jnp.float32)
        state, row = _step(environment, state, row, action)
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
