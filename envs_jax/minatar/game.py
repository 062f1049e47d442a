"""The common part of the games of MinAtar: sticky actions, the time limit, planes and pictures.

MinAtar is "MinAtar: An Atari-Inspired Testbed for Thorough and Reproducible Reinforcement Learning Experiments" (Young
and Tian, 2019). The games here are written from a description of their rules, and are equal to the package `minatar`
(1.0.15) transition by transition. They differ from it in two points: the action that may be repeated is the no-op at
the start of an episode, where the package keeps the last action of the episode before, and episodes have a time limit.

A game defines its start, its chance, the effect of an action and its cells; `MinAtarGame` makes an environment of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

SIDE = 10
"""Cells on each side of the board."""

NOOP, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
ALL_ACTIONS = (NOOP, LEFT, UP, RIGHT, DOWN, FIRE)

INDEX = np.arange(SIDE, dtype=np.int32)
ROWS, COLUMNS = INDEX[:, None], INDEX[None, :]
_PIXELS = 16  # on each side of a cell in a picture
_FLOOR = np.array((20, 22, 32), np.uint8)


@dataclasses.dataclass(frozen=True)
class MinAtarOptions:
    """Options of every game of MinAtar.

    Attributes:
      sticky_actions: probability with which the game repeats the action that it executed last.
      minimal_actions: True offers only the actions that do something in the game; False offers all six: no-op, left,
        up, right, down and fire.
      max_steps: the time limit of an episode, a truncation.
    """

    sticky_actions: float = 0.1
    minimal_actions: bool = True
    max_steps: int = 10_000

    def __post_init__(self):
        name = type(self).__name__
        if type(self.sticky_actions) not in (int, float) or not 0 <= self.sticky_actions <= 1:
            raise ValueError(f"{name}(sticky_actions={self.sticky_actions!r}): use a number in [0, 1].")
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(f"{name}(max_steps={self.max_steps!r}): use an integer of at least 1.")
        for field in ("minimal_actions", "ramping"):
            if type(value := getattr(self, field, True)) is not bool:
                raise ValueError(f"{name}({field}={value!r}): use True or False.")


@dataclasses.dataclass(frozen=True)
class RampingOptions(MinAtarOptions):
    """Options of games that become harder.

    Attributes:
      ramping: True makes the game faster as it goes on.
    """

    ramping: bool = True


class MinAtarState(NamedTuple):
    """A game within an episode.

    Attributes:
      game: the game's own state.
      last_action: int32 []; the action executed last, of the six, the no-op at the start.
      steps: int32 []; steps taken.
    """

    game: Any
    last_action: jax.Array
    steps: jax.Array


class MinAtarGame:
    """A game of MinAtar.

    Observation: uint8 [10, 10, C] of 0 and 1: rows from the top, columns from the left, and a plane for each channel.
    Action: `Discrete(A)`, the game's own or all six; with probability `sticky_actions` the last executed action is
      repeated instead.
    End: where the game says so, a termination; after `max_steps`, a truncation.
    """

    start_words, step_words = 0, 0
    """Random words that a start and a step of the game take."""

    def __init__(
        self,
        name: str,
        channels: tuple[tuple[int, int, int], ...],
        actions: tuple[int, ...],
        options: MinAtarOptions,
        game_steps: int | None = None,
    ):
        """Makes the environment of a game.

        Args:
          name: the name of the environment.
          channels: a colour for each channel, a later one over an earlier one.
          actions: the actions that do something.
          options: its options.
          game_steps: the steps after which the game itself ends, if it does.
        """
        self._channels, self._actions = channels, actions if options.minimal_actions else ALL_ACTIONS
        self._sticky, self._max_steps = round(options.sticky_actions * 2**24), options.max_steps
        self.spec = EnvSpec(
            name=name,
            observation_space=spaces.Box(0, 1, (SIDE, SIDE, len(channels)), np.uint8),
            action_space=spaces.Discrete(len(self._actions)),
            max_episode_steps=min(options.max_steps, game_steps or options.max_steps),
        )

    def start(self, words: jax.Array) -> Any:
        """Returns the first state of the game, `words` uint32 [start_words]."""
        raise NotImplementedError

    def draw(self, words: jax.Array) -> Any:
        """Returns the chance of a step, `words` uint32 [step_words]."""
        raise NotImplementedError

    def play(self, game: Any, action: jax.Array, chance: Any) -> tuple[Any, jax.Array, jax.Array]:
        """Returns the next state, the reward int32 [], and True where the game is over; `action` is one of the six."""
        raise NotImplementedError

    def cells(self, game: Any) -> jax.Array:
        """int32 [10, 10], whose bit c is set where channel c is."""
        raise NotImplementedError

    def reset(self, key: jax.Array) -> MinAtarState:
        """The start of a game."""
        words = jax.random.bits(key, (self.start_words,), jnp.uint32)
        return MinAtarState(self.start(words), last_action=jnp.int32(NOOP), steps=jnp.int32(0))

    def step(self, state: MinAtarState, action: jax.Array, key: jax.Array) -> tuple[MinAtarState, Transition]:
        """One step, `action` int32 []."""
        words = jax.random.bits(key, (1 + self.step_words,), jnp.uint32)
        chosen = action
        for i, known in enumerate(self._actions):
            if known != i:
                chosen = jnp.where(action == i, jnp.int32(known), chosen)
        sticks = (words[0] >> 8).astype(jnp.int32) < self._sticky
        executed = jnp.where(sticks, state.last_action, chosen)
        game, reward, over = self.play(state.game, executed, self.draw(words[1:]))
        steps = state.steps + 1
        transition = Transition(
            reward=reward.astype(jnp.float32),
            discount=1.0 - over.astype(jnp.float32),
            last=over | (steps >= self._max_steps),
        )
        return MinAtarState(game, executed, steps), transition

    def observe(self, state: MinAtarState) -> jax.Array:
        """uint8 [10, 10, C]."""
        shifts = np.arange(len(self._channels), dtype=np.int32)[None, None, :]
        return (self.cells(state.game)[..., None] >> shifts).astype(jnp.uint8) & np.uint8(1)

    def render(self, state: MinAtarState) -> jax.Array:
        """The board in colour, uint8 [160, 160, 3]."""
        planes = self.observe(state) == 1
        image = jnp.broadcast_to(_FLOOR, (SIDE, SIDE, 3))
        for c, colour in enumerate(self._channels):
            image = jnp.where(planes[..., c, None], np.array(colour, np.uint8)[None, None], image)
        return jnp.repeat(jnp.repeat(image, _PIXELS, axis=0), _PIXELS, axis=1)


def moved(x: jax.Array, action: jax.Array, negative: int, positive: int, low: int, high: int) -> jax.Array:
    """A coordinate after an action that lowers it, raises it or leaves it as it is, within [low, high]."""
    change = (action == positive).astype(jnp.int32) - (action == negative).astype(jnp.int32)
    return jnp.clip(x + change, low, high)


def cell(x: jax.Array, y: jax.Array, channel: int) -> jax.Array:
    """int32 [10, 10], with the channel's bit at one cell; none where x or y is off the board."""
    lit = jnp.where(x == COLUMNS, jnp.int32(1 << channel), 0)
    return jnp.where(y == ROWS, lit, 0)
