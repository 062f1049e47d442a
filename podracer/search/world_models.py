"""Models of an environment that are learnt: representation h, dynamics g and prediction f (Schrittwieser et al. 2020).

    observation --h--> state --g(action)--> state --g(action)--> state       of each: f -> policy and value
                                 + reward              + reward

A state is what a search stores at a node; nothing says what is in it, but that rewards, values and policies can be read
from it. Your own model plugs in as a `WorldModel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer import configs, nets, spaces
from podracer.nets.layers import MLP, Dense, LayerNorm, standardize
from podracer.nets.residual import Block, Encoder, Flatten, Head, conv3x3
from podracer.search import search
from podracer.types import ArrayTree, EnvSpec

Torso = Literal["auto", "mlp", "convolutions"]


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


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the standard model, in the configs of agents that learn one.

    Attributes:
      num_bins: K, of the distributions that rewards and values are; odd, so that one bin is 0 (Schrittwieser et al.
        2020: 601).
      torso: "mlp"; "convolutions" for images; "auto" takes those for uint8 images of at least 16x16.
      channels: of a state of convolutions, whose planes are at most 6x6 (Schrittwieser et al. 2020: 256).
      hidden_sizes: of h and of g as MLPs.
      state_size: numbers in a state of MLPs, which has mean 0 and variance 1.
      head_size: units of a hidden layer of each head.
    """

    num_bins: int = configs.field(41, low=3)
    torso: Torso = "auto"
    channels: int = configs.field(64, low=2)
    hidden_sizes: tuple[int, ...] = configs.field((128,), low=1)
    state_size: int = configs.field(64, low=1)
    head_size: int = configs.field(64, low=1)

    def __post_init__(self):
        configs.check(self)
        if self.num_bins % 2 == 0:
            raise ValueError(
                f"num_bins={self.num_bins} must be odd, so that one bin is 0, such as {self.num_bins + 1}."
            )


def make(spec: EnvSpec, sizes: Sizes) -> WorldModel:
    """The standard model for an environment.

    Args:
      spec: of the environment, frames stacked; its actions are discrete.
      sizes: of the model.

    Raises:
      ValueError: for actions that are not discrete, or convolutions on what is no image.
    """
    num_actions = nets.num_actions(spec)
    if takes_convolutions(spec, sizes.torso):
        module: Any = _Images(num_actions, sizes.num_bins, sizes.channels, sizes.head_size)
    else:
        space = spec.observation_space
        module = _Vectors(space, num_actions, sizes.num_bins, sizes.hidden_sizes, sizes.state_size, sizes.head_size)

    def init(key: jax.Array) -> ArrayTree:
        example = jax.tree.map(lambda x: x[None], spaces.zeros(spec.observation_space))
        return module.init(key, example, jnp.zeros(1, jnp.int32))

    def method(name: str) -> Callable[..., Any]:
        return lambda params, *arguments: module.apply(params, *arguments, method=name)

    return WorldModel(init, method("represent"), method("dynamics"), method("predict"))


def takes_convolutions(spec: EnvSpec, torso: Torso) -> bool:
    """Whether a torso is one of convolutions for an environment, frames stacked.

    Raises:
      ValueError: for convolutions on what is no image.
    """
    space = spec.observation_space
    if torso == "convolutions" and not nets.is_image(space):
        raise ValueError(
            f"torso='convolutions' needs uint8 images [H, W] or [H, W, C], but {spec.name} shows {space}; use 'mlp'."
        )
    return torso == "convolutions" or (torso == "auto" and nets.is_image(space) and min(space.shape[:2]) >= 16)  # type: ignore[union-attr]


def with_channels(images: jax.Array, leading: int) -> jax.Array:
    """Images [..., H, W, C], of those of one channel that may have no axis for it; `leading` dims are before H."""
    return images if images.ndim == leading + 3 else images[..., None]


def searched(model: WorldModel, expectation: Callable[[jax.Array], jax.Array], spec: EnvSpec) -> search.Model:
    """A world model as what is searched; its variables are `(params, discount)`.

    Args:
      model: of stacked observations.
      expectation: `([..., K]) -> [...]`; the number that bins stand for.
      spec: of the environment. What is legal is known where observations have an `action_mask`, and at the root alone;
        of two players, the other one moves next.
    """
    masked = isinstance(spec.observation_space, spaces.Dict) and "action_mask" in dict(spec.observation_space.items)

    def root(variables: ArrayTree, observation: ArrayTree) -> search.Root:
        state = model.represent(variables[0], observation)
        logits, value = model.predict(variables[0], state)
        return search.Root(logits, expectation(value), state, observation["action_mask"] > 0 if masked else None)

    def step(variables: ArrayTree, state: ArrayTree, action: jax.Array) -> search.Step:
        params, discount = variables
        state, reward = model.dynamics(params, state, action)
        logits, value = model.predict(params, state)
        discount = jnp.broadcast_to(-discount if spec.num_players == 2 else discount, action.shape)
        return search.Step(expectation(reward), discount, logits, expectation(value), state, None)

    return search.Model(root, step)


class _Vectors(nn.Module):
    """Dense layers; see `make`."""

    observation_space: spaces.Space
    num_actions: int
    num_bins: int
    hidden_sizes: tuple[int, ...]
    state_size: int
    head_size: int

    def setup(self) -> None:
        mlp = lambda sizes, name: MLP(sizes, "relu", name=name)  # noqa: E731
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


class _Images(nn.Module):
    """Residual convolutions, with a norm over each pixel's channels."""

    num_actions: int
    num_bins: int
    channels: int
    head_size: int

    def setup(self) -> None:
        C = self.channels
        self.h = Encoder(C, "layer")
        self.g, self.g_norm, self.g_block = conv3x3(C), LayerNorm(), Block(C, "layer")
        self.f = Block(C, "layer")
        sizes = {"reward": self.num_bins, "policy": self.num_actions, "value": self.num_bins}
        self.features = {name: Flatten("layer", name=f"{name}_features") for name in sizes}
        self.heads = {name: Head(size, self.head_size, "layer", name=name) for name, size in sizes.items()}

    def __call__(self, observation: jax.Array, action: jax.Array) -> Any:
        state = self.represent(observation)
        return self.dynamics(state, action), self.predict(state)

    def represent(self, observation: jax.Array) -> jax.Array:
        return _between_0_and_1(self.h(with_channels(observation, 1).astype(jnp.float32) / 255.0))

    def dynamics(self, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        plane = (action.astype(jnp.float32) / self.num_actions).reshape(-1, 1, 1, 1)
        seen = jnp.concatenate([state, jnp.broadcast_to(plane, (*state.shape[:-1], 1))], axis=-1)
        state = _between_0_and_1(self.g_block(nn.relu(self.g_norm(self.g(seen)) + state)))
        return state, self._head("reward", state)

    def predict(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.f(state)
        return self._head("policy", x), self._head("value", x)

    def _head(self, name: str, x: jax.Array) -> jax.Array:
        return self.heads[name](self.features[name](x))


def _between_0_and_1(planes: jax.Array) -> jax.Array:
    """States [N, h, w, C] with the least and the largest number of each at 0 and 1 (Schrittwieser et al. 2020)."""
    flat = planes.reshape(len(planes), -1)
    least, largest = (_at(flat, index) for index in (jnp.argmin(flat, axis=1), jnp.argmax(flat, axis=1)))
    return ((flat - least) / jnp.maximum(largest - least, 1e-5)).reshape(planes.shape)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """The number [N, 1] at an index [N] of each row of x [N, n]."""
    # jnp.max's gradient divides by how many numbers are the largest. A compiler that computes these numbers anew, and
    # rounds them otherwise, finds none, and the gradient is NaN.
    here = jnp.arange(x.shape[1])[None] == index[:, None]
    return jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True)
