"""Pure-JAX environments stepped from the host, on its CPU, to compare both drivers on one environment.

Rows depend on the lane's seed and its actions alone, never on how lanes are spread over threads, and the state can be
saved.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environments import autoreset
from podracer.environments.tasks import Tasks
from podracer.topology import host_cpu
from podracer.types import Environment, EnvSpec, HostStep


class SteppedEnvironments:
    """A pure-JAX environment as host environments (see `podracer.types.HostEnvironments`)."""

    saved = True

    def __init__(self, environment: Environment | Tasks):
        self.environment = environment
        self._device = host_cpu(f"arch='sebulba' on {environment.spec.name}, a pure-JAX environment,")

        def reset(seeds: jax.Array) -> Any:
            keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(seeds)
            return keys[:, 0], autoreset.reset_lanes(environment, keys[:, 1])

        def step(state: Any, actions: Any) -> Any:
            keys, lanes = state
            keys, reset_keys, step_keys = jax.vmap(lambda key: jax.random.split(key, 3), out_axes=1)(keys)
            return keys, autoreset.step_lanes(environment, lanes, actions, step_keys, reset_keys)

        self._reset, self._step = jax.jit(reset), jax.jit(step)

    @property
    def spec(self) -> EnvSpec:
        return self.environment.spec

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> SteppedEnvironment:
        """Starts lanes."""
        with jax.default_device(self._device):
            lanes = self._reset(jnp.asarray(seed + np.arange(num_lanes), jnp.int32))
        return SteppedEnvironment(self.spec, self._step, lanes, self._device)


class SteppedEnvironment:
    """Running lanes (see `podracer.types.HostEnvironment`), whose state can be saved."""

    def __init__(self, spec: EnvSpec, step: Any, lanes: Any, device: Any):
        self.spec = spec
        self._step, self._state, self._device = step, lanes, device
        self._lanes = np.arange(lanes[1].timestep.reward.shape[0], dtype=np.int32)

    def recv(self) -> tuple[np.ndarray, HostStep]:
        lanes = self._state[1]
        observation, reward, discount, first, last = jax.tree.map(np.asarray, lanes.timestep)
        metrics = np.stack([lanes.metrics[name] for name in self.spec.metrics]) if self.spec.metrics else None
        row = HostStep.of(observation, reward, discount == 0, first, last, metrics=metrics, discount=discount)
        return self._lanes, row

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        with jax.default_device(self._device):
            self._state = self._step(self._state, jax.tree.map(np.asarray, actions))

    def save(self) -> Any:
        """Returns the whole state, as a tree of arrays."""
        return self._state

    def load(self, saved: Any) -> None:
        """Restores a state from `save`."""
        self._state = jax.device_put(saved, self._device)

    def close(self) -> None:
        pass
