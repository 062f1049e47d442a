"""T-maze: a sign at the start of a corridor tells which way to turn at its end.

After Bakker, "Reinforcement Learning with Long Short-Term Memory" (2002), section 4. Differences from the paper: the
length of the corridor varies between episodes (option), the sign is shown once, in the first observation, rather than
whenever the agent stands at the start, and the first action has no effect. Because of the latter two, no agent can keep
the sign as its position instead of remembering it: all that follows the first observation, up to the turn, is
independent of the sign.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_NORTH, _EAST, _SOUTH, _WEST = range(4)

_ROCK, _FLOOR = np.array([[[24, 26, 36]]], np.uint8), np.array([[[52, 56, 72]]], np.uint8)
_GOOD, _BAD = np.array([[[96, 211, 148]]], np.uint8), np.array([[[239, 108, 96]]], np.uint8)
_AGENT, _SIGN = np.array([[[96, 165, 250]]], np.uint8), np.array([[[255, 215, 64]]], np.uint8)


@dataclasses.dataclass(frozen=True)
class TMazeOptions:
    """Options of `TMaze`.

    Attributes:
      min_length: the shortest corridor, in steps from its start to the junction.
      max_length: the longest one.
      max_steps: the time limit, a truncation; None means 4 * max_length.
      correct_reward: for the arm that the sign points to; 4 in the paper.
      wrong_reward: for the other arm; -0.1 in the paper.
      bump_penalty: taken off the reward of a step into a wall; 0.1 in the paper.
    """

    min_length: int = 5
    max_length: int = 10
    max_steps: int | None = None
    correct_reward: float = 1.0
    wrong_reward: float = -1.0
    bump_penalty: float = 0.0

    def __post_init__(self):
        def check(name: str, valid: bool, remedy: str):
            if not valid:
                raise ValueError(f"TMazeOptions({name}={getattr(self, name)!r}): use {remedy}.")

        low, high, limit = self.min_length, self.max_length, self.max_steps
        check("min_length", type(low) is int and low >= 1, "an integer of at least 1")
        check("max_length", type(high) is int and high >= low, f"an integer of at least min_length, {low}")
        remedy = f"None or an integer of at least {high + 2}, as the longest corridor takes that long"
        check("max_steps", limit is None or (type(limit) is int and limit >= high + 2), remedy)
        for name in ("correct_reward", "wrong_reward", "bump_penalty"):
            value = getattr(self, name)
            check(name, type(value) in (int, float) and math.isfinite(value), "a finite number")
        check("correct_reward", self.correct_reward > 0, "a number above 0, or turning never pays")
        check("wrong_reward", self.wrong_reward < self.correct_reward, "a number below correct_reward")
        check("bump_penalty", self.bump_penalty >= 0, "a number of at least 0")


class TMazeState(NamedTuple):
    """The maze of this episode, and the agent's position in it.

    Attributes:
      num_steps: int32 []; steps taken so far.
      length: int32 []; the column of the junction, in [min_length, max_length].
      cue: int32 []; direction of the sign: 1 north (left), -1 south (right).
      column: int32 []; the agent's, in [0, length].
      arm: int32 []; 1 once the agent is in the northern arm, -1 in the southern one, else 0.
    """

    num_steps: jax.Array
    length: jax.Array
    cue: jax.Array
    column: jax.Array
    arm: jax.Array


class TMaze:
    """T-maze.

    Start: a length and a cue, both uniform; the agent at the western end of the corridor.
    Observation: float32 [4]. Element 0 is the cue, -1 or +1, in the first observation and 0 ever after; the others are
      1 in the start cell, in the corridor between and at the junction, and all 0 in the arms.
    Action: `Discrete(4)`: a step north, east, south, west; walls stop it. The first action has no effect: the agent
      reads the sign.
    Reward: `correct_reward` for entering the arm that the cue names, `wrong_reward` for the other one; minus
      `bump_penalty` for any other step, except the first, that leaves the agent where it was.
    End: terminates in an arm; truncated after `max_steps` steps.
    Optimum: `correct_reward`, after length + 2 steps. With the default rewards a policy without memory earns 0 in
      expectation, and less with a `bump_penalty`, for which arm it enters does not depend on the cue.
    """

    def __init__(self, options: TMazeOptions = TMazeOptions()):
        self._options = options
        self._max_steps = options.max_steps or 4 * options.max_length
        self._correct, self._wrong = np.float32(options.correct_reward), np.float32(options.wrong_reward)
        self._bump = np.float32(0 - options.bump_penalty)
        self.spec = EnvSpec(
            name="t_maze",
            observation_space=spaces.Box(-1.0, 1.0, (4,)),
            action_space=spaces.Discrete(4),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> TMazeState:
        """A fresh length and a fresh cue."""
        low, high = self._options.min_length, self._options.max_length
        draws = jax.random.uniform(key, (2,))
        return TMazeState(
            num_steps=jnp.int32(0),
            length=low + jnp.floor(draws[0] * (high - low + 1)).astype(jnp.int32),
            cue=jnp.where(draws[1] < 0.5, jnp.int32(-1), jnp.int32(1)),
            column=jnp.int32(0),
            arm=jnp.int32(0),
        )

    def step(self, state: TMazeState, action: jax.Array, key: jax.Array) -> tuple[TMazeState, Transition]:
        """One move, `action` int32 []. Nothing is drawn from `key`."""
        reading = state.num_steps == 0
        along = (action == _EAST).astype(jnp.int32) - (action == _WEST).astype(jnp.int32)
        across = (action == _NORTH).astype(jnp.int32) - (action == _SOUTH).astype(jnp.int32)
        # An agent that reads is never at the junction, as no corridor is shorter than 1.
        arm = jnp.where(state.column == state.length, across, 0)
        column = jnp.where(reading, state.column, jnp.clip(state.column + along, 0, state.length))
        terminated = arm != 0
        bumped = (column == state.column) & ~terminated & ~reading
        state = state._replace(num_steps=state.num_steps + 1, column=column, arm=arm)
        return state, Transition(
            reward=jnp.where(
                terminated,
                jnp.where(arm == state.cue, self._correct, self._wrong),
                jnp.where(bumped, self._bump, jnp.float32(0)),
            ),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: TMazeState) -> jax.Array:
        """float32 [4]."""
        inside = state.arm == 0
        start, junction = inside & (state.column == 0), inside & (state.column == state.length)
        cue = jnp.where(state.num_steps == 0, state.cue, 0)
        places = [start, inside & ~start & ~junction, junction]
        return jnp.stack([cue, *(place.astype(jnp.int32) for place in places)]).astype(jnp.float32)

    def render(self, state: TMazeState) -> jax.Array:
        """The maze from above, uint8 [H, W, 3]: the right arm is green, and the start has a frame while it shows."""
        scale = 32
        rows, columns = np.arange(3, dtype=np.int32)[:, None], np.arange(self._options.max_length + 1)[None, :]
        arms = (rows != 1) & (columns == state.length)
        right = arms & (rows == 1 - state.cue)
        agent = (rows == 1 - state.arm) & (columns == state.column)
        sign = (rows == 1) & (columns == 0) & (state.num_steps == 0)
        disc = np.hypot(*np.ogrid[-1 : 1 : scale * 1j, -1 : 1 : scale * 1j]) < 0.7
        frame = np.ones((scale, scale), bool)
        frame[3:-3, 3:-3] = False

        def fill(cells: jax.Array, shape: np.ndarray) -> jax.Array:
            cells = jnp.repeat(jnp.repeat(cells, scale, axis=0), scale, axis=1)
            return (cells & np.tile(shape, (3, self._options.max_length + 1)))[..., None]

        corridor = (rows == 1) & (columns <= state.length)
        picture = jnp.where(corridor[..., None], _FLOOR, _ROCK)
        picture = jnp.where(right[..., None], _GOOD, jnp.where(arms[..., None], _BAD, picture))
        picture = jnp.repeat(jnp.repeat(picture, scale, axis=0), scale, axis=1)
        return jnp.where(fill(agent, disc), _AGENT, jnp.where(fill(sign, frame), _SIGN, picture))
