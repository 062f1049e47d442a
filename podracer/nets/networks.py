"""Networks of agents: torsos, a core with a memory, and heads, behind plain `init` and `apply`.

A `Network` is pure functions, so one written in Linen, NNX, Equinox, Haiku (examples/networks) or by hand plugs in
alike:

    network = nets.feed_forward(init, apply)     # apply(params, observation [N, ...]) -> (outputs [N, A], value [N])

Observations may have any leading dims; convolutions flatten them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer import distributions, spaces
from podracer.nets import action_masks
from podracer.nets.convolutions import CONVNETS, ConvNet, ResNet
from podracer.nets.cores import NO_CORE, CoreSettings
from podracer.nets.encoding import FEW, encode, images, seen_spec, visible
from podracer.nets.layers import MLP, Activation, Dense, Weights
from podracer.nets.network import Inputs, Network
from podracer.types import ArrayTree, EnvSpec

Torso = Literal["auto", "mlp", "shallow", "nature", "nature_conv", "resnet", "small", "minatar"]

ComputeDtype = Literal["float32", "bfloat16"]
"""The dtype of torsos. Parameters, recurrent cores, heads and losses are float32 in either case."""

VALUE_HEAD = "value"
"""The layer of parameters that makes values of features."""

EMBEDDING = 16
"""Units for the codes of a cell, as in XLand-MiniGrid (Nikulin et al. 2024)."""


def make(
    spec: EnvSpec,
    *,
    torso: Torso = "auto",
    hidden_sizes: Sequence[int] = (64, 64),
    activation: Activation = "relu",
    separate: bool = False,
    core: CoreSettings = NO_CORE,
    compute_dtype: ComputeDtype = "float32",
    layer_norm: bool = False,
    width: int = 1,
    depth: int = 2,
    num_values: int | None = None,
    distribution: distributions.Distribution | None = None,
    value_hidden_sizes: Sequence[int] | None = None,
    init: Literal["orthogonal", "lecun"] = "orthogonal",
    policy_observations: Sequence[str] = (),
    value_observations: Sequence[str] = (),
) -> Network:
    """Makes the standard network for an environment: torso, optional core, a policy head and a value head.

    Args:
      spec: of the environment.
      torso: "mlp"; "shallow" and "resnet" (IMPALA, figure 3: convolutions 16 8x8/4 and 32 4x4/2 with 256 units, and
        residual blocks of 16, 32, 32 channels with 256 units); "nature" (Mnih et al. 2015: 32 8x8/4, 64 4x4/2,
        64 3x3/1, 512 units), and "nature_conv" without those units; "small" for images from 3x3 to 35x35 (16 3x3/1 with
        a border of zeros, 32 3x3/1, 128 units); "minatar" for the same (16 3x3/1, 128 units: Young and Tian 2019).
        Pixels are divided by the largest value that the space allows. "auto" takes "shallow" for uint8 images of at
        least 36x36 and "mlp" for all else. In a `Dict`, each image has a torso, and an MLP has the other members.
      hidden_sizes: of the MLP.
      activation: of the MLP.
      separate: True gives policy and value a torso each.
      core: a memory after the torso, fed with the previous action (one-hot) and reward too.
      compute_dtype: "bfloat16" halves a torso's activations, and what its layers read and write, on accelerators; on
        CPU it is slower. Products of float32 are of lower precision there anyway, whose default (TF32 on GPU, bfloat16
        on TPU) the environment variable JAX_DEFAULT_MATMUL_PRECISION sets: "highest" for that of CPU.
      layer_norm: True puts `layers.LayerNorm` after each layer of the torso.
      width: of "resnet"; multiplies its channels (SEED RL, table 4: 1, 2 or 4).
      depth: of "resnet"; residual blocks of each of its three sections.
      num_values: K, values of a row, which are then [T, B, K]; None for one value, [T, B].
      distribution: of actions; that of the action space if None.
      value_hidden_sizes: of the value's MLP, where torsos are separate; None for `hidden_sizes`.
      init: "lecun" draws all weights from LeCun's uniform distribution, but those of a core, which are orthogonal.
      policy_observations: members of a `Dict` that the policy sees; () for all.
      value_observations: members that the value sees, where torsos are separate; () for all.

    Raises:
      ValueError: for a convolutional torso on observations that are not images, or smaller than it needs.
    """
    distribution = distribution or distributions.for_space(spec.action_space)
    scale: Weights = "lecun" if init == "lecun" else 2**0.5
    others = {"scale": scale, "layer_norm": layer_norm, "width": width, "depth": depth}
    body = functools.partial(_body, spec, torso, activation=activation, core=core, dtype=compute_dtype, **others)
    value_sizes = hidden_sizes if value_hidden_sizes is None else value_hidden_sizes
    module = ActorCritic(
        body=body(policy_observations, hidden_sizes),
        value_body=body(value_observations, value_sizes) if separate else None,
        num_outputs=distribution.num_outputs,
        free_scale=distribution.state_independent_scale,
        num_values=num_values,
    )
    return _network(spec, module, core)


def _body(
    spec: EnvSpec,
    torso: Torso,
    members: Sequence[str],
    sizes: Sequence[int],
    *,
    activation: Activation,
    core: CoreSettings,
    dtype: ComputeDtype,
    **others: Any,
) -> Body:
    """The layers of a network that sees some members of observations; () for all."""
    seen = seen_spec(spec, members)
    return Body(seen, choose_torso(seen, torso), tuple(sizes), activation, core, dtype, **others)


def make_q(
    spec: EnvSpec,
    *,
    torso: Torso = "auto",
    hidden_sizes: Sequence[int] = (64, 64),
    activation: Activation = "relu",
    core: CoreSettings = NO_CORE,
    head_size: int = 512,
    compute_dtype: ComputeDtype = "float32",
    dueling: bool = True,
    layer_norm: bool = False,
    width: int = 1,
    depth: int = 2,
    num_bins: int = 1,
    noise: float = 0.0,
    init: Literal["glorot", "he", "uniform"] = "glorot",
) -> Network:
    """Makes a network of action values, or of K numbers for each action: torso, optional core and head.

    Args:
      spec: of the environment; its actions are discrete.
      torso: as in `make`.
      hidden_sizes: of the MLP.
      activation: of the MLP.
      core: as in `make`.
      head_size: units of a hidden layer of each head, 0 for none.
      compute_dtype: as in `make`.
      dueling: True computes action values from a state value and advantages, by a head each (Wang et al. 2016); False
        has one head.
      layer_norm: as in `make`.
      width: as in `make`.
      depth: as in `make`.
      num_bins: K; outputs are [T, B, A K], the numbers of the first action first. If K > 1 the network's values are 0,
        because only the agent knows the values that such numbers encode.
      noise: sigma_0 of the heads' layers, for `perturb`; 0 for plain layers.
      init: of weights: Glorot's uniform ones; He's normal ones in the torso alone; or within 1 / sqrt(inputs) of 0, as
        Torch's were.

    Raises:
      ValueError: for actions that are not discrete, or a convolutional torso on observations that are not images, or
        smaller than it needs.
    """
    A = num_actions(spec)
    module = ActionValues(
        body=Body(
            *(spec, choose_torso(spec, torso), tuple(hidden_sizes), activation, core, compute_dtype),
            scale=None if init == "glorot" else init,
            layer_norm=layer_norm,
            width=width,
            depth=depth,
        ),
        head_size=head_size,
        num_actions=A,
        dueling=dueling,
        num_bins=num_bins,
        noise=noise,
    )
    return _network(spec, module, core)


def value_head(params: ArrayTree) -> ArrayTree:
    """The value head's `kernel` [F, K] and `bias` [K], of parameters of `make`'s network."""
    return params["params"][VALUE_HEAD]


def with_value_head(params: ArrayTree, head: ArrayTree) -> ArrayTree:
    """The parameters of `make`'s network with another value head."""
    return params | {"params": params["params"] | {VALUE_HEAD: head}}


def num_actions(spec: EnvSpec) -> int:
    """Returns A, the number of actions.

    Raises:
      ValueError: for actions that are not discrete.
    """
    if not isinstance(spec.action_space, spaces.Discrete):
        raise ValueError(f"{spec.name} takes actions in {spec.action_space}; action values need Discrete ones.")
    return spec.action_space.num_values


def _network(spec: EnvSpec, module: nn.Module, core: CoreSettings) -> Network:
    def init(key: jax.Array) -> ArrayTree:
        example = jax.tree.map(lambda x: x[None, None], spaces.zeros(spec.observation_space))
        action = jax.tree.map(lambda x: x[None, None], spaces.zeros(spec.action_space)) if core else ()
        inputs = Inputs(example, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), action)
        return module.init(key, inputs, core.start(1))

    return Network(init, module.apply, core.start)  # type: ignore[arg-type]


def choose_torso(spec: EnvSpec, torso: Torso) -> Torso:
    """Chooses the torso of a setting for an environment, frames stacked; see `make`.

    Raises:
      ValueError: for a convolutional torso on observations that it cannot take.
    """
    found = images(spec.observation_space)
    if torso == "auto":
        return "shallow" if found and all(min(image.shape[:2]) >= 36 for image in found.values()) else "mlp"
    if torso != "mlp" and not found:
        raise ValueError(
            f"torso={torso!r} needs uint8 images [H, W] or [H, W, C], but {spec.name} shows {spec.observation_space}; "
            "use torso='mlp'."
        )
    if torso in CONVNETS:
        for member, image in found.items():
            _check_size(f"{spec.name}[{member!r}]" if member else spec.name, torso, image.shape)
    return torso


def _check_size(name: str, torso: Torso, shape: tuple[int, ...]) -> None:
    """Checks that images of an environment are large enough for a torso of `CONVNETS`.

    Raises:
      ValueError: if they are not; it names another torso.
    """
    least, small = (CONVNETS[each].least_side for each in (torso, "small"))
    side = min(shape[:2])
    if side < least:
        other = "'small'" if side >= small else "'resnet', which takes any size, or 'mlp'"
        raise ValueError(
            f"torso={torso!r} needs images of {least}x{least} or more, and {name} shows {'x'.join(map(str, shape))}: "
            f"use torso={other}."
        )


@dataclasses.dataclass(frozen=True)
class Body:
    """The layers before the heads; see `make` and `make_q`. `scale` is that of `layers.Dense`."""

    spec: EnvSpec
    torso: Torso
    hidden_sizes: tuple[int, ...]
    activation: str
    core_settings: CoreSettings
    compute_dtype: ComputeDtype = "float32"
    scale: Weights = 2**0.5
    layer_norm: bool = False
    width: int = 1
    depth: int = 2

    def features(self, name: str, observation: ArrayTree) -> jax.Array:
        """Computes the torso, float32 [T, B, F], within a module's compact call.

        In a `Dict`, each image has convolutions of its own, and all other members go through one MLP.
        """
        space = self.spec.observation_space
        if self.torso == "mlp":
            return self._mlp(name, observation, space)
        members = {"": observation} if not isinstance(space, spaces.Dict) else observation
        found, shown = images(space), visible(space)
        parts = [
            self._convolutions(name if len(shown) == 1 else f"{name}_{member}", members[member], image)
            for member, image in found.items()
        ]
        if others := {member: item for member, item in shown.items() if member not in found}:
            # No image is called "_others", which networks would not see.
            rest = "_others" if "others" in found else "others"
            parts.append(self._mlp(f"{name}_{rest}", observation, spaces.Dict(others)))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def _mlp(self, name: str, observation: ArrayTree, space: spaces.Space) -> jax.Array:
        dtype = jnp.dtype(self.compute_dtype)
        mlp = MLP(self.hidden_sizes, self.activation, self.scale, dtype, self.layer_norm, name=name)
        return mlp(encode(observation, space, leading=2)).astype(jnp.float32)

    def _convolutions(self, name: str, observation: jax.Array, space: spaces.Box) -> jax.Array:
        dtype, largest = jnp.dtype(self.compute_dtype), int(np.max(space.high))
        image = observation[..., None] if observation.ndim == 4 else observation
        image, (T, B) = image.reshape(-1, *image.shape[2:]), image.shape[:2]
        if self.torso == "resnet":
            module = functools.partial(ResNet, self.width, self.depth)
        elif self.torso == "small" and 1 < largest < FEW:
            module = functools.partial(ConvNet, CONVNETS[self.torso], embedding=EMBEDDING)
            image = jax.nn.one_hot(image, largest + 1, dtype=dtype).reshape(*image.shape[:-1], -1)
        else:
            module = functools.partial(ConvNet, CONVNETS[self.torso])
        if image.dtype == np.uint8:
            image = image.astype(dtype) / max(largest, 1.0)
        features = module(name=name, scale=self.scale, dtype=dtype, norm=self.layer_norm)(image)
        return features.reshape(T, B, -1).astype(jnp.float32)

    def core(self, features: Sequence[jax.Array], inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        """Computes the core, float32 [T, B, D], and its state, within a module's compact call."""
        # The previous action and reward enter the core, not the torso (IMPALA, figure 3).
        not_first = (~inputs.first).astype(jnp.float32)[..., None]
        action = encode(inputs.previous_action, self.spec.action_space, leading=2) * not_first
        core_inputs = jnp.concatenate([features[0], action, inputs.reward[..., None], *features[1:]], -1)
        scale = None if self.scale is None else 1.0
        return self.core_settings.make(scale)(core_inputs, inputs.first, state)


class ActorCritic(nn.Module):
    """Torso, optional core, policy and value heads; see `make`."""

    body: Body
    value_body: Body | None
    num_outputs: int
    free_scale: bool
    num_values: int | None = None

    @nn.compact
    def __call__(self, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        features = self.body.features("torso", inputs.observation)
        value_features = features
        if self.value_body is not None:
            value_features = self.value_body.features("value_torso", inputs.observation)
        if self.body.core_settings:
            both = [features] if self.value_body is None else [features, value_features]
            features, state = self.body.core(both, inputs, state)
            value_features = features
        num_heads = self.num_outputs // 2 if self.free_scale else self.num_outputs
        lecun: Literal["lecun"] | None = "lecun" if self.body.scale == "lecun" else None
        outputs = Dense(num_heads, scale=lecun or 0.01, name="policy")(features)
        if self.free_scale:
            log_std = self.param("log_std", nn.initializers.zeros, (num_heads,))
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        values = Dense(self.num_values or 1, scale=lecun or 1.0, name=VALUE_HEAD)(value_features)
        return outputs, values if self.num_values else values[..., 0], state


class ActionValues(nn.Module):
    """Torso, optional core, and a head; see `make_q`.

    Dueling: Q = V + A - mean A, the mean over legal actions (Wang et al. 2016, equation 9).
    """

    body: Body
    head_size: int
    num_actions: int
    dueling: bool = True
    num_bins: int = 1
    noise: float = 0.0

    @nn.compact
    def __call__(self, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        features = self.body.features("torso", inputs.observation)
        if self.body.core_settings:
            features, state = self.body.core([features], inputs, state)
        K, scale = self.num_bins, "uniform" if self.body.scale == "uniform" else None

        def head(name: str, size: int) -> jax.Array:
            dense = lambda name, size: Dense(size, scale, noise=self.noise, name=name)  # noqa: E731
            x = nn.relu(dense(f"{name}_hidden", self.head_size)(features)) if self.head_size else features
            return dense(name, size)(x)

        legal = action_masks.legal(self.body.spec, inputs.observation)
        if not self.dueling:
            outputs = head("q", self.num_actions * K)
            values = jnp.max(action_masks.lower(outputs, legal), axis=-1) if K == 1 else jnp.zeros(outputs.shape[:-1])
            return outputs, values, state
        values, advantages = head("value", K), head("advantage", self.num_actions * K)
        if K == 1:
            return values + advantages - action_masks.mean(advantages, legal), values[..., 0], state
        advantages = advantages.reshape(*values.shape[:-1], self.num_actions, K)
        legal = None if legal is None else jnp.broadcast_to(legal[..., None], advantages.shape)
        outputs = values[..., None, :] + advantages - action_masks.mean(advantages, legal, axis=-2)
        return outputs.reshape(*values.shape[:-1], -1), jnp.zeros(values.shape[:-1]), state
