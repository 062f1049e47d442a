"""Games of pgx (Koyamada et al. 2023, https://github.com/sotetsuk/pgx) in pure JAX: `pgx:go_9x9`, `pgx:chess`.

The rules are pgx's own. Added here: rewards by seat instead of by player, a compact form of states, and the state of an
observation for searches (docs/adr/0022-games-of-pgx.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pgx
from jax import lax

import envs_jax
from envs_jax import board_game
from envs_jax.adapters.convert import default_promotion
from podracer import configs, spaces
from podracer.types import EnvSpec, Transition

PLIES = {
    "animal_shogi": 256,
    "chess": 512,
    "connect_four": 42,
    "gardner_chess": 256,
    "go_19x19": 722,
    "go_9x9": 162,
    "hex": 122,
    "othello": 122,
    "shogi": 512,
    "tic_tac_toe": 9,
}
"""The largest number of plies of each game for two without chance and hidden cards."""


@dataclasses.dataclass(frozen=True)
class PgxOptions:
    """Options of a game of pgx; those of games for several players, but `mask`.

    Attributes:
      opponent: "self", where an agent plays both sides of a game without chance and hidden cards; or "random", an
        environment for one player whose opponents move at random within `step`.
      opening_plies: largest number of random plies that a game opens with, drawn from 0 on; none of them ends it.
      mask: False hides `action_mask`, of environments for one player.
    """

    opponent: Literal["self", "random"] = "self"
    opening_plies: int = configs.field(0, low=0)
    mask: bool = True

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the names of all games of pgx."""
    return list(pgx.available_envs())


def make(name: str, options: PgxOptions) -> PgxGame | PgxEnvironment:
    """Builds a game of pgx.

    Args:
      name: one of `tasks()`.
      options: the game's options.

    Raises:
      ValueError: for an unknown name, or options that do not go with it.
    """
    if name not in tasks():
        raise ValueError(f"pgx has no environment {name!r}; {configs.suggest(name, tasks())}")
    with default_promotion():  # a game's module computes tables when it is imported
        game = pgx.make(name)  # pyright: ignore[reportArgumentType] - checked above
    if game.num_players == 1 and dataclasses.replace(options, mask=True) != PgxOptions():
        raise ValueError(f"pgx:{name} has one player, who makes every move: it takes no options but mask.")
    if game.num_players > 1 and options.opponent == "self":
        if name not in PLIES:
            raise ValueError(
                f"pgx:{name} has chance, hidden cards or more than two players, which an agent cannot play against "
                "itself; set opponent='random' to play it against random moves."
            )
        if not options.mask:
            raise ValueError(f"pgx:{name}: a search needs the mask; mask=False goes with opponent='random'.")
        return PgxGame(name, game, options.opening_plies)
    return PgxEnvironment(name, game, options.opening_plies, options.mask)


class _Rules:
    """A game of pgx, with states in a compact form: without observation, rewards and truncation."""

    def __init__(self, name: str, game: pgx.Env, opening_plies: int):
        self._game, self._opening_plies = game, opening_plies
        with default_promotion():
            shapes = jax.eval_shape(game.init, jax.eval_shape(lambda: jax.random.key(0)))
        self._state = _strip(shapes)
        self._board = np.dtype(np.uint8 if shapes.observation.dtype == np.bool_ else np.float32)
        A = shapes.legal_action_mask.shape[0]
        bounds = (0, 1) if self._board == np.uint8 else (-np.inf, np.inf)
        self._spaces = {
            "board": spaces.Box(*bounds, shapes.observation.shape, self._board),
            "action_mask": spaces.Box(0, 1, (A,), np.uint8),
        }
        self._name, self._action_space = f"pgx:{name}", spaces.Discrete(A)

    def _initial_state(self, key: jax.Array) -> Any:
        with default_promotion():
            return self._compact(self._game.init(key))

    def _ply(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        """Plays an action; returns the next state, and rewards float32 [players], 0 if the game was over."""
        whole = state.replace(rewards=jnp.zeros(self._game.num_players), truncated=jnp.asarray(False))
        with default_promotion():
            after = self._game.step(whole, action, key)
        return self._compact(after), jnp.asarray(after.rewards, jnp.float32)

    def _compact(self, state: Any) -> Any:
        """Returns the compact form of a state, with the dtypes that every state has."""
        return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), _strip(state), self._state)

    def _play_opening(self, state: Any, key: jax.Array) -> Any:
        """Plays the random plies of an opening."""

        def step(state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
            state, _ = self._ply(state, action, jax.random.fold_in(key, 1))  # the action was drawn from this key
            return state, state.terminated

        if not self._opening_plies:
            return state
        return board_game.play_opening(state, self._opening_plies, key, lambda state: state.legal_action_mask, step)

    def _board_and_mask(self, state: Any, player: jax.Array) -> dict[str, jax.Array]:
        with default_promotion():
            board = self._game._observe(state, player)
        return {"board": board.astype(self._board), "action_mask": state.legal_action_mask.astype(jnp.uint8)}


class PgxGame(_Rules):
    """A game of pgx for two without chance, with the interface of `envs_jax.board_game.BoardGame`.

    Observation: `board` [H, W, C], pgx's planes for the player to move, uint8 of 0 and 1, or float32 where
      pgx's are numbers; `action_mask` uint8 [A], 1 where an action is legal, and everywhere once the game is over;
      `to_play` int32 [], 0 for the first mover; `_state` uint8 [n], the rest of the state, which networks do not see.
    Reward: of the player who acted: 1 for a won game, -1 for a lost one, else 0. An illegal action loses at once.
    Discount: -1, for the other player is to move (docs/adr/0019-signed-discount.md), and 0 at the end.
    A state that is over stays as it is when it is stepped, with reward and discount 0.
    """

    def __init__(self, name: str, game: pgx.Env, opening_plies: int = 0):
        super().__init__(name, game, opening_plies)
        # pgx draws the first mover at random, the only difference between its initial states.
        self._start = jax.tree.map(np.asarray, jax.jit(self._initial_state)(jax.random.key(0)))
        self.symmetries = _symmetries(name)
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(_without_mask(self._state)))
        hidden = {"to_play": spaces.Discrete(2), "_state": spaces.Box(0, 255, (num_bytes,), np.uint8)}
        self.spec = EnvSpec(
            name=self._name,
            observation_space=spaces.Dict(self._spaces | hidden),
            action_space=self._action_space,
            max_episode_steps=PLIES[name],
            num_players=2,
        )

    def start(self) -> Any:
        """Returns the initial state of a game."""
        return jax.tree.map(jnp.asarray, self._start)

    def reset(self, key: jax.Array) -> Any:
        """Starts a new game, after 0 to `opening_plies` random legal plies that do not end it."""
        return self._play_opening(self.start(), key)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        """One ply, `action` int32 []. Nothing is drawn from `key`."""
        after, rewards = self._ply(state, action, key)
        over = after.terminated
        return after, Transition(rewards[state.current_player], jnp.where(over, 0.0, -1.0), over)

    def observe(self, state: Any) -> dict[str, jax.Array]:
        """The observation."""
        hidden = {"to_play": state._step_count % 2, "_state": _to_bytes(_without_mask(state))}
        return self._board_and_mask(state, state.current_player) | hidden

    def position(self, observation: dict[str, jax.Array]) -> Any:
        """Restores the state of an observation, as the root of a search."""
        state = _from_bytes(observation["_state"], _without_mask(self._state))
        return state.replace(legal_action_mask=observation["action_mask"] > 0)


class PgxEnvironment(_Rules):
    """A game of pgx for one player; other players, if any, move at random within `step`.

    Observation: `board`, pgx's observation of the player, uint8 of 0 and 1, or float32 where it is numbers;
      `action_mask` uint8 [A], 1 where an action is legal, and everywhere once the game is over.
    Reward: pgx's, of the player and summed until its next move. An illegal action ends the game at -1.
    Discount: 1, and 0 at the end; pgx has no time limits. The player's seat is drawn anew for every game.
    """

    def __init__(self, name: str, game: pgx.Env, opening_plies: int = 0, mask: bool = True):
        super().__init__(name, game, opening_plies)
        self._shown = [key for key in self._spaces if mask or key != "action_mask"]
        self.spec = EnvSpec(
            name=self._name,
            observation_space=spaces.Dict({key: self._spaces[key] for key in self._shown}),
            action_space=self._action_space,
            max_episode_steps=(PLIES[name] + 1) // 2 if name in PLIES else None,
        )

    def reset(self, key: jax.Array) -> Any:
        """Starts a new game, after its random plies, with the player to move."""
        first_key, opening_key, action_key, key = jax.random.split(key, 4)
        state = self._play_opening(self._initial_state(first_key), opening_key)
        if self._game.num_players == 1:
            return state
        return self._plies(state, _random_action(state, action_key), key, self._others_move(state))[0]

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        """Plays the player's ply, `action` int32 [], and those of the others after it."""
        if self._game.num_players == 1:
            after, (reward,) = self._ply(state, action, key)
        else:
            after, reward = self._plies(state, action, key, jnp.asarray(True))
        return after, Transition(reward, jnp.where(after.terminated, 0.0, 1.0), after.terminated)

    def observe(self, state: Any) -> dict[str, jax.Array]:
        """The observation."""
        shown = self._board_and_mask(state, jnp.int32(0))
        return {key: shown[key] for key in self._shown}

    def _others_move(self, state: Any) -> jax.Array:
        return ~state.terminated & (state.current_player != 0)

    def _plies(self, state: Any, action: jax.Array, key: jax.Array, goes_on: jax.Array) -> tuple[Any, jax.Array]:
        """Plays an action, if the game goes on, and then random ones until it is the player's turn.

        One loop, because rules take long to compile.

        Returns:
          The next state, and the sum of the player's rewards, float32 [].
        """

        def ply(carry: Any) -> Any:
            state, total, action, key, _ = carry
            key, step_key, action_key = jax.random.split(key, 3)
            state, rewards = self._ply(state, action, step_key)
            return state, total + rewards[0], _random_action(state, action_key), key, self._others_move(state)

        state, total, *_ = lax.while_loop(lambda carry: carry[-1], ply, (state, jnp.float32(0), action, key, goes_on))
        return state, total


def _random_action(state: Any, key: jax.Array) -> jax.Array:
    """Draws a legal action, int32 []."""
    return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -jnp.inf)).astype(jnp.int32)


def _strip(state: Any) -> Any:
    return state.replace(observation=(), rewards=(), truncated=())


def _without_mask(state: Any) -> Any:
    """Removes the mask, which an observation has too."""
    return state.replace(legal_action_mask=())


def _to_bytes(tree: Any) -> jax.Array:
    """Concatenates the bytes of a tree, uint8 [n]."""
    leaves = [x.astype(jnp.uint8) if x.dtype == bool else x for x in jax.tree.leaves(tree)]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in leaves])


def _from_bytes(data: jax.Array, like: Any) -> Any:
    """Inverts `_to_bytes`, for a tree with the shapes and dtypes of `like`."""

    def read(x: Any) -> jax.Array:
        nonlocal data
        size = x.dtype.itemsize
        part, data = data[: x.size * size], data[x.size * size :]
        if size == 1:
            return part.reshape(x.shape).astype(x.dtype)
        return lax.bitcast_convert_type(part.reshape(*x.shape, size), x.dtype)

    return jax.tree.map(read, like)


def _symmetries(name: str) -> board_game.Symmetries | None:
    """Returns the symmetries of boards whose cells, like actions, are numbered row by row; else None."""
    if name in ("tic_tac_toe", "connect_four", "othello"):
        return envs_jax.make(name).symmetries  # type: ignore[attr-defined]
    if name in ("go_9x9", "go_19x19"):
        return board_game.square_symmetries(9 if name == "go_9x9" else 19, passes=True)
    if name == "hex":
        cells = np.arange(11**2, dtype=np.int32)
        cells = np.stack([cells, cells[::-1]])  # half a turn: a side stays its player's
        return board_game.Symmetries(cells, np.concatenate([cells, np.full((2, 1), 11**2, np.int32)], axis=1))
    return None
