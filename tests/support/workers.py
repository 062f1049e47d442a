"""Workers for tests, in threads of this process or in processes of their own."""

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

pytest.importorskip("grpc")

from podracer import spaces
from podracer.errors import Closed
from podracer.remote import session_pb2 as pb
from podracer.remote import worker
from podracer.remote.environments import RemoteEnvironments
from podracer.remote.settings import Remote
from podracer.types import EnvSpec, HostStep


class Counting:
    """Host environments whose lane counts its steps from its seed on; it shows the last action that it received too.

    Episodes have `length` transitions; the reward is the action.
    """

    def __init__(self, length=5, misbehave=lambda running: None, raw=False):
        self.length, self.misbehave = length, misbehave
        self.spec = EnvSpec("counting", spaces.Box(-1.0, 2.0**31, (3,)), spaces.Discrete(2), length, raw_scores=raw)

    def make(self, num_lanes, seed, *, evaluation=False):
        return Running(self, num_lanes, seed)


class Running:
    def __init__(self, parent, num_lanes, seed):
        self.parent, self.spec = parent, parent.spec
        self.lanes = np.arange(num_lanes, dtype=np.int32)
        self.seed = (seed + self.lanes) % 2**20
        self.number, self.step = 0, np.zeros(num_lanes, np.int32)
        self.action, self.over = np.full(num_lanes, -1), np.zeros(num_lanes, bool)

    def recv(self):
        self.parent.misbehave(self)
        first, last = self.step == 0, self.step == self.parent.length
        observation = np.stack([self.seed, self.step, self.action], axis=1).astype(np.float32)
        more = (self.action.astype(np.float32) * ~first, last) if self.spec.raw_scores else ()
        return self.lanes, HostStep.of(observation, self.action * ~first, last, first, last, *more)

    def send(self, lanes, actions):
        self.number += 1
        self.action = np.asarray(actions)
        self.step = np.where(self.step == self.parent.length, 0, self.step + 1)

    def close(self):
        pass


class Thread(threading.Thread):
    """A worker in a thread; `error` is what ended it."""

    def __init__(self, environments, where, **settings):
        super().__init__(daemon=True)
        self.error = None
        self._call = (environments, where), {"lanes": 8, "quiet": True, "give_up_after": 20.0} | settings
        self.start()

    def run(self):
        args, settings = self._call
        try:
            worker.serve_envs(*args, **settings)
        except Exception as error:
            self.error = error


@contextlib.contextmanager
def process(environment, where, *flags, **kwargs):
    """`podracer serve-envs`, in a process."""
    command = [sys.executable, "-m", "podracer", "serve-envs", environment, "--connect", where, *flags]
    here = str(pathlib.Path(__file__).parent)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, **kwargs) as child:
        try:
            yield child
        finally:
            child.kill()


def children(pid):
    """Worker processes of a supervisor."""
    with contextlib.suppress(OSError):  # it may end while it is looked at
        found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in found if is_worker(child)]
    return []


def is_worker(pid):
    """Returns True if a process was spawned, and runs."""
    with contextlib.suppress(OSError):
        return b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@contextlib.contextmanager
def learner(answer_timeout=60.0, options=None, **settings):
    """Remote environments in this process, without a run."""
    settings = Remote(**{"listen": "127.0.0.1:0", "join_timeout": 90.0} | settings)
    made = RemoteEnvironments("counting", Counting(), options, settings, answer_timeout=answer_timeout, strict=False)
    try:
        yield made
    finally:
        made.close(pb.Goodbye.FINISHED)


class Player(threading.Thread):
    """Steps lanes for as long as it is not stopped, and checks every row against the one before.

    Without `go` it answers no rows, and says with `at_rest` that it has some. `lost` says that a worker was given up:
    the next rows open episodes. `times` are those at which rows came. `error` is what ended it, if it was not `stop`.
    """

    def __init__(self, environment, lanes):
        super().__init__(daemon=True)
        self.environment, self._lanes = environment, np.arange(lanes)
        self.go, self.at_rest = threading.Event(), threading.Event()
        self.go.set()
        self.played, self.times, self.seeds, self.error = 0, [], set(), None
        self.lost = False
        self.start()

    def run(self):
        try:
            self._play()
        except Closed:
            pass
        except BaseException as error:
            self.error = error

    def _play(self):
        rng, before = np.random.default_rng(0), None
        while True:
            _, rows = self.environment.recv()
            first, last = rows.scalars[2] > 0, rows.scalars[3] > 0
            seed, number, shown = rows.observation.T
            filler = first & (number != 0)
            if before is not None:
                was_seed, was_number, was_last, was_filler, actions = before
                np.testing.assert_array_equal(seed[~first], was_seed[~first])
                np.testing.assert_array_equal(number[~first], was_number[~first] + 1)
                np.testing.assert_array_equal(shown[~first], actions[~first])
                assert not np.any(was_last & ~first)
                assert not np.any(was_filler & ~first), "a row of one that was given up"
            np.testing.assert_array_equal(rows.scalars[0][first], 0)
            assert first.all() or not self.lost, "a row of one that was given up"
            self.lost = False
            self.played += int((~first).sum())
            self.seeds.update(seed.tolist())
            self.times.append(time.monotonic())
            before = seed, number, last, filler, rng.integers(0, 2, len(first)).astype(np.int32)
            if not self.go.is_set():
                self.at_rest.set()
                self.go.wait()
                self.at_rest.clear()
            self.environment.send(self._lanes, before[-1])

    def stop(self):
        """Ends it; raises what was wrong."""
        self.go.set()
        self.environment.wake()
        self.join(10.0)
        self.environment.close()
        if self.error:
            raise self.error


def consumed(monkeypatch):
    """A list of what a run that begins now learns from: (time steps, actions) of its trajectories."""
    from podracer.sebulba import learner_program

    seen, make = [], learner_program.make

    def watched(*args, **kwargs):
        made = make(*args, **kwargs)

        def join(rollouts):
            trajectory = made.join(rollouts)
            seen.append(jax.device_get((trajectory.timesteps, trajectory.actions)))
            return trajectory

        return made._replace(join=join)

    monkeypatch.setattr("podracer.sebulba.driver.learner_program.make", watched)
    return seen


def check_consumed(seen, reward=1.0, one_actor=False):
    """Checks that rows of counting environments are in order, and actions those that they received; returns
    transitions.

    With `one_actor` also that each trajectory begins with the last row of the one before.
    """
    played = 0
    for (before, _), (after, _) in itertools.pairwise(seen if one_actor else ()):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[-1], y[0]), before, after)
    for steps, actions in seen:
        mask = ~steps.first[1:]
        seeds, number, shown = np.moveaxis(steps.observation, -1, 0)
        np.testing.assert_array_equal((number[1:] - number[:-1])[mask], 1)
        np.testing.assert_array_equal((seeds[1:] - seeds[:-1])[mask], 0)
        np.testing.assert_array_equal(shown[1:][mask], actions[mask])
        np.testing.assert_array_equal(steps.reward[1:][mask], reward * actions[mask])
        np.testing.assert_array_equal(steps.reward[steps.first], 0)
        played += int(mask.sum())
    return played
