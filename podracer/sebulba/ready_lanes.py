"""Acting for whichever lanes are ready (Espeholt et al. 2020, SEED RL, section 3).

Lanes whose environments take unequal times need not wait for each other: each has a clock of its own, which says where
in its rollout it is. Two rollouts are in the making at a time. A lane that is through with its part of one goes on in
the other, so lanes are at most a rollout apart, and what is handed over is a `Trajectory` [T, B] like any other.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import Closed
from podracer.sebulba import actor_program
from podracer.sebulba.actor import STAGES, Actor, Rollout, is_finite, not_finite
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, EpisodeStats, HostEnvironment, HostStep, Trajectory


class DoubleBuffer(NamedTuple):
    """Two rollouts in the making.

    Attributes:
      rows: [2, T+1, B, ...], [2, T+1, 4 or 6, B] and, if there are metrics, [2, T+1, M, B].
      actions: tree of [2, T, B, ...].
      extras: tree of [2, T, B, ...].
      versions: int32 [2, T, B].
      memory: [B]; the agent's state now.
      start_memory: [2, B]; its state before row 0.
    """

    rows: HostStep
    actions: ArrayTree
    extras: ArrayTree
    versions: jax.Array
    memory: ArrayTree
    start_memory: ArrayTree


class WriteIndex(NamedTuple):
    """Places of the rows of M lanes. Entries after the ready lanes have lane B, which does not exist.

    Attributes:
      lanes: int32 [M].
      half: int32 [M].
      t: int32 [M].
      ended: int32 [M]; the lanes whose row is row T of the other half too, B for the others.
    """

    lanes: Any
    half: Any
    t: Any
    ended: Any


class BeginFn(Protocol):
    """Makes empty buffers."""

    def __call__(self, carry: actor_program.ActorCarry, /) -> DoubleBuffer:
        """Makes them; lanes begin with the memory of the carry."""
        ...


class StepFn(Protocol):
    """Acts for the rows of some lanes."""

    def __call__(
        self,
        buffers: DoubleBuffer,
        params: ActorParams,
        key: jax.Array,
        count: jax.Array,
        where: WriteIndex,
        row: HostStep,
        /,
    ) -> tuple[DoubleBuffer, ArrayTree]:
        """Writes rows, and returns the buffers and the actions [M].

        Args:
          buffers: consumed; donate them.
          params: what the learner has published.
          key: the same at every call.
          count: int32 []; makes the key another one at every call.
          where: the places of the rows.
          row: [M]; the newest rows.
        """
        ...


class FinishFn(Protocol):
    """Copies a full trajectory."""

    def __call__(
        self, buffers: DoubleBuffer, games: actor_program.EpisodeCounters, lanes: jax.Array, half: jax.Array, /
    ) -> tuple[Trajectory, EpisodeStats, actor_program.EpisodeCounters]:
        """Returns the trajectory in a half, int32 [], its episodes, and the counters after it.

        Args:
          buffers: left as they are.
          games: the counters before it.
          lanes: int32 [B].
          half: int32 []; 0 or 1.
        """
        ...


class PartialActing(NamedTuple):
    """The functions of an actor, to be jitted.

    Attributes:
      begin: makes empty buffers.
      act: acts for the rows of some lanes.
      finish: copies a full trajectory.
    """

    begin: BeginFn
    act: StepFn
    finish: FinishFn


def make(agent: Agent, spec: EnvSpec, rollout_length: int) -> PartialActing:
    """The acting functions.

    Args:
      agent: the agent.
      spec: of the environments, which says what their rows are.
      rollout_length: T.
    """
    T = rollout_length

    def begin(carry: actor_program.ActorCarry) -> DoubleBuffer:
        (B,) = carry.games.over.shape
        row = jax.tree.map(jnp.asarray, HostStep.zeros(spec, B))
        action, extras = actor_program.act_once(agent, row.timestep, carry)
        many = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((2, n, *x.shape), x.dtype), tree)  # noqa: E731
        return DoubleBuffer(
            many(T + 1, row),
            many(T, action),
            many(T, extras),
            jnp.zeros((2, T, B), jnp.int32),
            jax.tree.map(jnp.copy, carry.memory),
            jax.tree.map(lambda x: jnp.stack([x, x]), carry.memory),
        )

    def act(
        buffers: DoubleBuffer,
        params: ActorParams,
        key: jax.Array,
        count: jax.Array,
        where: WriteIndex,
        row: HostStep,
    ) -> tuple[DoubleBuffer, ArrayTree]:
        lanes, half, t, ended = where
        memory = jax.tree.map(lambda x: x.at[lanes].get(mode="clip"), buffers.memory)
        rows = _write_rows(_write_rows(buffers.rows, 1 - half, T, ended, row), half, t, lanes, row)
        start_memory = jax.tree.map(lambda x, y: x.at[half, ended].set(y, mode="drop"), buffers.start_memory, memory)
        action, extras, memory = agent.act(params, memory, row.timestep, jax.random.fold_in(key, count), False)
        write = lambda to, value: jax.tree.map(lambda x, y: x.at[half, t, lanes].set(y, mode="drop"), to, value)  # noqa: E731
        return DoubleBuffer(
            rows,
            write(buffers.actions, action),
            write(buffers.extras, extras),
            write(buffers.versions, jnp.broadcast_to(params.version, lanes.shape)),
            jax.tree.map(lambda x, y: x.at[lanes].set(y, mode="drop"), buffers.memory, memory),
            start_memory,
        ), action

    def finish(
        buffers: DoubleBuffer, games: actor_program.EpisodeCounters, lanes: jax.Array, half: jax.Array
    ) -> tuple[Trajectory, EpisodeStats, actor_program.EpisodeCounters]:
        of_half = lambda tree: jax.tree.map(lambda x: x[half], tree)  # noqa: E731
        rows = of_half(buffers.rows)
        trajectory = Trajectory(
            timesteps=actor_program.timesteps(rows),
            actions=of_half(buffers.actions),
            extras=of_half(buffers.extras),
            actor_state=of_half(buffers.start_memory),
            policy_version=buffers.versions[half],
            lane=lanes,
        )
        games, episodes = actor_program.count(spec, games, rows)
        return trajectory, episodes, games

    return PartialActing(begin, act, finish)


def _write_rows(rows: HostStep, half: Any, t: Any, lanes: Any, row: HostStep) -> HostStep:
    """Writes rows [M]; lanes are the last axis of scalars and metrics, and the first of observations."""
    last = lambda x, y: x.at[half, t, :, lanes].set(y.T, mode="drop")  # noqa: E731
    return HostStep(
        jax.tree.map(lambda x, y: x.at[half, t, lanes].set(y, mode="drop"), rows.observation, row.observation),
        last(rows.scalars, row.scalars),
        last(rows.metrics, row.metrics) if jax.tree.leaves(rows.metrics) else (),
    )


class LaneCursors:
    """Positions of lanes in their rollouts, and the lanes that wait.

    Args:
      lanes: B.
      rollout_length: T.
      at_once: M.
    """

    def __init__(self, lanes: int, rollout_length: int, at_once: int):
        self._T, self._at_once = rollout_length, at_once
        self._t = np.zeros(lanes, np.int32)
        self._number = np.zeros(lanes, np.int64)
        self._played = np.zeros(2, np.int64)
        self.handed = 0

    def may_go_on(self, lanes: np.ndarray) -> np.ndarray:
        """bool [b]: True for lanes with a row that do not wait for a half to be handed over."""
        return (self._t[lanes] < self._T) | (self._number[lanes] <= self.handed)

    def advance(self, lanes: np.ndarray, first: np.ndarray) -> WriteIndex:
        """Places of the rows of lanes that may go on; advances their clocks to the next rows."""
        B, n = len(self._t), len(lanes)
        ends = self._t[lanes] == self._T
        for half in (0, 1):
            self._played[half] += np.count_nonzero(~first & (self._number[lanes] % 2 == half))
        self._number[lanes] += ends
        self._t[lanes[ends]] = 0
        where = WriteIndex(*np.zeros((4, self._at_once), np.int32))
        where.lanes[:n], where.lanes[n:] = lanes, B
        where.half[:n], where.t[:n] = self._number[lanes] % 2, self._t[lanes]
        where.ended[:] = B
        where.ended[:n][ends] = lanes[ends]
        self._t[lanes] += 1
        return where

    @property
    def full(self) -> bool:
        """True if all lanes have finished the rollout that is handed over next."""
        return bool(self._number.min() > self.handed)

    def hand_over(self) -> int:
        """Frees its half; returns its transitions."""
        half = self.handed % 2
        self.handed += 1
        played, self._played[half] = int(self._played[half]), 0
        return played


class PartialActor(Actor):
    """An actor of environments that return rows of some of their lanes (see `Actor`); `at_once` is M."""

    def __init__(self, *args: Any, at_once: int):
        super().__init__(*args)
        self._at_once = at_once

    def _act(self, environment: HostEnvironment) -> None:
        context, clock = self._shared, time.perf_counter
        act, finish = context.act[self.device], context.finish[self.device]
        carry, self._carry = self._carry, None
        buffers, games, key = context.begin[self.device](carry), carry.games, carry.keys[0]
        clocks = LaneCursors(len(self._lanes), context.rollout_length, self._at_once)
        nothing: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        seconds, steps, fault, diverged = dict(nothing), 0, "", False
        held: list[tuple[np.ndarray, HostStep]] = []
        while True:
            t0 = clock()
            self.waiting_since = None if self._wake else t0
            todo = [environment.recv()]
            self.waiting_since = None
            seconds["environment"] += clock() - t0
            while todo:
                lanes, rows = todo.pop(0)
                if self._ending.is_set():
                    raise Closed
                may = clocks.may_go_on(lanes)
                if not may.all():
                    held.append(_some(lanes, rows, ~may))
                    lanes, rows = _some(lanes, rows, may)
                if not len(lanes):
                    continue
                t0 = clock()
                where = clocks.advance(lanes, rows.scalars[2] > 0)
                if not fault and not diverged:
                    fault = not_finite(lanes, rows, where.t[: len(lanes)])
                now = context.store.newest()
                rows = _padded(rows, len(lanes), self._at_once)
                buffers, actions = act(buffers, now.params[self.device], key, np.int32(steps), where, rows)
                actions = jax.tree.map(lambda x, lanes=lanes: np.asarray(x)[: len(lanes)], actions)
                # What environments make of such actions is no fault of theirs.
                diverged = diverged or not all(map(is_finite, jax.tree.leaves(actions)))
                steps += 1
                t1 = clock()
                environment.send(lanes, actions)
                seconds["environment"] += clock() - t1
                seconds["inference"] += t1 - t0
                if clocks.full:
                    t0 = clock()
                    half = np.int32(clocks.handed % 2)
                    trajectory, episodes, games = finish(buffers, games, self._lanes, half)
                    trajectory = context.spread(trajectory, self.place // context.num_actors)
                    t1 = clock()
                    seconds["transfer"] = t1 - t0
                    played = clocks.hand_over()
                    context.channel.put(self.place, Rollout(trajectory, episodes, played, seconds, None, fault))
                    fault = ""
                    seconds = nothing | {"queue": clock() - t1}
                    self.number += context.num_actors
                    todo, held = todo + held, []


def _some(lanes: np.ndarray, rows: HostStep, which: np.ndarray) -> tuple[np.ndarray, HostStep]:
    """Some of the rows."""
    metrics = rows.metrics[:, which] if jax.tree.leaves(rows.metrics) else ()
    observation = jax.tree.map(lambda x: x[which], rows.observation)
    return lanes[which], HostStep(observation, rows.scalars[:, which], metrics)


def _padded(rows: HostStep, n: int, at_once: int) -> HostStep:
    """Rows [M], of which those beyond n are some that there are."""
    if n == at_once:
        return rows
    index = np.minimum(np.arange(at_once), n - 1)
    return _some(index, rows, index)[1]
