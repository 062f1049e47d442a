"""Learned models of an environment: representation h, dynamics g and prediction f (Schrittwieser et al. 2020).

    observation --h--> state --g(action)--> state --g(action)--> state       of each: f -> policy and value
                                 + reward              + reward

A state is the embedding that a search stores at a node. It is trained only to predict rewards, values and policies.
Your own model plugs in as a `WorldModel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer import configs, nets, spaces
from podracer.nets.convolutions import CONVNETS, ConvNet
from podracer.nets.layers import MLP, Dense, LayerNorm, product, standardize
from podracer.nets.residual import Block, Encoder, Flatten, Head, conv3x3
from podracer.search import search
from podracer.types import ArrayTree, EnvSpec

Torso = Literal["auto", "mlp", "convolutions", "minatar"]


class WorldModel(NamedTuple):
    """Pure functions of parameters, for any number N of states.

    Attributes:
      init: `(key) -> params`.
      represent: `(params, observation [N, ...]) -> state [N, ...]`; frames are stacked.
      dynamics: `(params, state [N, ...], action int32 [N]) -> (state [N, ...], reward [N, K])`; K numbers of bins.
      predict: `(params, state [N, ...]) -> (policy [N, A], value [N, K])`; logits and K numbers of bins.
      termination: `(params, state [N, ...]) -> logit [N]` that the episode has terminated, of a state of `dynamics`;
        None for a model that does not predict it.
    """

    init: Callable[[jax.Array], ArrayTree]
    represent: Callable[[ArrayTree, ArrayTree], ArrayTree]
    dynamics: Callable[[ArrayTree, ArrayTree, jax.Array], tuple[ArrayTree, jax.Array]]
    predict: Callable[[ArrayTree, ArrayTree], tuple[jax.Array, jax.Array]]
    termination: Callable[[ArrayTree, ArrayTree], jax.Array] | None = None


@jax.custom_vjp
def half_gradient(x: jax.Array) -> jax.Array:
    """Returns the array, with half of its gradient: the loss K steps later weighs 2^-K."""
    return x


half_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (0.5 * gradient,))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the standard model, in the configs of agents that learn one.

    Attributes:
      num_bins: K, bins of the categorical distributions of rewards and values; odd, so that one bin is 0 (Schrittwieser
        et al. 2020: 601).
      torso: "mlp"; "convolutions" for images; "minatar" for small images, whose state is a vector: h is one
        convolution (16 3x3/1: Young and Tian 2019) and the state's layer; "auto" takes convolutions for uint8 images
        of at least 16x16.
      channels: channels of a convolutional state, of at most 6x6 pixels, or as many as an image of at most 10x10 has
        (Schrittwieser et al. 2020: 256).
      hidden_sizes: hidden layers of h and of g as MLPs; of g alone with "minatar".
      state_size: size of an MLP's state, which has mean 0 and variance 1.
      head_size: units of the hidden layer of each head.
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


INITIAL_TERMINATION_LOGIT = -4.0
"""The logit of terminations in a new model: few actions end an episode."""


def make(spec: EnvSpec, sizes: Sizes, *, terminations: bool = False) -> WorldModel:
    """Makes the standard model for an environment.

    Args:
      spec: the environment's, frames stacked; its actions are discrete.
      sizes: sizes of the model.
      terminations: True to predict them, by a head of its own.

    Raises:
      ValueError: for actions that are not discrete, or convolutions on observations that are no images.
    """
    num_actions = nets.num_actions(spec)
    torso = chosen_torso(spec, sizes.torso)
    if torso == "convolutions":
        largest = largest_value(spec.observation_space)
        module: Any = _Images(num_actions, sizes.num_bins, sizes.channels, sizes.head_size, largest, terminations)
    else:
        h = Features(spec.observation_space, torso, sizes.hidden_sizes)
        of_vectors = (sizes.hidden_sizes, sizes.state_size, sizes.head_size, terminations)
        module = _Vectors(h, num_actions, sizes.num_bins, *of_vectors)

    def init(key: jax.Array) -> ArrayTree:
        example = jax.tree.map(lambda x: x[None], spaces.zeros(spec.observation_space))
        return module.init(key, example, jnp.zeros(1, jnp.int32))

    def method(name: str) -> Callable[..., Any]:
        return lambda params, *arguments: module.apply(params, *arguments, method=name)

    termination = method("termination") if terminations else None
    return WorldModel(init, method("represent"), method("dynamics"), method("predict"), termination)


def check_terminations(cost: float, network: Any, predicts: bool) -> None:
    """Checks that a user's model predicts terminations just where there is a loss of them.

    Args:
      cost: `termination_cost`.
      network: the user's model, or None.
      predicts: True if it predicts terminations.

    Raises:
      ValueError: if it does not fit.
    """
    if network is not None and predicts != (cost > 0):
        has = "predicts terminations; use 1" if predicts else "predicts no terminations; use 0"
        raise ValueError(f"termination_cost={cost:g}: network= {has}.")


def chosen_torso(spec: EnvSpec, torso: Torso) -> Torso:
    """The torso for an environment, frames stacked: "auto" becomes one of the others.

    Raises:
      ValueError: for convolutions on observations that are no images, or on too small ones.
    """
    space = spec.observation_space
    if torso in ("convolutions", "minatar"):
        least = CONVNETS["minatar"].least_side if torso == "minatar" else 1
        if not nets.is_image(space) or min(space.shape[:2]) < least:  # type: ignore[union-attr]
            raise ValueError(
                f"torso={torso!r} needs uint8 images [H, W] or [H, W, C] of at least {least}x{least} pixels, but "
                f"{spec.name} shows {space}; use torso='mlp'."
            )
    if torso == "auto":
        large = nets.is_image(space) and min(space.shape[:2]) >= 16  # type: ignore[union-attr]
        return "convolutions" if large else "mlp"
    return torso


def largest_value(space: spaces.Space) -> float:
    """The largest value of a pixel of images, at least 1."""
    return max(1.0, float(np.max(space.high)))  # type: ignore[union-attr]


def with_channels(images: jax.Array, leading: int) -> jax.Array:
    """Adds an axis of channels to images [..., H, W] that have none; `leading` dims are before H."""
    return images if images.ndim == leading + 3 else images[..., None]


def searched(model: WorldModel, expectation: Callable[[jax.Array], jax.Array], spec: EnvSpec) -> search.Model:
    """Makes the search's model from a world model; its variables are `(params, discount)`.

    Args:
      model: a model of stacked observations.
      expectation: `([..., K]) -> [...]`; the mean of the distribution over bins.
      spec: the environment's. Legal actions are known at the root only, from an `action_mask` in observations. With two
        players, the discount is negative.
    """

    def root(variables: ArrayTree, observation: ArrayTree) -> search.Root:
        state = model.represent(variables[0], observation)
        logits, value = model.predict(variables[0], state)
        return search.Root(logits, expectation(value), state, nets.action_masks.legal(spec, observation))

    def step(variables: ArrayTree, state: ArrayTree, action: jax.Array) -> search.Step:
        params, discount = variables
        state, reward = model.dynamics(params, state, action)
        logits, value = model.predict(params, state)
        # The value of the next state is the other player's, in games of two (docs/adr/0019-signed-discount.md).
        discount = jnp.broadcast_to(-discount if spec.num_players == 2 else discount, action.shape)
        if model.termination is not None:
            # Nothing counts after a termination.
            discount = discount * jax.nn.sigmoid(-model.termination(params, state))
        return search.Step(expectation(reward), discount, logits, expectation(value), state, None)

    return search.Model(root, step)


class Features(nn.Module):
    """Observations to features [N, F], of which one layer makes a state.

    Attributes:
      space: of the observations.
      torso: "mlp" for an MLP; "minatar" for one convolution over images.
      hidden_sizes: of the MLP.
    """

    space: spaces.Space
    torso: Torso
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, observation: ArrayTree) -> jax.Array:
        if self.torso != "minatar":
            return MLP(self.hidden_sizes, "relu")(nets.encode(observation, self.space, leading=1))
        images = with_channels(observation, 1).astype(jnp.float32) / largest_value(self.space)
        features: jax.Array = ConvNet(dataclasses.replace(CONVNETS["minatar"], dense=0))(images)
        return features


class ActionGates(nn.Module):
    """States [N, F] and actions int32 [N] to [N, 2 F]: the state, and its product with weights of the action.

    The product shows an action as strongly as the state (Oh et al. 2015, section 3.2). One-hot actions beside a state
    are too faint (docs/adr/0049-actions-gate-states.md).
    """

    num_actions: int

    @nn.compact
    def __call__(self, state: jax.Array, action: jax.Array) -> jax.Array:
        weights = self.param("kernel", nn.initializers.normal(1.0), (self.num_actions, state.shape[-1]))
        # A product in place of weights[action], whose gradient adds in any order on a GPU.
        gates = product(jax.nn.one_hot(action, self.num_actions), weights)
        return jnp.concatenate([state, gates * state], axis=-1)


class _Vectors(nn.Module):
    """Dense layers; see `make`."""

    h: Features
    num_actions: int
    num_bins: int
    hidden_sizes: tuple[int, ...]
    state_size: int
    head_size: int
    terminations: bool = False

    def setup(self) -> None:
        mlp = lambda sizes, name: MLP(sizes, "relu", name=name)  # noqa: E731
        self.gates, self.g = ActionGates(self.num_actions), mlp(self.hidden_sizes, "g")
        self.h_state, self.g_state = Dense(self.state_size, 1.0), Dense(self.state_size, 1.0)
        heads = {"reward": self.num_bins, "policy": self.num_actions, "value": self.num_bins}
        heads |= {"termination": 1} if self.terminations else {}
        self.hidden = {name: mlp((self.head_size,), f"{name}_hidden") for name in heads}
        # Weights of 0: at first all predictions are uniform.
        self.last = {name: Dense(size, 0.0, name=name) for name, size in heads.items()}

    def __call__(self, observation: ArrayTree, action: jax.Array) -> Any:
        state = self.represent(observation)
        ended = self.termination(state) if self.terminations else ()
        return self.dynamics(state, action), self.predict(state), ended

    def _head(self, name: str, state: jax.Array) -> jax.Array:
        return self.last[name](self.hidden[name](state))

    def represent(self, observation: ArrayTree) -> jax.Array:
        return standardize(self.h_state(self.h(observation)))

    def dynamics(self, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        # g predicts the change of the state.
        state = standardize(state + self.g_state(self.g(self.gates(state, action))))
        return state, self._head("reward", state)

    def predict(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._head("policy", state), self._head("value", state)

    def termination(self, state: jax.Array) -> jax.Array:
        return INITIAL_TERMINATION_LOGIT + self._head("termination", state)[..., 0]


class _Images(nn.Module):
    """Residual convolutions, with a norm over each pixel's channels."""

    num_actions: int
    num_bins: int
    channels: int
    head_size: int
    largest: float
    terminations: bool = False

    def setup(self) -> None:
        C = self.channels
        self.h = Encoder(C, "layer", self.largest)
        self.g, self.g_norm, self.g_block = conv3x3(C), LayerNorm(), Block(C, "layer")
        self.f = Block(C, "layer")
        sizes = {"reward": self.num_bins, "policy": self.num_actions, "value": self.num_bins}
        sizes |= {"termination": 1} if self.terminations else {}
        self.features = {name: Flatten("layer", name=f"{name}_features") for name in sizes}
        self.heads = {name: Head(size, self.head_size, "layer", name=name) for name, size in sizes.items()}

    def __call__(self, observation: jax.Array, action: jax.Array) -> Any:
        state = self.represent(observation)
        ended = self.termination(state) if self.terminations else ()
        return self.dynamics(state, action), self.predict(state), ended

    def represent(self, observation: jax.Array) -> jax.Array:
        return _rescale(self.h(with_channels(observation, 1)))

    def dynamics(self, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The action as one constant plane, a / A (Schrittwieser et al. 2020, appendix E, encode h's history so).
        plane = (action.astype(jnp.float32) / self.num_actions).reshape(-1, 1, 1, 1)
        x = jnp.concatenate([state, jnp.broadcast_to(plane, (*state.shape[:-1], 1))], axis=-1)
        state = _rescale(self.g_block(nn.relu(self.g_norm(self.g(x)) + state)))
        return state, self._head("reward", state)

    def predict(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.f(state)
        return self._head("policy", x), self._head("value", x)

    def termination(self, state: jax.Array) -> jax.Array:
        return INITIAL_TERMINATION_LOGIT + self._head("termination", state)[..., 0]

    def _head(self, name: str, x: jax.Array) -> jax.Array:
        return self.heads[name](self.features[name](x))


def _rescale(planes: jax.Array) -> jax.Array:
    """Rescales each state [N, h, w, C] to [0, 1] (Schrittwieser et al. 2020, appendix G)."""
    flat = planes.reshape(len(planes), -1)
    least, largest = (_at(flat, index) for index in (jnp.argmin(flat, axis=1), jnp.argmax(flat, axis=1)))
    return ((flat - least) / jnp.maximum(largest - least, 1e-5)).reshape(planes.shape)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes the number [N, 1] at an index [N] of each row of x [N, n]."""
    # jnp.max's gradient divides by the number of maxima. A compiler that computes x again, rounded differently, finds
    # none, and the gradient is NaN.
    at_index = jnp.arange(x.shape[1])[None] == index[:, None]
    return jnp.sum(jnp.where(at_index, x, 0.0), axis=1, keepdims=True)
