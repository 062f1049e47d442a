"""Workers for tests, in threads of this process or in processes of their own."""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np

from podracer import spaces
from podracer.remote import worker
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
