"""Gymnasium's environments for workers that are processes: `serve-envs gymnasium:gyms:Counted-v0`."""

import os
import pathlib
import sys
import time

import gymnasium
import numpy as np

LENGTH = 5


class Counted(gymnasium.Env):
    """`workers.Counting` as a class of one's own: shows its seed, its step, and the last action that it received.

    The seed is shown in millionths, or so: a network that sees a million acts always alike.

    Args:
      delay: seconds that a step takes.
      reward: of action 1.
      hang: file that the first to reach its hundredth step makes, before it never returns.
      log: file of lines: process, its parent, whether gRPC is there, and the seed, one for each reset with a seed.
    """

    def __init__(self, delay=0.0, reward=1.0, hang="", log=""):
        self.observation_space = gymnasium.spaces.Box(-1.0, 2.0**31, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._delay, self._reward, self._hang, self._log = float(delay), float(reward), hang, log
        self._seed, self._step, self._number = 0, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed % 2**20 / 2**20
            if self._log:
                with open(self._log, "a") as file:
                    file.write(f"{os.getpid()} {os.getppid()} {int('grpc' in sys.modules)} {seed}\n")
        self._step = 0
        return np.asarray([self._seed, 0, -1], np.float32), {}

    def step(self, action):
        self._step, self._number = self._step + 1, self._number + 1
        if self._hang and self._number == 100 and not pathlib.Path(self._hang).exists():
            pathlib.Path(self._hang).touch()
            time.sleep(1000)
        time.sleep(self._delay)
        observation = np.asarray([self._seed, self._step, action], np.float32)
        return observation, self._reward * float(action), self._step == LENGTH, False, {}


gymnasium.register("Counted-v0", entry_point=Counted, max_episode_steps=LENGTH, disable_env_checker=True)
