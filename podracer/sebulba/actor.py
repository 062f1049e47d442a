"""An actor: a thread that steps its own batch of environments and acts on its device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environments import gate
from podracer.errors import Closed
from podracer.run.config import Mode
from podracer.sebulba.actor_program import ActorCarry
from podracer.sebulba.channels import Channel, ParamsStore
from podracer.sebulba.sharding import SpreadFn
from podracer.system.children import interrupts_blocked
from podracer.types import EpisodeStats, HostEnvironment, HostStep, Trajectory

STAGES = ("environment", "inference", "transfer", "queue", "parameters")
"""Parts of an actor's time: stepping, acting, handing over, waiting for room, waiting for parameters."""


class ActorSnapshot(NamedTuple):
    """The state from which an actor begins a rollout again: its environment's, and its own."""

    environment: Any
    carry: ActorCarry


class Rollout(NamedTuple):
    """A rollout on its way from an actor to the learner.

    Attributes:
      trajectory: on the learner devices.
      episodes: sums over the games that ended, on the actor's device.
      transitions: real ones, without resets.
      seconds: by stage.
      resume: where the rollout after this one begins, if asked for.
      fault: what of its observations is not finite although the actions were, in words, or "".
    """

    trajectory: Trajectory
    episodes: EpisodeStats
    transitions: int
    seconds: dict[str, float]
    resume: ActorSnapshot | None
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """Programs, parameters and settings that all actors share.

    Attributes:
      rollout_length: T.
      begin: compiled, by device.
      act: compiled, by device.
      finish: compiled, by device.
      spread: sends a trajectory to the learner devices.
      store: where parameters come from.
      channel: where rollouts go, from a place per thread of this process.
      mode: see `publication`.
      num_actors: threads of a replica.
      replicas: of all processes, whose rollouts are of the same thread in every round.
      keep_resume: whether rollouts say where the next begins.
    """

    rollout_length: int
    begin: dict[Any, jax.stages.Compiled]
    act: dict[Any, jax.stages.Compiled]
    finish: dict[Any, jax.stages.Compiled]
    spread: SpreadFn
    store: ParamsStore
    channel: Channel
    mode: Mode
    num_actors: int
    replicas: int
    keep_resume: bool

    @property
    def ordered(self) -> bool:
        """True if threads hand over in turn, and not as they come."""
        return self.mode != "async" or self.replicas > 1

    def publication(self, number: int) -> int | None:
        """The publication that acts in rollout `number` of a replica; None in "async": the newest at every step.

        In "lockstep" those after rollout `number - num_actors`, so that the rollouts since then can be learnt from
        meanwhile. In "serial" those after all rollouts before this round of the actors: nothing overlaps.
        """
        if self.mode == "async":
            return None
        return number - self.num_actors if self.mode == "lockstep" else number - number % self.num_actors


class Actor(threading.Thread):
    """Acts until the channel or the store is closed; keeps what went wrong in `error`.

    `number` is that of the rollout it is at, of all its replica's. `waiting_since` is when it began to wait for its
    environment, if it does.

    Args:
      index: of the actor among all; it names the thread.
      place: of the actor among those of this process.
      device: where it acts.
      make_environment: called in the thread.
      lanes: int32 [B]; their global indices.
      carry: where it begins; consumed.
      number: of the rollout that it begins with, of all its replica's.
      context: what it shares.
    """

    def __init__(
        self,
        index: int,
        place: int,
        device: Any,
        make_environment: Callable[[], HostEnvironment],
        lanes: jax.Array,
        carry: ActorCarry,
        number: int,
        context: ActorContext,
    ):
        super().__init__(name=f"actor {index} on {device}", daemon=True)
        self.index, self.place, self.device = index, place, device
        self.error: BaseException | None = None
        self.waiting_since: float | None = None
        self._make_environment = make_environment
        self._lanes = lanes
        self._carry: Any = carry
        self.number = number
        self._shared = context
        self._ending = threading.Event()
        self._wake: Callable[[], None] | None = None

    def stop(self) -> None:
        """Asks the thread to end after its current step, and an environment that can be woken not to wait for it."""
        self._ending.set()
        if self._wake:
            self._wake()

    def run(self) -> None:
        with interrupts_blocked():
            self._run()

    def _run(self) -> None:
        environment = None
        try:
            self.waiting_since = time.perf_counter()
            environment = self._make_environment()
            self._wake = getattr(environment, "wake", None)
            if self._wake:  # it watches itself
                self.waiting_since = None
            if self._ending.is_set():
                raise Closed
            self._act(environment)
        except Closed:
            pass
        except BaseException as error:
            if not self._ending.is_set():  # or nobody waits for it any more
                self.error = error
                self._shared.channel.close()
        finally:
            self._carry = None
            if environment is not None:
                with contextlib.suppress(Exception):  # nobody needs it any more, and its processes may be gone
                    environment.close()

    def _act(self, environment: HostEnvironment) -> None:
        context, store, T = self._shared, self._shared.store, self._shared.rollout_length
        act, finish = context.act[self.device], context.finish[self.device]
        carry, clock = self._carry, time.perf_counter
        self._carry = None  # it is donated
        buffer = context.begin[self.device](carry)
        queued = 0.0
        lanes, step = environment.recv()
        gate.check_rows(lanes, step, environment.spec)
        fault = not_finite(lanes, step, 0)
        self.waiting_since = None
        while True:
            t0 = clock()
            wanted = context.publication(self.number)
            published = store.wait(wanted) if wanted is not None else None
            waited = clock() - t0
            transitions, inference, stepping = 0, 0.0, 0.0
            versions = np.empty(T, np.int32)  # a new one: the last one may not have crossed yet
            for t in range(T):
                t0 = clock()
                now = published or store.newest()
                versions[t] = now.version
                buffer, actions = act(buffer, now.params[self.device], carry.keys, step)
                actions = np.asarray(actions) if isinstance(actions, jax.Array) else jax.device_get(actions)
                t1 = clock()
                self.waiting_since = None if self._wake else t1
                environment.send(lanes, actions)
                lanes, step = environment.recv()
                self.waiting_since = None
                fault = fault or not_finite(lanes, step, t + 1, actions)
                transitions += len(lanes) - int(np.count_nonzero(step.scalars[2]))
                t2 = clock()
                inference, stepping = inference + t1 - t0, stepping + t2 - t1
                if self._ending.is_set():
                    raise Closed
            t0 = clock()
            trajectory, episodes, buffer, carry = finish(buffer, carry, self._lanes, versions, step)
            trajectory = context.spread(trajectory, self.place // context.num_actors)
            resume = None
            if context.keep_resume:
                resume = ActorSnapshot(environment.save(), jax.tree.map(jnp.copy, carry))  # type: ignore[attr-defined]
            t1 = clock()
            seconds: dict[str, float] = dict(zip(STAGES, (stepping, inference, t1 - t0, queued, waited)))
            if self._ending.is_set():  # who was replaced hands nothing over
                raise Closed
            context.channel.put(self.place, Rollout(trajectory, episodes, transitions, seconds, resume, fault))
            queued, fault = clock() - t1, ""
            self.number += context.num_actors


def is_finite(x: np.ndarray) -> bool:
    """True for an array of finite numbers."""
    # The sum of squares takes a fraction of the time of looking at each number.
    return x.dtype.kind != "f" or math.isfinite(np.vdot(x, x))


def not_finite(lanes: np.ndarray, rows: HostStep, t: int | np.ndarray, actions: Any = ()) -> str:
    """Names what is not finite in rows of observations; "" for nothing.

    Args:
      lanes: int [B]; whose rows they are.
      rows: of the environments, [B].
      t: the row of a rollout, of all lanes or of each, [B].
      actions: that led to them; where these are not finite, it is no fault of the environment.
    """
    observation = rows.observation
    if isinstance(observation, np.ndarray):
        if is_finite(observation):
            return ""
    elif all(map(is_finite, jax.tree.leaves(observation))):
        return ""
    for path, x in jax.tree.leaves_with_path(observation):
        x = np.asarray(x)
        bad = ~np.isfinite(x).reshape(len(lanes), -1).all(axis=1)
        if bad.any() and all(np.all(np.isfinite(action)) for action in jax.tree.leaves(actions)):
            name = f"observation{jax.tree_util.keystr(path)}"
            row, lane = np.broadcast_to(t, lanes.shape)[bad][0], lanes[bad][0]
            return f"the environment's {name} is not finite in row {row} of a rollout, lane {lane} of its actor"
    return ""
