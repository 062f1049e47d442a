"""Actor-critic networks: torsos, an LSTM core with resets, and heads, behind plain `init` and `apply`.

A `Network` is two functions, so one written in Linen, Equinox, Haiku or by hand plugs in alike:

    network = nets.feed_forward(init, apply)     # apply(params, observation [N, ...]) -> (outputs [N, A], value [N])

Observations may have any leading dims; convolutions flatten them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import distributions, spaces
from podracer.types import ArrayTree, EnvSpec, TimeStep, Trajectory

Torso = Literal["auto", "mlp", "shallow", "nature", "resnet"]


class Inputs(NamedTuple):
    """What a network sees, [T, B, ...].

    Attributes:
      observation: tree of arrays.
      reward: float32; what arrived with the observation.
      first: bool; recurrent state resets before these rows.
      previous_action: the action that led here (ignored on first rows), or () for feed-forward networks.
    """

    observation: ArrayTree
    reward: jax.Array
    first: jax.Array
    previous_action: ArrayTree


class Network(NamedTuple):
    """An actor-critic network.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, Inputs [T, B], state [B]) -> (policy outputs [T, B, P], values [T, B], state [B])`.
      start: `(num_lanes) -> state [num_lanes]`, the state at an episode's start; `()` makes it feed-forward.
    """

    init: Callable[[jax.Array], ArrayTree]
    apply: Callable[[ArrayTree, Inputs, ArrayTree], tuple[jax.Array, jax.Array, ArrayTree]]
    start: Callable[[int], ArrayTree]

    @property
    def recurrent(self) -> bool:
        """Whether rows depend on earlier rows."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.start(1))))


def feed_forward(
    init: Callable[[jax.Array], ArrayTree], apply: Callable[[ArrayTree, ArrayTree], tuple[jax.Array, jax.Array]]
) -> Network:
    """A `Network` from a user's own `init(key) -> params` and `apply(params, observation [N, ...])`.

    `apply` returns policy outputs [N, P] (see `podracer.distributions` for what P must be) and values [N].
    """

    def unroll(params: ArrayTree, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        T, B = inputs.reward.shape
        flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), inputs.observation)
        outputs, values = apply(params, flat)
        if outputs.ndim != 2 or values.shape != (T * B,):
            raise ValueError(
                f"the network returned outputs {outputs.shape} and values {values.shape} for {T * B} observations; "
                f"it must return [{T * B}, P] and [{T * B}]."
            )
        return outputs.reshape(T, B, -1), values.reshape(T, B), state

    return Network(init, unroll, lambda num_lanes: ())


# The library's own network


def make(
    spec: EnvSpec,
    *,
    torso: Torso = "auto",
    hidden_sizes: Sequence[int] = (64, 64),
    activation: Literal["relu", "tanh"] = "relu",
    separate: bool = False,
    lstm_size: int = 0,
) -> Network:
    """The standard network for an environment: torso, optional LSTM, a policy head and a value head.

    Args:
      spec: of the environment.
      torso: "mlp"; "shallow" and "resnet" (IMPALA, figure 3: convolutions 16 8x8/4 and 32 4x4/2 with 256 units, and
        residual blocks of 16, 32, 32 channels with 256 units); "nature" (Mnih et al. 2015: 32 8x8/4, 64 4x4/2,
        64 3x3/1, 512 units). "auto" takes "shallow" for uint8 images of at least 36x36 and "mlp" for all else.
      hidden_sizes: of the MLP.
      activation: of the MLP.
      separate: whether policy and value have a torso each.
      lstm_size: units of an LSTM after the torso, fed with the previous action (one-hot) and reward too; 0 for none.

    Raises:
      ValueError: for a convolutional torso on observations that are not images.
    """
    distribution = distributions.for_space(spec.action_space)
    module = ActorCritic(
        observation_space=spec.observation_space,
        action_space=spec.action_space,
        torso=_choose_torso(spec, torso),
        hidden_sizes=tuple(hidden_sizes),
        activation=activation,
        separate=separate,
        lstm_size=lstm_size,
        num_outputs=distribution.num_outputs,
        free_scale=distribution.state_independent_scale,
    )

    def start(num_lanes: int) -> ArrayTree:
        return (jnp.zeros((num_lanes, lstm_size)), jnp.zeros((num_lanes, lstm_size))) if lstm_size else ()

    def init(key: jax.Array) -> ArrayTree:
        example = jax.tree.map(lambda x: x[None, None], spaces.zeros(spec.observation_space))
        action = jax.tree.map(lambda x: x[None, None], spaces.zeros(spec.action_space)) if lstm_size else ()
        inputs = Inputs(example, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), action)
        return module.init(key, inputs, start(1))

    return Network(init, module.apply, start)  # type: ignore[arg-type]


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _choose_torso(spec: EnvSpec, torso: Torso) -> Torso:
    space = spec.observation_space
    if torso == "auto":
        return "shallow" if _is_image(space) and min(space.shape[:2]) >= 36 else "mlp"  # type: ignore[union-attr]
    if torso != "mlp" and not _is_image(space):
        raise ValueError(
            f"torso={torso!r} needs uint8 images [H, W] or [H, W, C], but {spec.name} shows {space}; use torso='mlp'."
        )
    return torso


def encode(value: ArrayTree, space: spaces.Space, leading: int) -> jax.Array:
    """Flattens a value of a space into features [..., F], float32: one-hot choices, bytes scaled to [0, 1]."""
    if isinstance(space, spaces.Dict):
        return jnp.concatenate([encode(value[name], item, leading) for name, item in space.items], axis=-1)
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(value, space.num_values)
    if isinstance(space, spaces.MultiDiscrete):
        return jnp.concatenate([jax.nn.one_hot(value[..., i], n) for i, n in enumerate(space.num_values)], axis=-1)
    flat = value.reshape(*value.shape[:leading], int(np.prod(space.shape)))
    return flat.astype(jnp.float32) / 255.0 if space.dtype == np.uint8 else flat.astype(jnp.float32)


class ActorCritic(nn.Module):
    """Torso, optional LSTM, policy and value heads; see `make`."""

    observation_space: spaces.Space
    action_space: spaces.Space
    torso: Torso
    hidden_sizes: tuple[int, ...]
    activation: str
    separate: bool
    lstm_size: int
    num_outputs: int
    free_scale: bool

    @nn.compact
    def __call__(self, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        features = self._torso("torso", inputs.observation)
        value_features = self._torso("value_torso", inputs.observation) if self.separate else features
        if self.lstm_size:
            # The previous action and reward enter the core, not the torso (IMPALA, figure 3).
            keep = (~inputs.first).astype(jnp.float32)[..., None]
            action = encode(inputs.previous_action, self.action_space, leading=2) * keep
            core_inputs = [features, action, inputs.reward[..., None]]
            if self.separate:
                core_inputs.append(value_features)
            features, state = LSTM(self.lstm_size, name="core")(jnp.concatenate(core_inputs, -1), inputs.first, state)
            value_features = features
        num_heads = self.num_outputs // 2 if self.free_scale else self.num_outputs
        outputs = Dense(num_heads, scale=0.01, name="policy")(features)
        if self.free_scale:
            log_std = self.param("log_std", nn.initializers.zeros, (num_heads,))
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        values = Dense(1, scale=1.0, name="value")(value_features)[..., 0]
        return outputs, values, state

    def _torso(self, name: str, observation: ArrayTree) -> jax.Array:
        if self.torso == "mlp":
            features = encode(observation, self.observation_space, leading=2)
            return MLP(self.hidden_sizes, self.activation, name=name)(features)
        image = observation[..., None] if len(self.observation_space.shape) == 2 else observation  # type: ignore[union-attr]
        module = ResNet if self.torso == "resnet" else functools.partial(ConvNet, CONVNETS[self.torso])
        features = module(name=name)(image.reshape(-1, *image.shape[2:]).astype(jnp.float32) / 255.0)
        return features.reshape(*image.shape[:2], -1)


def orthogonal(scale: float) -> Callable[..., jax.Array]:
    """An initialiser for [inputs, outputs] with orthonormal rows or columns, whichever are fewer, times `scale`.

    The orthogonal factor of a Gaussian matrix by Newton-Schulz iterations, X <- 1.5 X - 0.5 X X' X, which drive every
    singular value to 1. Products only: a QR decomposition takes longer to compile than the rest of the network, and
    XLA:CPU can deadlock on several of them at once when there are few cores.
    """

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        x = jax.random.normal(key, (max(shape), min(shape)), dtype)
        x = lax.fori_loop(0, 40, lambda _, x: 1.5 * x - 0.5 * x @ (x.T @ x), x / jnp.linalg.norm(x))
        return scale * (x if shape[0] >= shape[1] else x.T)

    return init


class Dense(nn.Module):
    """A dense layer on the last axis, orthogonal weights times `scale`."""

    size: int
    scale: float = np.sqrt(2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self.param("kernel", orthogonal(self.scale), (x.shape[-1], self.size))
        bias = self.param("bias", nn.initializers.zeros, (self.size,))
        product = _product_with_cpu_gradient if jax.default_backend() == "cpu" else jnp.matmul
        y = product(x.reshape(-1, x.shape[-1]), weights)
        return y.reshape(*x.shape[:-1], self.size) + bias.reshape((1,) * (x.ndim - 1) + (self.size,))


# XLA:CPU has a fast kernel for x @ y but not for x.T @ y, which the gradient of the weights is: transposing the
# narrower operand for real, behind barriers that keep it from being folded back, makes that gradient 1.35 times faster
# on two cores.
@jax.custom_vjp
def _product_with_cpu_gradient(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x @ weights


def _product_forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    return x @ weights, (x, weights)


def _product_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = residuals
    if x.shape[1] <= cotangent.shape[1]:
        gradient = lax.optimization_barrier(x.T) @ cotangent
    else:
        gradient = lax.optimization_barrier(lax.optimization_barrier(cotangent.T) @ x).T
    return cotangent @ weights.T, gradient


_product_with_cpu_gradient.defvjp(_product_forward, _product_backward)


class MLP(nn.Module):
    """Dense layers, orthogonal weights scaled by sqrt(2)."""

    sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        activation = {"relu": nn.relu, "tanh": nn.tanh}[self.activation]
        for size in self.sizes:
            x = activation(Dense(size)(x))
        return x


class LSTM(nn.Module):
    """An LSTM over [T, B, F] that restarts from zeros before every `first` row."""

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        # The input projection does not depend on the recurrence: one large product before the scan.
        gates_x = Dense(4 * self.size, scale=1.0, name="input")(x)
        kernel = self.param("recurrent", orthogonal(1.0), (self.size, 4 * self.size))

        def step(carry: ArrayTree, now: tuple[jax.Array, jax.Array]) -> tuple[ArrayTree, jax.Array]:
            gates, reset = now
            h, c = jax.tree.map(lambda s: jnp.where(reset[:, None], 0.0, s), carry)
            i, f, g, o = jnp.split(gates + h @ kernel, 4, axis=-1)
            c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
            h = nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        state, outputs = lax.scan(step, state, (gates_x, first))
        return outputs, state


# Convolutions


@dataclasses.dataclass(frozen=True)
class ConvNetSpec:
    """Layers as (features, kernel, stride), and the units of the dense layer behind them."""

    layers: tuple[tuple[int, int, int], ...]
    dense: int


CONVNETS = {
    "shallow": ConvNetSpec(((16, 8, 4), (32, 4, 2)), 256),
    "nature": ConvNetSpec(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
}


class ConvNet(nn.Module):
    """Plain valid convolutions and a dense layer; images [N, H, W, C] to features [N, dense]."""

    layout: ConvNetSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, kernel, stride in self.layout.layers:
            x = nn.relu(Conv(features, kernel, stride)(x))
        return nn.relu(Dense(self.layout.dense)(x.reshape(x.shape[0], -1)))


class ResNet(nn.Module):
    """IMPALA's deep network (figure 3, right): images [N, H, W, C] to features [N, 256]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32, 32):
            x = Conv(features, 3, 1, padding="SAME")(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                y = Conv(features, 3, 1, padding="SAME")(nn.relu(x))
                x = x + Conv(features, 3, 1, padding="SAME")(nn.relu(y))
        x = nn.relu(x)
        return nn.relu(Dense(256)(x.reshape(x.shape[0], -1)))


class Conv(nn.Module):
    """A 2-D convolution of [N, H, W, C]; its gradient is by patches on CPU (see `_conv_with_patch_gradient`)."""

    features: int
    kernel: int
    stride: int
    padding: str = "VALID"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.features)
        weights = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        conv = _conv_with_patch_gradient if jax.default_backend() == "cpu" else _conv
        return conv(x, weights, self.stride, self.padding) + bias.reshape(1, 1, 1, -1)  # type: ignore[operator]


def _conv(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    return lax.conv_general_dilated(x, weights, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _conv_by_patches(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    """The same convolution as strided slices and one matrix product."""
    kernel = weights.shape[0]
    if padding == "SAME":
        pads = lax.padtype_to_pads(x.shape[1:3], (kernel, kernel), (stride, stride), padding)
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    height, width = ((n - kernel) // stride + 1 for n in x.shape[1:3])
    patches = jnp.concatenate(
        [
            x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
            for i in range(kernel)
            for j in range(kernel)
        ],
        axis=-1,
    )
    return patches @ weights.reshape(-1, weights.shape[-1])


# XLA:CPU runs the gradient of a convolution inside a loop 8 to 20 times slower than outside, and Anakin is one loop
# (https://github.com/jax-ml/jax/issues/12868). The forward pass stays a convolution, which is the faster there.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_with_patch_gradient(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    return _conv(x, weights, stride, padding)


def _conv_forward(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> tuple[jax.Array, Any]:
    return _conv(x, weights, stride, padding), (x, weights)


def _conv_backward(stride: int, padding: str, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, vjp = jax.vjp(lambda x, w: _conv_by_patches(x, w, stride, padding), *residuals)
    return vjp(cotangent)


_conv_with_patch_gradient.defvjp(_conv_forward, _conv_backward)


# Acting and learning with a network


class ActorState(NamedTuple):
    """What an actor-critic agent remembers of a lane: the core's state, and the previous action if it is recurrent."""

    core: ArrayTree
    previous_action: ArrayTree


def start(network: Network, spec: EnvSpec, num_lanes: int) -> ActorState:
    """The memory of lanes that have not started, [num_lanes]."""
    action = spaces.zeros(spec.action_space) if network.recurrent else ()
    tiled = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape)), action)
    return ActorState(network.start(num_lanes), tiled)


def step(
    network: Network, params: ArrayTree, state: ActorState, timestep: TimeStep
) -> tuple[jax.Array, jax.Array, ArrayTree]:
    """One row for acting: policy outputs [B, P], values [B] and the core's new state."""
    row = Inputs(timestep.observation, timestep.reward, timestep.first, state.previous_action)
    outputs, values, core = network.apply(params, jax.tree.map(lambda x: x[None], row), state.core)
    return outputs[0], values[0], core


def inputs(network: Network, trajectory: Trajectory) -> Inputs:
    """The network's inputs at all T+1 rows, previous actions aligned."""
    rows = trajectory.timesteps
    actions = ()
    if network.recurrent:
        before: ActorState = trajectory.actor_state
        actions = jax.tree.map(lambda a, x: jnp.concatenate([a[None], x]), before.previous_action, trajectory.actions)
    return Inputs(rows.observation, rows.reward, rows.first, actions)


def unroll(network: Network, params: ArrayTree, trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
    """All T+1 rows of a trajectory for learning: policy outputs [T+1, B, P] and values [T+1, B]."""
    return network.apply(params, inputs(network, trajectory), trajectory.actor_state.core)[:2]
