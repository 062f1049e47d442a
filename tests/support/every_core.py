"""A network that has every core, so that what a run does with states of cores is tested in one program."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import distributions, nets, spaces
from podracer.nets.cores import CORES
from podracer.types import ArrayTree, EnvSpec

SIZE = 4
SETTINGS: dict[str, dict[str, int]] = {
    "lstm": {},
    "gru": {},
    "mingru": {"layers": 2},
    "lru": {},
    "gtrxl": {"memory": 3},
}
assert set(SETTINGS) == set(CORES)


def core(of: str, **module: Any) -> Any:
    return CORES[of](SIZE, **SETTINGS[of], **module)


class EveryCore(nn.Module):
    """Cores side by side, each with heads of its own; outputs are their sums."""

    num_outputs: int

    @nn.compact
    def __call__(self, inputs: nets.Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        x = inputs.observation.reshape(*inputs.reward.shape, -1)
        outputs, after = jnp.zeros((*inputs.reward.shape, self.num_outputs + 1)), {}
        for name in SETTINGS:
            y, after[name] = core(name, name=name)(x, inputs.first, state[name])
            outputs = outputs + nn.Dense(self.num_outputs + 1, use_bias=False, name=f"{name}_heads")(y)
        return outputs[..., :-1], outputs[..., -1], after


def network(spec: EnvSpec) -> nets.Network:
    """Makes the network of a policy and a value for an environment of arrays."""
    module = EveryCore(distributions.for_space(spec.action_space).num_outputs)

    def start(num_lanes: int) -> ArrayTree:
        return {name: core(name).start(num_lanes) for name in SETTINGS}

    def init(key: jax.Array) -> ArrayTree:
        observation, action = (
            jax.tree.map(lambda x: x[None, None], spaces.zeros(space))
            for space in (spec.observation_space, spec.action_space)
        )
        return module.init(key, nets.Inputs(observation, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), action), start(1))

    return nets.Network(init, module.apply, start)  # type: ignore[arg-type]
