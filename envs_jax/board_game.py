"""The common part of two-player board games: turns, illegal actions, finished games, openings and pictures.

A game defines its initial state, its legal actions and their effect; `BoardGame` makes an environment of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_LINE, _FELT = (20, 60, 44), (32, 96, 70)
_STONES = ((250, 204, 21), (239, 246, 255))  # of the first mover, and of the other player


class Symmetries(NamedTuple):
    """The G rotations and reflections of a game's board; the first one is the identity.

    The transformed board `board.reshape(-1)[cells[g]]` has the mask `action_mask[actions[g]]`. Action a on it is action
    `actions[g, a]` on the original: a policy is transformed as the mask is.

    Attributes:
      cells: int32 [G, H W].
      actions: int32 [G, A].
    """

    cells: np.ndarray
    actions: np.ndarray


class BoardGame:
    """A game of two players who put stones on a board in turns.

    A state is a NamedTuple with at least `board` int8 [H, W], 1 where the player to move has a stone and -1 where the
    other has one, `to_play` int32 [], 0 for the first mover and 1 for the other, and `over` bool [].

    Observation: `board` uint8 [H, W, 2] of 0 and 1, plane 0 the stones of the player to move and plane 1 the other's;
      `action_mask` uint8 [A], 1 where an action is legal, and everywhere once the game is over; `to_play` int32 [].
    Reward: of the player who acted: 1 for a won game, -1 for a lost one, else 0. An illegal action loses at once.
    Discount: -1, because the other player is to move (docs/adr/0019-signed-discount.md), and 0 at the end.
    A state that is over stays as it is when it is stepped, with reward and discount 0.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        num_actions: int,
        max_plies: int,
        opening_plies: int,
        symmetries: Symmetries,
    ):
        self.symmetries = symmetries
        self.spec = EnvSpec(
            name=name,
            observation_space=spaces.Dict(
                {
                    "board": spaces.Box(0, 1, (*shape, 2), np.uint8),
                    "action_mask": spaces.Box(0, 1, (num_actions,), np.uint8),
                    "to_play": spaces.Discrete(2),
                }
            ),
            action_space=spaces.Discrete(num_actions),
            max_episode_steps=max_plies,
            num_players=2,
        )
        self._shape, self._actions, self._opening_plies = shape, np.arange(num_actions, dtype=np.int32), opening_plies

    def start(self) -> Any:
        """Returns the initial state."""
        raise NotImplementedError

    def legal(self, state: Any) -> jax.Array:
        """Returns the legal actions of a state that is not over, bool [A]."""
        raise NotImplementedError

    def play(self, state: Any, action: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Plays a legal action; returns state, reward float32 [] and end bool [], from the mover's point of view."""
        raise NotImplementedError

    def reset(self, key: jax.Array) -> Any:
        """Starts a new game, after 0 to `opening_plies` random legal plies that do not end it."""
        if not self._opening_plies:
            return self.start()

        def step(state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
            after, transition = self.step(state, action, key)
            return after, transition.last

        return play_opening(self.start(), self._opening_plies, key, self.legal, step)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        """Plays one ply, `action` int32 []. Nothing is drawn from `key`."""
        # A comparison with all actions, because a gather takes longer under vmap.
        allowed = jnp.any(self.legal(state) & (self._actions == action))
        played, outcome, over = self.play(state, action)
        over = over | ~allowed
        board = jnp.where(allowed, played.board, state.board)
        after = played._replace(board=-board, to_play=1 - state.to_play, over=over)
        after = jax.tree.map(lambda new, old: jnp.where(state.over, old, new), after, state)
        reward = jnp.where(state.over, 0.0, jnp.where(allowed, outcome, -1.0))
        return after, Transition(reward, jnp.where(after.over, 0.0, -1.0), after.over)

    def observe(self, state: Any) -> dict[str, jax.Array]:
        """The observation."""
        board = jnp.stack([state.board == 1, state.board == -1], axis=-1)
        mask = self.legal(state) | state.over
        return {"board": board.astype(jnp.uint8), "action_mask": mask.astype(jnp.uint8), "to_play": state.to_play}

    def position(self, observation: dict[str, jax.Array]) -> Any:
        """Restores the state of an observation, of a game that is not over, as the root of a search.

        It holds only what a player sees. Othello's `passed` is therefore False: a second pass ends the game a ply
        later, on the same board.
        """
        board = observation["board"].astype(jnp.int8)
        return self.start()._replace(board=board[..., 0] - board[..., 1], to_play=observation["to_play"])

    def render(self, state: Any) -> jax.Array:
        """The board in colour, uint8 [H, W, 3], a cell 24 pixels wide: yellow moved first."""
        scale, (height, width) = 24, self._shape
        offset = (np.arange(scale) + 0.5) / scale - 0.5
        y, x = np.tile(offset, height)[:, None, None], np.tile(offset, width)[None, :, None]
        empty = np.where((np.abs(y) > 0.46) | (np.abs(x) > 0.46), np.array(_LINE, np.uint8), np.array(_FELT, np.uint8))
        board = jnp.where(state.to_play == 0, state.board, -state.board)
        stones = jnp.repeat(jnp.repeat(board, scale, 0), scale, 1)[..., None]
        one, other = (np.array(colour, np.uint8)[None, None] for colour in _STONES)
        disc = np.square(y) + np.square(x) < 0.38**2
        return jnp.where(disc & (stones != 0), jnp.where(stones == 1, one, other), empty)


def play_opening(state: Any, plies: int, key: jax.Array, legal: Callable[..., Any], step: Callable[..., Any]) -> Any:
    """Plays 0 to `plies` random legal plies that do not end the game.

    Args:
      state: the initial state.
      plies: at least 1.
      key: consumed.
      legal: `(state) -> bool [A]`.
      step: `(state, action int32 [], key) -> (state, over bool [])`; the action was drawn from the same key.
    """
    count_key, key = jax.random.split(key)
    count = jax.random.randint(count_key, (), 0, plies + 1)

    def ply(state: Any, x: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        i, key = x
        allowed = legal(state)
        chance = jax.random.uniform(key, allowed.shape)
        action = jnp.argmax(jnp.where(allowed, chance, -1.0)).astype(jnp.int32)
        after, over = step(state, action, key)
        accepted = (i < count) & ~over
        return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, state), None

    return jax.lax.scan(ply, state, (jnp.arange(plies, dtype=jnp.int32), jax.random.split(key, plies)))[0]


def square_symmetries(size: int, *, passes: bool) -> Symmetries:
    """Makes the 8 symmetries of a square board whose actions are its cells, and a last one to pass if `passes`."""
    grid = np.arange(size**2, dtype=np.int32).reshape(size, size)
    cells = np.stack([np.rot90(g, turns).reshape(-1) for g in (grid, grid.T) for turns in range(4)])
    passing = np.full((8, 1), size**2, np.int32)
    return Symmetries(cells, np.concatenate([cells, passing], axis=1) if passes else cells)


def check_opening(options: Any) -> None:
    """Checks the field `opening_plies` of a game's options.

    Raises:
      ValueError: where it is not an integer of at least 0.
    """
    plies = options.opening_plies
    if type(plies) is not int or plies < 0:
        raise ValueError(f"{type(options).__name__}(opening_plies={plies!r}): use an integer of at least 0.")
