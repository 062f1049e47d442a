"""A network in Equinox: `python examples/networks/equinox_mlp.py` (pip install equinox)."""

import math

import equinox as eqx
import jax

import envs_jax
import podracer
from podracer import nets


class ActorCritic(eqx.Module):
    torso: eqx.nn.MLP
    policy: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, size, num_actions, key):
        keys = jax.random.split(key, 3)
        self.torso = eqx.nn.MLP(size, 64, 64, 1, jax.nn.tanh, jax.nn.tanh, key=keys[0])
        self.policy = eqx.nn.Linear(64, num_actions, key=keys[1])
        self.value = eqx.nn.Linear(64, "scalar", key=keys[2])

    def __call__(self, observation):
        x = self.torso(observation.reshape(-1))
        return self.policy(x), self.value(x)


def network(spec):
    def make(key):
        return ActorCritic(math.prod(spec.observation_space.shape), spec.action_space.num_values, key)

    # Parameters are arrays alone; activations and sizes stay here.
    _, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
    return nets.feed_forward(
        init=lambda key: eqx.filter(make(key), eqx.is_inexact_array),
        apply=lambda params, observation: jax.vmap(eqx.combine(params, static))(observation),
    )


if __name__ == "__main__":
    spec = envs_jax.make("catch").spec
    print(podracer.train("ppo", "catch", network=network(spec), total_steps=200_000).evaluate())
