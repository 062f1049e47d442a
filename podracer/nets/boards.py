"""Networks that look at a board: dense layers, or a tower of residual blocks (Silver et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import spaces
from podracer.nets.convolutions import Conv
from podracer.nets.layers import MLP, Dense
from podracer.nets.network import Inputs, Network
from podracer.nets.networks import num_actions
from podracer.types import ArrayTree, EnvSpec


def make_board(
    spec: EnvSpec, *, hidden_sizes: Sequence[int] = (128, 128), blocks: int = 0, channels: int = 64, head_size: int = 64
) -> Network:
    """Makes a network from the `board` of observations to policy logits [T, B, A] and values [T, B] in [-1, 1].

    Args:
      spec: a game's.
      hidden_sizes: sizes of the dense layers, without a tower.
      blocks: residual blocks of two convolutions each in the tower; 0 for no tower.
      channels: channels of the tower.
      head_size: units of a dense layer between the tower and both heads.
    """
    tower = (blocks, channels, head_size) if blocks else ()
    module = _BoardNet(num_actions(spec), tuple(hidden_sizes), tower)

    def init(key: jax.Array) -> ArrayTree:
        example: Any = spaces.zeros(spec.observation_space)
        return module.init(key, example["board"][None])

    def apply(params: ArrayTree, inputs: Inputs, state: ArrayTree) -> Any:
        observation: Any = inputs.observation
        board = observation["board"]
        T, B = board.shape[:2]
        outputs: Any = module.apply(params, board.reshape(T * B, *board.shape[2:]))
        logits, value = outputs
        return logits.reshape(T, B, -1), value.reshape(T, B), state

    return Network(init, apply, lambda num_lanes: ())


class _BoardNet(nn.Module):
    num_actions: int
    hidden_sizes: tuple[int, ...]
    tower: tuple[int, ...]

    @nn.compact
    def __call__(self, board: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = board.astype(jnp.float32)
        if self.tower:
            blocks, channels, head_size = self.tower
            x = nn.relu(_conv3x3(channels)(x))
            for i in range(blocks):
                # Without normalisation, so that lanes do not see each other: a block begins as nothing but its skip
                # connection (De and Smith 2020).
                y = _conv3x3(channels)(nn.relu(_conv3x3(channels)(x)))
                x = nn.relu(x + self.param(f"block_{i}", nn.initializers.zeros, ()) * y)
            x = nn.relu(Dense(head_size)(x.reshape(len(x), -1)))
        else:
            x = MLP(self.hidden_sizes, "relu")(x.reshape(len(x), -1))
        logits = Dense(self.num_actions, 0.01, name="policy")(x)
        return logits, jnp.tanh(Dense(1, 0.01, name="value")(x)[..., 0])


def _conv3x3(channels: int) -> Conv:
    return Conv(channels, 3, 1, "SAME", "he")
