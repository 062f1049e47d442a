"""Pixel Catch: `catch` seen as an 84 x 84 grey image, the frame size of the Atari agents.

The game is `envs_jax.catch`, step for step; only the observation differs. It exercises convolutional networks on a
task that is solved within minutes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.catch import Catch, CatchOptions, CatchState
from podracer import spaces
from podracer.types import EnvSpec, Transition

SIDE = 84
"""Pixels on each side of the image."""


@dataclasses.dataclass(frozen=True)
class PixelCatchOptions(CatchOptions):
    """Options of `PixelCatch`: those of `Catch`, with at most one row and one column for every pixel."""

    def __post_init__(self):
        super().__post_init__()
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            if value > SIDE:
                raise ValueError(f"PixelCatchOptions({name}={value!r}): use at most {SIDE}, one for every pixel.")


class PixelCatch:
    """Pixel Catch.

    Observation: uint8 [84, 84], 255 at the ball and at the paddle, else 0. The board fills the image: pixel (i, j)
      shows the cell (i * rows // 84, j * columns // 84), so on the default board a cell is 8 or 9 pixels high and
      16 or 17 wide.
    Action, reward, start and end: see `Catch`.
    """

    def __init__(self, options: PixelCatchOptions = PixelCatchOptions()):
        self._catch = Catch(CatchOptions(rows=options.rows, columns=options.columns))
        pixels = np.arange(SIDE, dtype=np.int32)
        self._rows = (pixels * options.rows // SIDE)[:, None]  # [84, 1]: the row of the board that a pixel shows
        self._columns = (pixels * options.columns // SIDE)[None, :]  # [1, 84]
        self.spec = EnvSpec(
            name="pixel_catch",
            observation_space=spaces.Box(0, 255, (SIDE, SIDE), np.uint8),
            action_space=self._catch.spec.action_space,
            max_episode_steps=self._catch.spec.max_episode_steps,
        )

    def reset(self, key: jax.Array) -> CatchState:
        """A fresh ball at the top."""
        return self._catch.reset(key)

    def step(self, state: CatchState, action: jax.Array, key: jax.Array) -> tuple[CatchState, Transition]:
        """One move, `action` int32 []. Nothing is drawn from `key`."""
        return self._catch.step(state, action, key)

    def observe(self, state: CatchState) -> jax.Array:
        """uint8 [84, 84]."""
        return self._catch.draw(state, self._rows, self._columns, np.uint8(255))

    def render(self, state: CatchState) -> jax.Array:
        """The observation at twice its size, uint8 [168, 168, 3]."""
        image = jnp.repeat(jnp.repeat(self.observe(state), 2, axis=0), 2, axis=1)
        return jnp.broadcast_to(image[..., None], (2 * SIDE, 2 * SIDE, 3))
