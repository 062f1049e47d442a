"""World models that say sums of rewards, and what the next observation will look like (Ye et al. 2021, EfficientZero).

    observation --h--> state --g(action)--> state ...      of each: f -> policy and value
                                |                                   P -> projection --q--> forecast
                                LSTM over states -> prefix: the sum of rewards since its memory was empty

The projection of the state that an observation shows is what a forecast should be. The model predicts a
sum and not each reward, so it need not know at which step a reward comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets
from podracer.nets.layers import MLP, Dense, NormName, normalization, standardize
from podracer.nets.recurrent import LSTMCell
from podracer.nets.residual import Block, Encoder, Flatten, Head, conv3x3
from podracer.search import search, world_models
from podracer.types import ArrayTree, EnvSpec


class Memory(NamedTuple):
    """The LSTM's state, float32 [N, size] each."""

    h: jax.Array
    c: jax.Array


class PrefixModel(NamedTuple):
    """A model, as a Linen module with these methods; states are float32 arrays [N, ...].

    *   `represent(observation [N, ...]) -> state`; frames are stacked
    *   `advance(state, action int32 [N]) -> state`
    *   `prefix(state, Memory [N]) -> (prefix [N, K], Memory [N])`; K numbers of bins
    *   `predict(state) -> (policy [N, A], value [N, K])`
    *   `project(state) -> [N, F]` and `forecast(projection [N, F]) -> [N, F]`
    *   `termination(state) -> logit [N]` that the episode has terminated, if the model predicts it

    Attributes:
      module: with these methods, and `__call__(observation, action)`, which calls all of them.
      lstm_size: of the memory.
      terminations: True if the model predicts terminations.
    """

    module: Any
    lstm_size: int
    terminations: bool = False

    def empty(self, num_lanes: int) -> Memory:
        """Returns the LSTM's state before its first step."""
        return Memory(*(jnp.zeros((num_lanes, self.lstm_size)) for _ in range(2)))

    def init(self, key: jax.Array, observation: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        """Initialises the parameters, and the running statistics of layers that have some."""
        variables = self.module.init(key, observation, jnp.zeros(1, jnp.int32), self.empty(1))
        return {"params": variables["params"]}, variables.get("statistics", {})

    def call(self, name: str, params: ArrayTree, statistics: ArrayTree, *arguments: Any) -> Any:
        """Calls a method as in acting: the result of a row depends on that row alone."""
        return self.module.apply(params | {"statistics": statistics}, *arguments, method=name)

    def learning(
        self, function: Callable[..., Any], params: ArrayTree, statistics: ArrayTree, *arguments: Any
    ) -> tuple[Any, ArrayTree]:
        """Calls `function(module, *arguments)` as in learning, where layers see all rows; returns statistics too."""
        apply = nn.apply(function, self.module, mutable=["statistics"])
        results, changes = apply(params | {"statistics": statistics}, *arguments)
        return results, changes.get("statistics", statistics)


@dataclasses.dataclass(frozen=True)
class Sizes(world_models.Sizes):
    """Sizes of the standard model, beside `podracer.search.world_models.Sizes`, whose rewards are prefixes here. Paper
    values are those of Ye et al. 2021 (64 channels, heads of 32 units, 601 bins).

    Attributes:
      norm: of convolutions, over a "layer" or the "batch" (paper), whose running averages are published too. Images of
        96x96 make the network of Ye et al., appendix A.
      lstm_size: of the memory of prefixes (paper: 512).
      projection_size: F, numbers of a projection (paper: 1,024).
      forecast_size: units of the hidden layer of q (paper: 512).
    """

    norm: NormName = "layer"
    lstm_size: int = configs.field(64, low=1)
    projection_size: int = configs.field(128, low=1)
    forecast_size: int = configs.field(64, low=1)


def make(spec: EnvSpec, sizes: Sizes, *, terminations: bool = False) -> PrefixModel:
    """The standard model for an environment.

    Args:
      spec: of the environment, frames stacked; its actions are discrete.
      sizes: of the model.
      terminations: True to predict them, by a head of its own.

    Raises:
      ValueError: for actions that are not discrete, or convolutions on what is no image.
    """
    common: dict[str, Any] = {
        "num_actions": nets.num_actions(spec),
        "num_bins": sizes.num_bins,
        "head_size": sizes.head_size,
        "lstm_size": sizes.lstm_size,
        "projection_size": sizes.projection_size,
        "forecast_size": sizes.forecast_size,
        "terminations": terminations,
    }
    torso = world_models.chosen_torso(spec, sizes.torso)
    if torso == "convolutions":
        images: dict[str, Any] = {
            "channels": sizes.channels,
            "largest": world_models.largest_value(spec.observation_space),
        }
        return PrefixModel(_Images(**common, norm=sizes.norm, **images), sizes.lstm_size, terminations)
    shape: dict[str, Any] = {"hidden_sizes": sizes.hidden_sizes, "state_size": sizes.state_size}
    shape |= {"h": world_models.Features(spec.observation_space, torso, sizes.hidden_sizes)}
    return PrefixModel(_Vectors(**common, norm="layer", **shape), sizes.lstm_size, terminations)


def last_kernels(params: ArrayTree) -> list[jax.Array]:
    """The last kernels of a model's heads, which begin at 0.

    Raises:
      ValueError: for a model without these.
    """
    heads = ("policy", "prefix", "value")
    try:
        return [params["params"][head]["last"]["kernel"] for head in heads]
    except (KeyError, TypeError):
        raise ValueError(
            "optimizer='clipped_lars' waits until the last layers of heads have grown, and needs parameters "
            f"[head]['last']['kernel'] of the model for the heads {', '.join(heads)}: name them so, or use 'sgd'."
        ) from None


class Node(NamedTuple):
    """A search's record of a state, [N].

    Attributes:
      state: of the model.
      memory: of the LSTM.
      prefix: float32; the sum of rewards that it stands for.
      depth: int32; steps from the root.
    """

    state: jax.Array
    memory: Memory
    prefix: jax.Array
    depth: jax.Array


def searched(
    model: PrefixModel, expectation: Callable[[jax.Array], jax.Array], spec: EnvSpec, horizon: int
) -> search.Model:
    """A model as what is searched; its variables are `(params, statistics, discount)`.

    A step's reward is by how much the prefix grew, so the rewards of a path sum to prefixes.

    Args:
      model: of stacked observations.
      expectation: `([..., K]) -> [...]`; the number that bins stand for.
      spec: of the environment. What is legal is known where observations have an `action_mask`, and at the root alone.
      horizon: H; steps after which memory and prefix begin anew.
    """

    def root(variables: Any, observation: ArrayTree) -> search.Root:
        params, statistics, _ = variables
        state = model.call("represent", params, statistics, observation)
        logits, value = model.call("predict", params, statistics, state)
        N = logits.shape[0]
        node = Node(state, model.empty(N), jnp.zeros(N), jnp.zeros(N, jnp.int32))
        return search.Root(logits, expectation(value), node, nets.action_masks.legal(spec, observation))

    def step(variables: Any, node: Node, action: jax.Array) -> search.Step:
        params, statistics, discount = variables
        state = model.call("advance", params, statistics, node.state, action)
        prefix, memory = model.call("prefix", params, statistics, state, node.memory)
        logits, value = model.call("predict", params, statistics, state)
        prefix, depth = expectation(prefix), node.depth + 1
        # Every H steps the LSTM and the prefix restart, as in learning (Ye et al. 2021).
        restarts = depth % horizon == 0
        next_memory = jax.tree.map(lambda x: jnp.where(restarts[:, None], 0.0, x), memory)
        next_node = Node(state, next_memory, jnp.where(restarts, 0.0, prefix), depth)
        # The reward of a step is the growth of the prefix.
        reward = prefix - node.prefix
        discount = jnp.broadcast_to(discount, action.shape)
        if model.terminations:
            # Nothing counts after a termination.
            discount = discount * jax.nn.sigmoid(-model.call("termination", params, statistics, state))
        return search.Step(reward, discount, logits, expectation(value), next_node)

    return search.Model(root, step)


class Predictions(NamedTuple):
    """Predictions of the states 0 to K of a model; the first state has no prefix and no forecast.

    Attributes:
      policy: [K + 1, B, A]; logits.
      value: [K + 1, B, bins].
      prefix: [K, B, bins]; of states 1 to K.
      forecast: [K, B, F]; of states 1 to K.
      termination: logits [K, B] of states 1 to K; () for a model that does not predict it.
    """

    policy: jax.Array
    value: jax.Array
    prefix: jax.Array
    forecast: jax.Array
    termination: Any = ()


def unroll(
    model: PrefixModel,
    params: ArrayTree,
    statistics: ArrayTree,
    first: ArrayTree,
    later: ArrayTree,
    actions: jax.Array,
    horizon: int,
) -> tuple[Predictions, jax.Array, ArrayTree]:
    """Unrolls a model for learning: predictions of states 0 to K, and projections of the observations.

    Args:
      model: the model.
      params: its parameters.
      statistics: running ones of its layers.
      first: observations [1, B, ...] of row 0.
      later: of rows 1 to K, [K, B, ...].
      actions: int32 [K, B].
      horizon: H.

    Returns:
      Predictions; projections [K, B, F] of rows 1 to K, without gradient; the statistics, moved in this order.
    """
    K, B = actions.shape

    def of_each(head: Callable[[jax.Array], ArrayTree], states: list[jax.Array]) -> ArrayTree:
        # Statistics are of one state's samples, and move from state to state. Without any, all states go together.
        if jax.tree.leaves(statistics):
            return jax.tree.map(lambda *x: jnp.stack(x), *map(head, states))
        outputs = head(jnp.concatenate(states))
        return jax.tree.map(lambda x: x.reshape(len(states), B, *x.shape[1:]), outputs)

    def run(module: Any) -> tuple[Predictions, jax.Array]:
        states, prefixes, memory = [module.represent(jax.tree.map(lambda x: x[0], first))], [], model.empty(B)
        for k in range(K):
            if k % horizon == 0:
                memory = model.empty(B)
            # Half of the gradient of all that depends on it, heads too, as in the authors' code.
            states.append(world_models.half_gradient(module.advance(states[-1], actions[k])))
            prefix, memory = module.prefix(states[-1], memory)
            prefixes.append(prefix)
        policy, value = of_each(module.predict, states)
        forecast = of_each(lambda state: module.forecast(module.project(state)), states[1:])
        termination = of_each(module.termination, states[1:]) if model.terminations else ()
        flat = jax.tree.map(lambda x: x.reshape(K * B, *x.shape[2:]), later)
        projections = lax.stop_gradient(module.project(module.represent(flat)))
        predictions = Predictions(policy, value, jnp.stack(prefixes), forecast, termination)
        return predictions, projections.reshape(K, B, -1)

    (predictions, projections), statistics = model.learning(run, params, statistics)
    return predictions, projections, statistics


def cosine_loss(forecast: jax.Array, projection: jax.Array) -> jax.Array:
    """Computes 1 - cos, [...], of forecasts and projections [..., F]; projections get no gradient (SimSiam: Chen and He
    2021)."""
    return 1.0 - jnp.sum(_unit(forecast) * lax.stop_gradient(_unit(projection)), axis=-1)


def projection_std(projections: jax.Array) -> jax.Array:
    """The standard deviation of unit projections [..., F] over all but F, on average: 0 where all are alike."""
    return jnp.mean(jnp.std(_unit(projections).reshape(-1, projections.shape[-1]), axis=0))


def _unit(x: jax.Array) -> jax.Array:
    # The square of a norm is floored, for the gradient of a norm of 0 is none.
    return x * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-10))


class _Model(nn.Module):
    """The layers after a state, which models of vectors and of images share."""

    num_actions: int
    num_bins: int
    head_size: int
    lstm_size: int
    projection_size: int
    forecast_size: int
    norm: NormName
    terminations: bool

    def setup(self) -> None:
        norm = lambda: normalization(self.norm)  # noqa: E731
        sizes = {"policy": self.num_actions, "value": self.num_bins, "prefix": self.num_bins}
        sizes |= {"termination": 1} if self.terminations else {}
        self.heads = {name: Head(size, self.head_size, self.norm, name=name) for name, size in sizes.items()}
        self.lstm, self.lstm_norm = LSTMCell(self.lstm_size), norm()
        # P has three layers and q two, as SimSiam's projector and predictor (Chen and He 2021).
        self.p = [Dense(self.projection_size) for _ in range(3)]
        self.p_norms = [norm() for _ in range(3)]
        self.q_hidden, self.q_norm, self.q = Dense(self.forecast_size), norm(), Dense(self.projection_size)
        self.torso()

    def torso(self) -> None:
        """Makes the layers before the heads."""

    def __call__(self, observation: ArrayTree, action: jax.Array, memory: Memory) -> Any:
        state = self.represent(observation)
        ended = self.termination(state) if self.terminations else ()
        prefix = self.prefix(self.advance(state, action), memory)
        return prefix, self.predict(state), self.forecast(self.project(state)), ended

    def prefix(self, state: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        memory = Memory(*self.lstm(self.features("prefix", state), (memory.h, memory.c)))
        return self.heads["prefix"](nn.relu(self.lstm_norm(memory.h))), memory

    def predict(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.f(state)
        policy, value = (self.heads[name](self.features(name, x)) for name in ("policy", "value"))
        return policy, value

    def termination(self, state: jax.Array) -> jax.Array:
        logit = self.heads["termination"](self.features("termination", state))[..., 0]
        return world_models.INITIAL_TERMINATION_LOGIT + logit

    def project(self, state: jax.Array) -> jax.Array:
        x = state.reshape(state.shape[0], -1)
        for i, (dense, norm) in enumerate(zip(self.p, self.p_norms)):
            x = norm(dense(x))
            # The last layer has no activation.
            x = nn.relu(x) if i < 2 else x
        return x

    def forecast(self, projection: jax.Array) -> jax.Array:
        return self.q(nn.relu(self.q_norm(self.q_hidden(projection))))


class _Vectors(_Model):
    """Dense layers; see `make`."""

    h: world_models.Features
    hidden_sizes: tuple[int, ...]
    state_size: int

    def torso(self) -> None:
        self.gates = world_models.ActionGates(self.num_actions)
        self.g = MLP(self.hidden_sizes, "relu", name="g")
        self.h_state, self.g_state = Dense(self.state_size, 1.0), Dense(self.state_size, 1.0)

    def represent(self, observation: ArrayTree) -> jax.Array:
        return standardize(self.h_state(self.h(observation)))

    def advance(self, state: jax.Array, action: jax.Array) -> jax.Array:
        # g predicts the change of the state.
        return standardize(state + self.g_state(self.g(self.gates(state, action))))

    def f(self, state: jax.Array) -> jax.Array:
        return state

    def features(self, name: str, x: jax.Array) -> jax.Array:
        return x


class _Images(_Model):
    """Residual convolutions (Ye et al. 2021, appendix A)."""

    channels: int
    largest: float

    def torso(self) -> None:
        C = self.channels
        self.h = Encoder(C, self.norm, self.largest)
        self.g, self.g_norm, self.g_block = conv3x3(C), normalization(self.norm), Block(C, self.norm)
        self.f = Block(C, self.norm)
        self.planes = {name: Flatten(self.norm, name=f"{name}_planes") for name in self.heads}

    def represent(self, observation: jax.Array) -> jax.Array:
        return self.h(world_models.with_channels(observation, 1))

    def advance(self, state: jax.Array, action: jax.Array) -> jax.Array:
        # The action as a constant plane (Schrittwieser et al. 2020, appendix E).
        plane = (action.astype(jnp.float32) / self.num_actions).reshape(-1, 1, 1, 1)
        x = jnp.concatenate([state, jnp.broadcast_to(plane, (*state.shape[:-1], 1))], axis=-1)
        return self.g_block(nn.relu(self.g_norm(self.g(x)) + state))

    def features(self, name: str, x: jax.Array) -> jax.Array:
        return self.planes[name](x)
