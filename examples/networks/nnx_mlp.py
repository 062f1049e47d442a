"""A network in Flax NNX: `python examples/networks/nnx_mlp.py`."""

import math

import jax
from flax import nnx

import envs_jax
import podracer
from podracer import nets


class ActorCritic(nnx.Module):
    def __init__(self, size, num_actions, rngs):
        self.torso = nnx.Linear(size, 64, rngs=rngs)
        self.policy = nnx.Linear(64, num_actions, rngs=rngs)
        self.value = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, observation):
        x = observation.reshape(observation.shape[0], -1)
        x = nnx.tanh(self.torso(x))
        return self.policy(x), self.value(x)[:, 0]


def network(spec):
    def make(key):
        size = math.prod(spec.observation_space.shape)
        return ActorCritic(size, spec.action_space.num_values, nnx.Rngs(key))

    static, _ = nnx.split(make(jax.random.key(0)))
    return nets.feed_forward(
        init=lambda key: nnx.state(make(key), nnx.Param),
        apply=lambda params, observation: nnx.merge(static, params)(observation),
    )


if __name__ == "__main__":
    spec = envs_jax.make("catch").spec
    print(podracer.train("ppo", "catch", network=network(spec), total_steps=200_000).evaluate())
