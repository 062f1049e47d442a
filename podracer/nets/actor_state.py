"""The memory of a lane that an agent keeps for its network, and its use in acting and learning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax import lax

from podracer import spaces, topology
from podracer.nets import action_masks
from podracer.nets.network import Inputs, Network
from podracer.types import ArrayTree, EnvSpec, TimeStep, Trajectory


class ActorState(NamedTuple):
    """The memory of a lane that an agent keeps for its network.

    Attributes:
      core: the core's state.
      previous_action: if the network is recurrent, else ().
      frames: tree of [B, n - 1, ...]; what is stacked of the observations before this one, oldest first, if n > 1
        are, else ().
    """

    core: ArrayTree
    previous_action: ArrayTree
    frames: Any = ()

    def after(self, action: ArrayTree) -> ActorState:
        """The memory once an action was taken."""
        return self._replace(previous_action=action) if jax.tree.leaves(self.previous_action) else self


FRAME_STACKER = Network(lambda key: (), lambda params, rows, core: (rows.observation, rows.reward, core), lambda _: ())
"""A network without parameters whose outputs are its inputs, frames stacked: the input of a model that is searched."""


def start(network: Network, spec: EnvSpec, num_lanes: int, frame_stack: int = 1) -> ActorState:
    """The memory of lanes that have not started, [num_lanes]."""
    tile = lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape))  # noqa: E731
    action = spaces.zeros(spec.action_space) if network.recurrent else ()
    frames = ()
    if frame_stack > 1:
        frame = _stacked_part(spaces.zeros(spec.observation_space))
        frames = jax.tree.map(lambda x: jnp.zeros((num_lanes, frame_stack - 1, *x.shape), x.dtype), frame)
    return ActorState(network.start(num_lanes), jax.tree.map(tile, action), frames)


def stacked_spec(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    """The spec that a network sees when the newest `frame_stack` observations are stacked along the last axis.

    Of a `Dict`, the mask of actions and members whose names begin with an underscore are the newest ones alone.

    Raises:
      ValueError: for several choices in one array, whose stack is no space.
    """
    if frame_stack == 1:
        return spec
    where = f"frame_stack={frame_stack}: {spec.name} shows"
    return spec._replace(observation_space=_stacked_space(spec.observation_space, frame_stack, where))


def _stacked_space(space: spaces.Space, n: int, where: str, hidden: tuple[str, ...] = (action_masks.NAME,)) -> Any:
    """The space of n stacked values; `where` opens an error, and `hidden` is as in `_stacked_part`."""
    if isinstance(space, spaces.Dict):
        members = dict(space.items)
        return spaces.Dict(
            members | {name: _stacked_space(x, n, where, ()) for name, x in _stacked_part(members, hidden).items()}
        )
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete((space.num_values,) * n)
    if isinstance(space, spaces.MultiDiscrete):
        raise ValueError(f"{where} {space}, which cannot be stacked; show each choice as a member of its own.")
    shape = (*space.shape[:-1], space.shape[-1] * n) if len(space.shape) == 3 else (*space.shape, n)

    def stacked(bound: Any) -> Any:
        """Stacks bounds like `_stack`: of images all channels of a frame, and then the next frame's."""
        if not np.ndim(bound):
            return bound
        frames = [np.asarray(bound)] * n
        return np.concatenate(frames, -1) if len(space.shape) == 3 else np.stack(frames, -1)

    return spaces.Box(stacked(space.low), stacked(space.high), shape, space.dtype)


def _stacked_part(value: Any, hidden: tuple[str, ...] = (action_masks.NAME,)) -> Any:
    """The part of an observation that is stacked: what networks see of it (`nets.encode`).

    Args:
      value: an observation; a mapping for a `Dict`.
      hidden: names of members that are left out, beside those that begin with an underscore.
    """
    if not isinstance(value, Mapping):
        return value
    return {name: _stacked_part(x, ()) for name, x in value.items() if name not in hidden and not name.startswith("_")}


def _stack(state: ActorState, observation: ArrayTree, first: jax.Array) -> tuple[ArrayTree, Any]:
    """Observations [T, B] as the network sees them, and the frames to remember."""
    return (observation, ()) if isinstance(state.frames, tuple) else _stack_members(state.frames, observation, first)


def _stack_members(frames: ArrayTree, observation: Any, first: jax.Array) -> tuple[ArrayTree, ArrayTree]:
    """`_stack` of observations of which frames are remembered; members that have none stay as they are."""
    if isinstance(frames, Mapping):
        found = {name: _stack_members(frames[name], observation[name], first) for name in frames}
        seen = {**observation, **{name: member for name, (member, _) in found.items()}}
        return seen, {name: remembered for name, (_, remembered) in found.items()}
    stacked, frames = stack_frames(frames, observation, first)  # type: ignore[arg-type]
    if observation.ndim == 5:  # images [H, W, C]: channels of all frames, frame by frame
        stacked = jnp.moveaxis(stacked, -1, -2)
        stacked = stacked.reshape(*stacked.shape[:-2], -1)
    return stacked, frames


def step(
    network: Network, params: ArrayTree, state: ActorState, timestep: TimeStep
) -> tuple[jax.Array, jax.Array, ActorState]:
    """One row for acting: policy outputs [B, P], values [B] and the memory, but for the action (`ActorState.after`)."""
    # The network takes sequences: this is one of a single row.
    row = jax.tree.map(lambda x: x[None], timestep)
    observation, frames = _stack(state, row.observation, row.first)
    action = jax.tree.map(lambda x: x[None], state.previous_action)
    outputs, values, core = network.apply(params, Inputs(observation, row.reward, row.first, action), state.core)
    row_outputs = jax.tree.map(lambda x: x[0], outputs)
    return row_outputs, values[0], ActorState(core, state.previous_action, frames)


def inputs(network: Network, trajectory: Trajectory) -> Inputs:
    """The network's inputs at all T+1 rows: frames stacked, previous actions aligned."""
    rows = trajectory.timesteps
    before: ActorState = trajectory.actor_state
    actions = ()
    if network.recurrent:
        actions = jax.tree.map(lambda a, x: jnp.concatenate([a[None], x]), before.previous_action, trajectory.actions)
    return Inputs(_stack(before, rows.observation, rows.first)[0], rows.reward, rows.first, actions)


def unroll(network: Network, params: ArrayTree, trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
    """All T+1 rows of a trajectory for learning: policy outputs [T+1, B, P] and values [T+1, B], or [T+1, B, K]."""
    return network.apply(params, inputs(network, trajectory), trajectory.actor_state.core)[:2]


def without_frames(state: ActorState) -> ActorState:
    """The state as replay keeps it: frames are rebuilt from observations (`with_frames`)."""
    return state._replace(frames=())


def with_frames(kept: ActorState, observation: ArrayTree, first: jax.Array, frame_stack: int) -> ActorState:
    """The state with its frames again, from the `frame_stack - 1` rows before it: observations and first [n - 1, B]."""
    if frame_stack == 1:
        return kept
    nothing = jax.tree.map(lambda x: jnp.zeros_like(jnp.moveaxis(x, 0, 1)), _stacked_part(observation))
    return kept._replace(frames=_stack_members(nothing, observation, first)[1])


def frame_context(
    frame_stack: int,
    state_of: Callable[[Any], ActorState] = lambda memory: memory,
    empty: Callable[[int], ArrayTree] | None = None,
) -> dict[str, Any]:
    """The fields of `types.ReplaySpec` by which stored frames are shared: a sequence is stored without those before it.

    Args:
      frame_stack: the number of newest observations that the network sees.
      state_of: `(agent's memory) -> ActorState`.
      empty: `(num_lanes) -> state` of a core whose state is not stored, and begins empty; None stores it.
    """

    def keep(memory: Any) -> ActorState:
        state = without_frames(state_of(memory))
        return state._replace(core=()) if empty else state

    def restore(kept: ActorState, observation: ArrayTree, first: jax.Array) -> ActorState:
        state = with_frames(kept, observation, first, frame_stack)
        return state._replace(core=empty(first.shape[1])) if empty else state

    return {"context": frame_stack - 1, "keep": keep, "restore": restore}


def stack_frames(frames: jax.Array, observation: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Stacks each observation with the n - 1 before it in its episode, zeros where there are none (Mnih et al. 2015).

    Args:
      frames: [B, n - 1, ...]; the observations before row 0, oldest first.
      observation: [T, B, ...].
      first: bool [T, B].

    Returns:
      The stacks [T, B, ..., n], newest last, and the frames before row T.
    """
    # The line of all rows, of which a stack is n in a row, but for those of an earlier episode.
    line = jnp.concatenate([jnp.moveaxis(frames, 1, 0), observation])
    now, n = jnp.arange(observation.shape[0], dtype=jnp.int32)[:, None], frames.shape[1] + 1
    age = now - lax.cummax(jnp.where(first, now, -n))  # rows since the episode opened; n or more: before row 0
    # A program exported for any number of lanes cannot hold the bytes: their shape is not refined (jax 0.10).
    static = not any(map(jax_export.is_symbolic_dim, line.shape))
    of_bytes = static and n == 4 and line.dtype == jnp.uint8
    stacks = _stack_bytes(line, age) if of_bytes else jnp.stack(_in_episode(age, _shifted(line, n)), axis=-1)
    return stacks, jnp.moveaxis(stacks[-1][..., 1:], -1, 1)


def _shifted(line: jax.Array, n: int) -> list[jax.Array]:
    """The n frames that rows see, oldest first, each [T, ...] of the line [T + n - 1, ...]."""
    return [line[i : line.shape[0] - (n - 1 - i)] for i in range(n)]


def _in_episode(age: jax.Array, frames: list[jax.Array]) -> list[jax.Array]:
    """Frames [..., B, *shape], oldest first, with zeros for those from before an episode that is `age` [..., B] old."""
    age = age.reshape(*age.shape, *(1,) * (frames[0].ndim - age.ndim))
    back = reversed(range(len(frames)))
    return [jnp.where(age >= i, frame, jnp.zeros((), frame.dtype)) for i, frame in zip(back, frames)]


def _stack_bytes(line: jax.Array, age: jax.Array) -> jax.Array:
    """Stacks four bytes as one number each, in a fifth of the time on CPU."""

    def word(age: jax.Array, frames: list[jax.Array]) -> jax.Array:
        each = (frame.astype(jnp.uint32) for frame in _in_episode(age, frames))
        return functools.reduce(jnp.bitwise_or, (x << jnp.uint32(8 * place) for place, x in enumerate(each)))

    T = age.shape[0]
    if T > 1 and topology.on_cpu():
        # A loop, whose result XLA keeps. Without one, all that reads the stacks makes them once more, and an update of
        # the network "shallow" takes 1.2 times as long.
        words = lax.map(lambda t: word(age[t], [line[t + i] for i in range(4)]), jnp.arange(T, dtype=jnp.int32))
    else:
        words = word(age, _shifted(line, 4))
    return lax.bitcast_convert_type(words, jnp.uint8)
