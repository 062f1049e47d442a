"""Random play, to tell an environment that shows NaN from a policy whose actions are NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.environments import autoreset, tasks
from podracer.types import Environment

LANES, STEPS = 64, 1000


def not_finite(environment: Environment | tasks.Tasks) -> str:
    """Names the observation or reward of an environment that is not finite under random actions; "" for neither.

    Of several tasks, the first that has one is named too.
    """
    for name, one in tasks.alone(environment).items():
        if said := _not_finite(one):
            return f"in {name}, {said}" if environment.spec.tasks else said
    return ""


def _not_finite(environment: Environment) -> str:
    space = environment.spec.action_space

    def bad(lanes: autoreset.Lane) -> jax.Array:
        parts = lanes.timestep.observation, lanes.timestep.reward
        finite = [[jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(part) if x.dtype.kind == "f"] for part in parts]
        return jnp.stack([~jnp.all(jnp.array(part)) for part in finite])

    def step(lanes: autoreset.Lane, key: jax.Array) -> tuple[autoreset.Lane, jax.Array]:
        def one(lane: autoreset.Lane, key: jax.Array) -> autoreset.Lane:
            action_key, step_key, reset_key = jax.random.split(key, 3)
            return autoreset.step(environment, lane, space.sample(action_key), step_key, environment.reset(reset_key))

        lanes = jax.vmap(one)(lanes, jax.random.split(key, LANES))
        return lanes, bad(lanes)

    @jax.jit
    def play(key: jax.Array) -> Any:
        reset_key, key = jax.random.split(key)
        lanes = jax.vmap(lambda key: autoreset.reset(environment, key))(jax.random.split(reset_key, LANES))
        _, after_steps = lax.scan(step, lanes, jax.random.split(key, STEPS))
        return jnp.concatenate([bad(lanes)[None], after_steps])

    for name, is_bad in zip(("observation", "reward"), jax.device_get(play(jax.random.key(0))).T):
        if is_bad.any():
            return f"the environment's {name} is not finite after {is_bad.argmax()} steps of random actions"
    return ""
