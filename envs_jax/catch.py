"""Catch: move a paddle along the bottom of the board to catch a falling ball.

From "Recurrent Models of Visual Attention" (Mnih et al., 2014), with the rules of bsuite's `catch` (Osband et al.,
"Behaviour Suite for Reinforcement Learning", 2020), to which, as to EnvPool's `Catch-v0`, it is equal transition by
transition.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_BACKGROUND, _STRIPE = (24, 26, 36), (30, 33, 46)
_BALL, _PADDLE = (255, 215, 64), (96, 165, 250)


@dataclasses.dataclass(frozen=True)
class CatchOptions:
    """Options of `Catch`.

    Attributes:
      rows: the height of the board; an episode lasts rows - 1 steps.
      columns: the width of the board. With more than about 2 * rows columns some balls are out of reach.
    """

    rows: int = 10
    columns: int = 5

    def __post_init__(self):
        name = type(self).__name__
        if type(self.rows) is not int or self.rows < 2:
            raise ValueError(f"{name}(rows={self.rows!r}): use an integer of at least 2, so that the ball can fall.")
        if type(self.columns) is not int or self.columns < 1:
            raise ValueError(f"{name}(columns={self.columns!r}): use an integer of at least 1.")


class CatchState(NamedTuple):
    """The positions of the ball and the paddle; the paddle's row is always the last one.

    Attributes:
      ball_row: int32 []; also the number of steps taken; rows - 1 once the episode is over.
      ball_column: int32 []; in [0, columns).
      paddle_column: int32 []; in [0, columns).
    """

    ball_row: jax.Array
    ball_column: jax.Array
    paddle_column: jax.Array


class Catch:
    """Catch.

    Observation: float32 [rows, columns], 1 at the ball and at the paddle, else 0; row 0 is the top.
    Action: `Discrete(3)`; 0 moves the paddle left, 1 keeps it, 2 moves it right, and walls stop it. Then the ball
      falls by one row.
    Reward: when the ball reaches the bottom row, +1 if the paddle is there and -1 if not; 0 before.
    Start: the ball in the top row, in a uniformly random column; the paddle in the middle.
    End: terminates when the ball reaches the bottom row, after exactly rows - 1 steps.
    """

    def __init__(self, options: CatchOptions = CatchOptions()):
        self._num_rows, self._num_columns = options.rows, options.columns
        self.spec = EnvSpec(
            name="catch",
            observation_space=spaces.Box(0.0, 1.0, (self._num_rows, self._num_columns)),
            action_space=spaces.Discrete(3),
            max_episode_steps=self._num_rows - 1,
        )

    def reset(self, key: jax.Array) -> CatchState:
        """A fresh ball at the top."""
        # Not randint, which takes six times as long on CPU; the bias is below columns / 2**23.
        column = jax.random.uniform(key, dtype=jnp.float32) * self._num_columns
        return CatchState(
            ball_row=jnp.int32(0),
            ball_column=column.astype(jnp.int32),
            paddle_column=jnp.int32(self._num_columns // 2),
        )

    def step(self, state: CatchState, action: jax.Array, key: jax.Array) -> tuple[CatchState, Transition]:
        """One move, `action` int32 []. Nothing is drawn from `key`."""
        state = CatchState(
            ball_row=state.ball_row + 1,
            ball_column=state.ball_column,
            paddle_column=jnp.clip(state.paddle_column + action - 1, 0, self._num_columns - 1),
        )
        last = state.ball_row >= self._num_rows - 1
        outcome = jnp.where(state.paddle_column == state.ball_column, jnp.float32(1), jnp.float32(-1))
        reward = jnp.where(last, outcome, jnp.float32(0))
        return state, Transition(reward=reward, discount=1.0 - last.astype(jnp.float32), last=last)

    def observe(self, state: CatchState) -> jax.Array:
        """float32 [rows, columns]."""
        rows = np.arange(self._num_rows, dtype=np.int32)[:, None]
        columns = np.arange(self._num_columns, dtype=np.int32)[None, :]
        return self.draw(state, rows, columns, np.float32(1))

    def draw(self, state: CatchState, rows: np.ndarray, columns: np.ndarray, lit: np.float32 | np.uint8) -> jax.Array:
        """Draws the board at given cells.

        Args:
          state: the state.
          rows: int32 [H, 1]; the row of the board shown in each row of the result.
          columns: int32 [1, W]; the column of the board shown in each column of the result.
          lit: the value at the ball and at the paddle.

        Returns:
          [H, W] of lit's dtype: `lit` where the ball or the paddle is, else 0.
        """
        dark = type(lit)(0)
        # One comparison for each row and column, and only these selects for each cell: with boolean algebra on whole
        # boards instead, XLA:CPU takes five times as long for 84 x 84 pixels.
        ball = jnp.where(rows == state.ball_row, jnp.where(columns == state.ball_column, lit, dark), dark)
        paddle = jnp.where(columns == state.paddle_column, lit, dark)
        return jnp.maximum(ball, jnp.where(rows == self._num_rows - 1, paddle, dark))

    def render(self, state: CatchState) -> jax.Array:
        """The board in colour, uint8 [H, W, 3], the shorter side at least 64 pixels."""
        scale = max(8, -(-64 // min(self._num_rows, self._num_columns)))
        # Pixel centres, in cells.
        y = ((np.arange(self._num_rows * scale) + 0.5) / scale).astype(np.float32)[:, None, None]
        x = ((np.arange(self._num_columns * scale) + 0.5) / scale).astype(np.float32)[None, :, None]
        ball_y, ball_x = state.ball_row.astype(jnp.float32) + 0.5, state.ball_column.astype(jnp.float32) + 0.5
        paddle_x = state.paddle_column.astype(jnp.float32) + 0.5
        board = np.where(x // 1 % 2 == 0, np.array(_BACKGROUND, np.uint8), np.array(_STRIPE, np.uint8))
        paddle = (y > self._num_rows - 0.3) & (jnp.abs(x - paddle_x) < 0.45)
        ball = jnp.square(y - ball_y) + jnp.square(x - ball_x) < 0.35**2
        image = jnp.where(paddle, np.array(_PADDLE, np.uint8)[None, None], board)
        return jnp.where(ball, np.array(_BALL, np.uint8)[None, None], image)
