"""Episodes of a policy as pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environments import autoreset, tasks
from podracer.environments.seeds import first_seed
from podracer.evaluation.evaluation import host_act
from podracer.evaluation.failures import playing
from podracer.run.driver import run_keys
from podracer.types import ActorParams, Agent, ArrayTree, Environment, HostEnvironments


def check_rendering(environment: Environment | HostEnvironments) -> None:
    """Renders one frame, so that an animation does not fail after training.

    Raises:
      ValueError: if the environment cannot be rendered, or not on this machine.
    """
    environment = _first_task(environment)
    if not isinstance(environment, HostEnvironments):
        _renderer(environment)  # its `render` was traced with the rest of it
        return
    running = _rendered(environment, 0)
    try:
        running.recv()
        running.frame()
    finally:
        running.close()


def _first_task(environment: Any) -> Any:
    return next(iter(tasks.alone(environment).values()))


def _renderer(environment: Environment) -> Callable[[Any], jax.Array]:
    render = getattr(environment, "render", None)
    if render is None:
        raise ValueError(f"{environment.spec.name} has no render(state); add one to make an animation of it.")
    return render


def _rendered(environments: HostEnvironments, seed: int) -> Any:
    make = getattr(environments, "render", None)
    environment = make(first_seed(seed, "evaluation")) if make else None
    if environment is None:
        raise ValueError(f"{environments.spec.name} cannot be rendered, so there is no animation of it.")
    return environment


def frames(
    agent: Agent,
    environment: Environment | HostEnvironments,
    params: ActorParams,
    seed: int,
    max_frames: int = 1000,
) -> np.ndarray:
    """One episode as rendered frames, uint8 [n, H, W, 3], by actions as in evaluation; of several tasks, in the first.

    Raises:
      ValueError: as in `check_rendering`.
    """
    environment = _first_task(environment)
    if isinstance(environment, HostEnvironments):
        return _host_frames(agent, environment, params, seed, max_frames)
    key, render = run_keys(seed)[2], _renderer(environment)

    @jax.jit
    def step(lanes: autoreset.Lane, memory: ArrayTree, key: jax.Array) -> Any:
        key, act_key, env_key = jax.random.split(key, 3)
        action, _, memory = agent.act(params, memory, lanes.timestep, act_key, True)
        keys = jax.random.split(env_key, 1)
        lanes = jax.vmap(functools.partial(autoreset.step, environment))(lanes, action, keys, lanes.env)
        return lanes, memory, key, render(jax.tree.map(lambda x: x[0], lanes.env)), lanes.timestep.last[0]

    reset_key, key = jax.random.split(key)
    lanes = jax.vmap(lambda k: autoreset.reset(environment, k))(jax.random.split(reset_key, 1))
    memory = agent.start(jnp.zeros(1, jnp.int32), 1)
    images = [np.asarray(render(jax.tree.map(lambda x: x[0], lanes.env)))]
    for _ in range(max_frames - 1):
        lanes, memory, key, image, last = step(lanes, memory, key)
        images.append(np.asarray(image))
        if last:
            break
    return np.stack(images)


def _host_frames(
    agent: Agent, environments: HostEnvironments, params: ActorParams, seed: int, max_frames: int
) -> np.ndarray:
    environment = _rendered(environments, seed)
    act, key = host_act(agent), run_keys(seed)[2]
    memory = agent.start(jnp.zeros(1, jnp.int32), 1)
    try:
        lanes, step = environment.recv()
        images = [environment.frame()]
        with playing(environments.spec.name):
            while len(images) < max_frames and not step.game_over[0]:
                action, memory, key = act(params, memory, step.timestep, key)
                environment.send(lanes, jax.tree.map(np.asarray, action))
                lanes, step = environment.recv()
                images.append(environment.frame())
    finally:
        environment.close()
    return np.stack(images)
