"""A network with a recurrence of its own, a GRU in Flax Linen: `python examples/networks/linen_gru.py`.

`apply` sees rows [T, B] and the state [B] before the first of them. Where a row is `first`, an episode opens, and the
state is what `start` returns.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import envs_jax
import podracer
from podracer import nets, spaces

UNITS = 64


def start(num_lanes):
    return jnp.zeros((num_lanes, UNITS))


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, inputs, state):
        x = inputs.observation.reshape(*inputs.reward.shape, -1)
        x = nn.relu(nn.Dense(UNITS)(x))

        def row(cell, state, now):
            x, first = now
            return cell(jnp.where(first[:, None], start(first.shape[0]), state), x)

        rows = nn.scan(row, variable_broadcast="params", split_rngs={"params": False})
        state, x = rows(nn.GRUCell(UNITS), state, (x, inputs.first))
        return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[..., 0], state


def network(spec):
    module = ActorCritic(spec.action_space.num_values)

    def init(key):
        observation, action = (
            jax.tree.map(lambda x: x[None, None], spaces.zeros(space))
            for space in (spec.observation_space, spec.action_space)
        )
        inputs = nets.Inputs(observation, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), action)
        return module.init(key, inputs, start(1))

    return nets.Network(init, module.apply, start)


if __name__ == "__main__":
    spec = envs_jax.make("memory_chain", length=10).spec
    result = podracer.train(
        "ppo", "memory_chain", env_options={"length": 10}, network=network(spec), total_steps=200_000
    )
    print(result.evaluate())
