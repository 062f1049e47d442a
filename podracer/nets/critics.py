"""Networks of agents with critics: a policy, and several value functions of an observation and an action.

Your own is an `ActorCritic` of two parts:

    network = nets.ActorCritic(policy, nets.Critic(init, apply))     # apply(params, inputs, action [B, A]) -> [N, B, K]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import spaces, topology
from podracer.nets import network_check, simba
from podracer.nets.encoding import encode, seen_spec
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
      project: `(params) -> params` of either, after every step of an optimiser; None where any parameters will do.
    """

    policy: Network
    critic: Critic
    project: Callable[[ArrayTree], ArrayTree] | None = None


Torso = Literal["mlp", "simba_v2"]


def make(
    spec: EnvSpec,
    hidden_sizes: Sequence[int],
    activation: Activation,
    *,
    num_critics: int,
    num_actions: int,
    with_std: bool,
    first_std: float | None = None,
    num_values: int = 1,
    value_hidden_sizes: Sequence[int] | None = None,
    layer_norm: bool = False,
    torso: Torso = "mlp",
    policy_observations: Sequence[str] = (),
    value_observations: Sequence[str] = (),
) -> ActorCritic:
    """Makes a policy and its critics. Weights and biases of MLPs begin within 1 / sqrt(inputs) of 0, as Torch's do.

    Args:
      spec: of the environment.
      hidden_sizes: of the policy's torso, a layer or block each.
      activation: of MLPs.
      num_critics: N.
      num_actions: A, elements of an action.
      with_std: whether outputs are 2 A numbers, A means and then A for standard deviations.
      first_std: the numbers for standard deviations of a new network; None leaves them as drawn.
      num_values: K, numbers that stand for a value.
      value_hidden_sizes: of each critic's torso; None for the policy's.
      layer_norm: whether each layer of a critic's MLP is normalised before its activation.
      torso: "mlp", or "simba_v2", whose blocks are of one width (`podracer.nets.simba`).
      policy_observations: members of a `Dict` that the policy sees; () for all.
      value_observations: members that the critics see; () for all.
    """
    value_sizes = hidden_sizes if value_hidden_sizes is None else value_hidden_sizes
    layers: dict[str, Any] = {"activation": activation, "torso": torso}
    shown, of_critics = (seen_spec(spec, x).observation_space for x in (policy_observations, value_observations))
    policy = _Policy(
        shown,
        **layers,
        hidden_sizes=tuple(hidden_sizes),
        num_actions=num_actions,
        with_std=with_std,
        first_std=first_std,
    )
    value = _Value(of_critics, **layers, hidden_sizes=tuple(value_sizes), num_values=num_values, layer_norm=layer_norm)
    rows, action = _rows(spec, 1, 1), jnp.zeros((1, num_actions))

    def init(key: jax.Array) -> ArrayTree:
        return jax.vmap(lambda key: value.init(key, rows, action))(jax.random.split(key, num_critics))

    def apply(params: ArrayTree, inputs: Inputs, action: jax.Array) -> jax.Array:
        # On CPU each critic has its own copy of the inputs. One product of inputs that they share would have their
        # outputs side by side, and each later layer would transpose them.
        axis = 0 if topology.on_cpu() else None
        if axis == 0:
            inputs, action = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_critics, *x.shape)), (inputs, action))
        return jax.vmap(value.apply, in_axes=(0, axis, axis))(params, inputs, action)  # type: ignore[return-value]

    start = lambda num_lanes: ()  # noqa: E731
    return ActorCritic(
        Network(lambda key: policy.init(key, rows, ()), policy.apply, start),  # type: ignore[arg-type]
        Critic(init, apply),
        simba.project if torso == "simba_v2" else None,
    )


def check(network: Any, spec: EnvSpec, agent: str, num_outputs: int, num_actions: int, num_values: int = 1) -> None:
    """Checks a user's own policy and critics by tracing them.

    Args:
      network: the object to check.
      spec: of the environment.
      agent: the agent's name.
      num_outputs: P, of the policy.
      num_actions: A, elements of an action.
      num_values: K, numbers that stand for a value.

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
    network_check.check_critic(network.critic, lambda: _rows(spec, 1, network_check.B), num_actions, agent, num_values)


def _rows(spec: EnvSpec, num_rows: int, num_lanes: int) -> Inputs:
    """Inputs [T, B] of zeros."""
    shape = (num_rows, num_lanes)
    observation = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), spaces.zeros(spec.observation_space))
    return Inputs(observation, jnp.zeros(shape), jnp.ones(shape, bool), ())


class _Policy(nn.Module):
    """A torso and a head of means, or of means and standard deviations; see `make`."""

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    torso: str
    num_actions: int
    with_std: bool
    first_std: float | None

    @nn.compact
    def __call__(self, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        x = encode(inputs.observation, self.space, leading=2)
        x = _torso(self.torso, self.hidden_sizes, self.activation)(x)
        outputs = _head(self.torso, self.num_actions, "policy")(x)
        if self.with_std:
            if self.first_std is None:
                head = _head(self.torso, self.num_actions, "std")
            else:
                bias = nn.initializers.constant(self.first_std)
                head = Dense(self.num_actions, 0.0, bias=bias, name="std")
            outputs = jnp.concatenate([outputs, head(x)], axis=-1)
        return outputs, jnp.zeros(outputs.shape[:-1]), state


class _Value(nn.Module):
    """A torso of an observation and an action, [1, B] and [B, A], and a head of K numbers, [B, K]; see `make`."""

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    torso: str
    num_values: int
    layer_norm: bool

    @nn.compact
    def __call__(self, inputs: Inputs, action: jax.Array) -> jax.Array:
        features = encode(inputs.observation, self.space, leading=2)[0]
        x = jnp.concatenate([features, action], axis=-1)
        x = _torso(self.torso, self.hidden_sizes, self.activation, self.layer_norm)(x)
        return _head(self.torso, self.num_values, "q")(x)


def _torso(torso: str, sizes: tuple[int, ...], activation: str, layer_norm: bool = False) -> nn.Module:
    if torso == "simba_v2":
        return simba.Torso(sizes[0], len(sizes), name="torso")
    return MLP(sizes, activation, "uniform", norm=layer_norm, name="torso")


def _head(torso: str, size: int, name: str) -> nn.Module:
    return simba.Head(size, name=name) if torso == "simba_v2" else Dense(size, "uniform", name=name)
