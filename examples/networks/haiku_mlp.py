"""A network in Haiku: `python examples/networks/haiku_mlp.py` (pip install dm-haiku)."""

import haiku as hk
import jax

import envs_jax
import podracer
from podracer import nets, spaces


def network(spec):
    def actor_critic(observation):
        x = hk.Flatten()(observation)
        x = jax.nn.tanh(hk.Linear(64)(x))
        return hk.Linear(spec.action_space.num_values)(x), hk.Linear(1)(x)[:, 0]

    transformed = hk.without_apply_rng(hk.transform(actor_critic))
    observations = spaces.zeros(spec.observation_space)[None]
    return nets.feed_forward(lambda key: transformed.init(key, observations), transformed.apply)


if __name__ == "__main__":
    spec = envs_jax.make("catch").spec
    print(podracer.train("ppo", "catch", network=network(spec), total_steps=200_000).evaluate())
