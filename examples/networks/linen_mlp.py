"""A network in Flax Linen: `python examples/networks/linen_mlp.py`."""

import flax.linen as nn

import envs_jax
import podracer
from podracer import nets, spaces


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, observation):
        x = observation.reshape(observation.shape[0], -1)
        x = nn.tanh(nn.Dense(64)(x))
        return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[:, 0]


def network(spec):
    module = ActorCritic(spec.action_space.num_values)
    observations = spaces.zeros(spec.observation_space)[None]
    return nets.feed_forward(lambda key: module.init(key, observations), module.apply)


if __name__ == "__main__":
    spec = envs_jax.make("catch").spec
    print(podracer.train("ppo", "catch", network=network(spec), total_steps=200_000).evaluate())
