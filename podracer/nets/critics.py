"""Networks of agents with critics: a policy, and several value functions of an observation and an action.

Your own is an `ActorCritic` of two parts:

    network = nets.ActorCritic(policy, nets.Critic(init, apply))     # apply(params, inputs, action [B, A]) -> [N, B, K]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import spaces
from podracer.nets import network_check
from podracer.nets.encoding import encode
from podracer.nets.layers import MLP, Activation, Dense
from podracer.nets.network import Inputs, Network, NetworkError
from podracer.types import ArrayTree, EnvSpec


class Critic(NamedTuple):
    """N value functions of an observation and an action, of one structure.

    Attributes:
      init: `(key) -> params`, arrays with a leading axis N.
      apply: `(params, Inputs [1, B], action [B, A]) -> float32 [N, B, K]`; every element of an action is in [-1, 1].
        K numbers stand for a value; 1 is the value itself.
    """

    init: Callable[[jax.Array], ArrayTree]
    apply: Callable[[ArrayTree, Inputs, jax.Array], jax.Array]


class ActorCritic(NamedTuple):
    """A policy and its critics.

    Attributes:
      policy: feed-forward; its values are not used.
      critic: of the policy's actions.
    """

    policy: Network
    critic: Critic


def make(
    spec: EnvSpec,
    hidden_sizes: Sequence[int],
    activation: Activation,
    *,
    num_critics: int,
    num_actions: int,
    with_std: bool,
    first_std: float | None = None,
) -> ActorCritic:
    """Makes MLPs for a policy and its critics; weights and biases begin within 1 / sqrt(inputs) of 0, as Torch's do.

    Args:
      spec: of the environment.
      hidden_sizes: of each MLP.
      activation: of each MLP.
      num_critics: N.
      num_actions: A, elements of an action.
      with_std: whether outputs are 2 A numbers, A means and then A for standard deviations.
      first_std: the numbers for standard deviations of a new network; None leaves them as drawn.
    """
    layers: dict[str, Any] = {
        "space": spec.observation_space,
        "hidden_sizes": tuple(hidden_sizes),
        "activation": activation,
    }
    policy = _Policy(**layers, num_actions=num_actions, with_std=with_std, first_std=first_std)
    value = _Value(**layers)
    rows, action = _rows(spec, 1, 1), jnp.zeros((1, num_actions))

    def init(key: jax.Array) -> ArrayTree:
        return jax.vmap(lambda key: value.init(key, rows, action))(jax.random.split(key, num_critics))

    def apply(params: ArrayTree, inputs: Inputs, action: jax.Array) -> jax.Array:
        return jax.vmap(value.apply, in_axes=(0, None, None))(params, inputs, action)  # type: ignore[return-value]

    start = lambda num_lanes: ()  # noqa: E731
    return ActorCritic(
        Network(lambda key: policy.init(key, rows, ()), policy.apply, start),  # type: ignore[arg-type]
        Critic(init, apply),
    )


def check(network: Any, spec: EnvSpec, agent: str, num_outputs: int, num_actions: int) -> None:
    """Checks a user's own policy and critics by tracing them.

    Args:
      network: the object to check.
      spec: of the environment.
      agent: the agent's name.
      num_outputs: P, of the policy.
      num_actions: A, elements of an action.

    Raises:
      NetworkError: for an object that is no `ActorCritic`, a policy or critic that cannot be traced, or wrong shapes.
    """
    if not isinstance(network, ActorCritic):
        raise NetworkError(
            f"network={type(network).__name__}: {agent} has critics of actions; give nets.ActorCritic(policy, "
            "nets.Critic(init, apply))."
        )
    meaning = f"{num_actions} means"
    if num_outputs > num_actions:
        meaning += f" and {num_actions} numbers for standard deviations"
    network_check.check(network.policy, spec, agent, outputs=(num_outputs, meaning))
    if network.policy.recurrent:
        raise NetworkError(f"{agent} replays single rows, of which no recurrent state is kept; give a policy without.")
    network_check.check_critic(network.critic, lambda: _rows(spec, 1, network_check.B), num_actions, agent)


def _rows(spec: EnvSpec, num_rows: int, num_lanes: int) -> Inputs:
    """Inputs [T, B] of zeros."""
    shape = (num_rows, num_lanes)
    observation = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), spaces.zeros(spec.observation_space))
    return Inputs(observation, jnp.zeros(shape), jnp.ones(shape, bool), ())


class _Policy(nn.Module):
    """An MLP and a head of means, or of means and standard deviations; see `make`."""

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    num_actions: int
    with_std: bool
    first_std: float | None

    @nn.compact
    def __call__(self, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        x = encode(inputs.observation, self.space, leading=2)
        x = MLP(self.hidden_sizes, self.activation, "uniform", name="torso")(x)
        outputs = Dense(self.num_actions, "uniform", name="policy")(x)
        if self.with_std:
            if self.first_std is None:
                head = Dense(self.num_actions, "uniform", name="std")
            else:
                bias = nn.initializers.constant(self.first_std)
                head = Dense(self.num_actions, 0.0, bias=bias, name="std")
            outputs = jnp.concatenate([outputs, head(x)], axis=-1)
        return outputs, jnp.zeros(outputs.shape[:-1]), state


class _Value(nn.Module):
    """An MLP of an observation and an action, [1, B] and [B, A], and a head of one value, [B, 1]; see `make`."""

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, inputs: Inputs, action: jax.Array) -> jax.Array:
        features = encode(inputs.observation, self.space, leading=2)[0]
        x = jnp.concatenate([features, action], axis=-1)
        x = MLP(self.hidden_sizes, self.activation, "uniform", name="torso")(x)
        return Dense(1, "uniform", name="q")(x)
