"""Models of an environment that are learnt: representation h, dynamics g and prediction f (Schrittwieser et al. 2020).

    observation --h--> state --g(action)--> state --g(action)--> state       of each: f -> policy and value
                                 + reward              + reward

A state is what a search stores at a node; nothing says what is in it, but that rewards, values and policies can be read
from it. Your own model plugs in as a `WorldModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import nets, spaces
from podracer.nets.layers import MLP, Dense, standardize
from podracer.types import ArrayTree, EnvSpec


class WorldModel(NamedTuple):
    """Pure functions of parameters, for any number N of states.

    Attributes:
      init: `(key) -> params`.
      represent: `(params, observation [N, ...]) -> state [N, ...]`; frames are stacked.
      dynamics: `(params, state [N, ...], action int32 [N]) -> (state [N, ...], reward [N, K])`; K numbers of bins.
      predict: `(params, state [N, ...]) -> (policy [N, A], value [N, K])`; logits and K numbers of bins.
    """

    init: Callable[[jax.Array], ArrayTree]
    represent: Callable[[ArrayTree, ArrayTree], ArrayTree]
    dynamics: Callable[[ArrayTree, ArrayTree, jax.Array], tuple[ArrayTree, jax.Array]]
    predict: Callable[[ArrayTree, ArrayTree], tuple[jax.Array, jax.Array]]


@jax.custom_vjp
def half_gradient(x: jax.Array) -> jax.Array:
    """The array itself, with half of its gradient: what comes K steps later weighs 2^-K."""
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (0.5 * gradient,))


def make(
    spec: EnvSpec,
    *,
    num_bins: int,
    hidden_sizes: Sequence[int] = (128,),
    state_size: int = 64,
    head_size: int = 64,
    activation: Literal["relu", "tanh"] = "relu",
) -> WorldModel:
    """The standard model for an environment whose observations are vectors.

    Args:
      spec: of the environment, frames stacked; its actions are discrete.
      num_bins: K, numbers for a value or a reward.
      hidden_sizes: of h and of g.
      state_size: numbers in a state, which has mean 0 and variance 1.
      head_size: units of a hidden layer of each head.
      activation: of all.

    Raises:
      ValueError: for actions that are not discrete.
    """
    module = _Vectors(
        spec.observation_space,
        nets.num_actions(spec),
        num_bins,
        tuple(hidden_sizes),
        state_size,
        head_size,
        activation,
    )

    def init(key: jax.Array) -> ArrayTree:
        example = jax.tree.map(lambda x: x[None], spaces.zeros(spec.observation_space))
        return module.init(key, example, jnp.zeros(1, jnp.int32))

    def method(name: str) -> Callable[..., Any]:
        return lambda params, *arguments: module.apply(params, *arguments, method=name)

    return WorldModel(init, method("represent"), method("dynamics"), method("predict"))


class _Vectors(nn.Module):
    """Dense layers; see `make`."""

    observation_space: spaces.Space
    num_actions: int
    num_bins: int
    hidden_sizes: tuple[int, ...]
    state_size: int
    head_size: int
    activation: str

    def setup(self) -> None:
        mlp = lambda sizes, name: MLP(sizes, self.activation, name=name)  # noqa: E731
        self.h, self.g = mlp(self.hidden_sizes, "h"), mlp(self.hidden_sizes, "g")
        self.h_state, self.g_state = Dense(self.state_size, 1.0), Dense(self.state_size, 1.0)
        heads = {"reward": self.num_bins, "policy": self.num_actions, "value": self.num_bins}
        self.hidden = {name: mlp((self.head_size,), f"{name}_hidden") for name in heads}
        self.last = {name: Dense(size, 0.0, name=name) for name, size in heads.items()}

    def __call__(self, observation: ArrayTree, action: jax.Array) -> Any:
        state = self.represent(observation)
        return self.dynamics(state, action), self.predict(state)

    def _head(self, name: str, state: jax.Array) -> jax.Array:
        return self.last[name](self.hidden[name](state))

    def represent(self, observation: ArrayTree) -> jax.Array:
        return standardize(self.h_state(self.h(nets.encode(observation, self.observation_space, leading=1))))

    def dynamics(self, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = jnp.concatenate([state, jax.nn.one_hot(action, self.num_actions)], axis=-1)
        state = standardize(state + self.g_state(self.g(seen)))
        return state, self._head("reward", state)

    def predict(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._head("policy", state), self._head("value", state)
