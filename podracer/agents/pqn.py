"""PQN: Q-learning without replay or target network (Gallici et al. 2024, https://arxiv.org/abs/2407.04811).

Layer normalisation keeps temporal-difference learning stable. Epsilon-greedy rollouts give the targets of Peng's
Q(lambda) (Peng and Williams 1994: traces are not cut at exploratory actions), computed once per rollout, to which
several epochs of minibatches move the values of the actions taken:

    G_t = r_{t+1} + gamma_{t+1} (lambda G_{t+1} + (1 - lambda) max_a Q(x_{t+1}, a))

Defaults are those of small tasks; `PQNConfig.atari()` sets all the paper's, but the head's weights are Glorot's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, returns, trajectories
from podracer.distributions import epsilon_greedy, greedy, value_of
from podracer.learning import gradients, minibatches, optimizer
from podracer.topology import collectives
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    EnvSpec,
    LearnerState,
    Metrics,
    TimeStep,
    Trajectory,
    check_one_player,
)


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """The agent's settings. Paper values are those for Atari.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 128).
      rollout_length: T, transitions of a lane in a batch (paper: 32).
      num_epochs: passes over each batch (paper: 2).
      num_minibatches: gradient steps per pass (paper: 32, of 128 rows each).
      discount: gamma (paper: 0.99).
      lambda_: of the targets (paper: 0.65).
      learning_rate: of RAdam (paper: 2.5e-4).
      learning_rate_decay: whether it falls linearly to 0 over `total_steps` (paper: False).
      radam_eps: RAdam's epsilon (paper: 1e-8).
      max_grad_norm: clip by global norm (paper: 10).
      epsilon_start: probability of a random action at first (paper: 1).
      epsilon_final: probability of a random action in the end (paper: 0.001).
      epsilon_decay: share of `total_steps` over which it falls linearly from one to the other (paper: 0.1).
      evaluation_epsilon: of all lanes in evaluation (paper: 0); greedy policies and exports have 0.
      layer_norm: whether layers of the torso are normalised (see `podracer.nets.make_q`).
      clip_rewards: to [-1, 1] (paper: True).
      frame_stack: how many of the newest observations the network sees (paper: 4).
      torso: see `podracer.nets.make_q` (paper: that of Nature).
      hidden_sizes: of the MLP.
      activation: of the MLP.
      compute_dtype: of the torso, "float32" or "bfloat16" (see `podracer.nets.make`).
    """

    envs_per_device: int = configs.field(128, low=1)
    rollout_length: int = configs.field(32, low=1)
    num_epochs: int = configs.field(4, low=1)
    num_minibatches: int = configs.field(32, low=1)
    discount: float = configs.field(0.995, low=0.0, high=1.0, tunable=True)
    lambda_: float = configs.field(0.95, low=0.0, high=1.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    learning_rate_decay: bool = True
    radam_eps: float = configs.field(1e-8, low=0.0)
    max_grad_norm: float = configs.field(10.0, low=0.0, tunable=True)
    epsilon_start: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_final: float = configs.field(0.2, low=0.0, high=1.0)
    epsilon_decay: float = configs.field(0.1, low=0.0, high=1.0)
    evaluation_epsilon: float = configs.field(0.0, low=0.0, high=1.0)
    layer_norm: bool = True
    clip_rewards: bool = False
    frame_stack: int = configs.field(1, low=1)
    torso: nets.Torso = "auto"
    hidden_sizes: tuple[int, ...] = configs.field((64, 64), low=1)
    activation: Literal["relu", "tanh"] = "relu"
    compute_dtype: nets.ComputeDtype = "float32"

    def __post_init__(self):
        configs.check(self)
        if self.epsilon_final > self.epsilon_start:
            raise ValueError(
                f"epsilon_final={self.epsilon_final} must be at most epsilon_start={self.epsilon_start}: exploration "
                f"falls; use {self.epsilon_start}."
            )

    @classmethod
    def atari(cls, **overrides) -> PQNConfig:
        """The paper's Atari configuration."""
        paper = {
            "num_epochs": 2,
            "discount": 0.99,
            "lambda_": 0.65,
            "learning_rate": 2.5e-4,
            "learning_rate_decay": False,
            "epsilon_final": 0.001,
            "clip_rewards": True,
            "frame_stack": 4,
            "torso": "nature",
        }
        return cls(**(paper | overrides))


Loss = Callable[..., tuple[jax.Array, Metrics]]


class Samples(NamedTuple):
    """Transitions [n]: what the network saw, the action taken, its target, and whether it is a real transition."""

    inputs: nets.Inputs
    action: jax.Array
    target: jax.Array
    mask: jax.Array


def loss(
    q: jax.Array,
    actions: jax.Array,
    targets: jax.Array,
    weight: jax.Array,
    hyper: Mapping[str, jax.Array],
    config: PQNConfig,
) -> tuple[jax.Array, Metrics]:
    """The part of the loss, and of metrics, that some transitions have: sums over them make the whole.

    Args:
      q: [n, A]; action values of the learner's parameters.
      actions: int32 [n]; those taken.
      targets: [n]; what their values should be.
      weight: float32 [n]; sums to 1 over a minibatch of all shards; 0 where masked.
      hyper: tunable numbers.
      config: the static settings.
    """
    taken = value_of(q, actions)
    errors = targets - taken
    terms = {"loss/total": 0.5 * jnp.square(errors), "value/mean": taken, "value/td_error": jnp.abs(errors)}
    metrics = {name: jnp.sum(weight * x) for name, x in terms.items()}
    return metrics["loss/total"], metrics


def make(
    spec: EnvSpec, config: PQNConfig | None = None, network: nets.Network | None = None, loss: Loss = loss
) -> Agent:
    """The PQN agent for an environment with discrete actions.

    Args:
      spec: the environment's spec.
      config: settings; defaults if None.
      network: your own, feed-forward, whose outputs are action values (`podracer.nets.Network`); the config's if None.
      loss: your own loss, called as `loss` is and returning what it returns, with metrics of any names.

    Raises:
      ValueError: for an action space, torso or network that does not fit; while tracing, where `num_minibatches` does
        not divide what a shard holds.
    """
    config = config or PQNConfig()
    check_one_player(spec, "pqn")
    seen = nets.stacked_spec(spec, config.frame_stack)
    if network is not None:
        nets.check(network, seen, "pqn", action_values=True)
        if network.recurrent:
            raise ValueError(
                "network= is recurrent, but pqn shuffles single rows: give a feed-forward one, or use r2d2."
            )
    network = network or nets.make_q(
        seen,
        torso=config.torso,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        head_size=0,
        compute_dtype=config.compute_dtype,
        dueling=False,
        norm=config.layer_norm,
    )
    transformation = optimizer.make("radam", eps=config.radam_eps)

    def init(key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        params = network.init(key)
        return LearnerState(params, optimizer.init(transformation, params), dict(hyper), jnp.int32(0))

    def actor_params(learner: LearnerState, progress: jax.Array) -> ActorParams:
        fallen = jnp.minimum(progress / max(config.epsilon_decay, 1e-9), 1.0)
        epsilon = config.epsilon_start + (config.epsilon_final - config.epsilon_start) * fallen
        return ActorParams(learner.params, learner.num_updates, epsilon)

    def act(
        actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        q, _, memory = nets.step(network, actor.params, state, timestep)
        return epsilon_greedy(q, config.evaluation_epsilon if evaluation else actor.aux, key), {}, memory

    def act_best(actor: ActorParams, state: nets.ActorState, timestep: TimeStep) -> tuple[jax.Array, nets.ActorState]:
        q, _, memory = nets.step(network, actor.params, state, timestep)
        return greedy(q), memory

    def prepare(learner: LearnerState, trajectory: Trajectory) -> Samples:
        """All transitions of a rollout with their targets, computed once, of all rows in one pass."""
        inputs = nets.inputs(network, trajectory)
        values = jnp.max(network.apply(learner.params, inputs, ())[0], axis=-1)
        step = returns.transitions(trajectory)
        reward = jnp.clip(step.reward, -1.0, 1.0) if config.clip_rewards else step.reward
        step = step._replace(reward=reward, discount=learner.hyper["discount"] * step.discount)
        targets = returns.gae(values, step, learner.hyper["lambda_"]) + values[:-1]
        samples = Samples(jax.tree.map(lambda x: x[:-1], inputs), trajectory.actions, targets, step.mask)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

    def learn(
        learner: LearnerState, trajectory: Trajectory, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        samples = prepare(learner, trajectory)
        learning_rate = learner.hyper["learning_rate"] * (1.0 - progress if config.learning_rate_decay else 1.0)

        def loss_fn(params: ArrayTree, batch: Samples) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
            q = network.apply(params, jax.tree.map(lambda x: x[None], batch.inputs), ())[0][0]
            total, metrics = loss(q, batch.action, batch.target, batch.mask, learner.hyper, config)
            return total, (metrics, ())

        def minibatch(carry: tuple[optimizer.Parts, ArrayTree], now: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            params, opt_state = carry
            rows, weight = now
            batch = jax.tree.map(lambda x: x[rows], samples._replace(mask=()))._replace(mask=weight)
            groups = len(rows) // gradients.at_a_time(trajectory.timesteps.observation, 1, len(rows))
            split = jax.tree.map(lambda x: trajectories.split(x, groups, 0), batch)
            grads, metrics, _ = gradients.accumulate(loss_fn, restore(params), split)
            params, opt_state, norm = optimizer.step_joined(
                transformation,
                collectives.global_sum(optimizer.joined(grads)[0]),
                opt_state,
                params,
                learning_rate=learning_rate,
                max_grad_norm=learner.hyper["max_grad_norm"],
            )
            return (params, opt_state), (jnp.stack(list(metrics.values())), norm)

        order = minibatches.minibatches(key, samples.mask.shape[0], config.num_epochs, config.num_minibatches)
        # Of all minibatches at once: within the scan, the gradient is all that devices have to agree on.
        mask = samples.mask[order]
        weight = mask / jnp.maximum(collectives.global_sum(jnp.sum(mask, axis=1, keepdims=True)), 1.0)
        names = jax.eval_shape(loss_fn, learner.params, samples)[1][0]
        params, restore = optimizer.joined(learner.params)
        (params, opt_state), (sums, norms) = lax.scan(minibatch, (params, learner.opt_state), (order, weight))
        metrics = dict(zip(names, collectives.global_sum(jnp.mean(sums, axis=0))))
        metrics |= {"grad/norm": jnp.mean(norms), "grad/learning_rate": learning_rate}
        return LearnerState(restore(params), opt_state, learner.hyper, learner.num_updates + 1), metrics

    start = lambda lanes, num_lanes: nets.start(network, spec, lanes.shape[0], config.frame_stack)  # noqa: E731
    return Agent("pqn", config, init, actor_params, start, act, learn, configs.tunables(config), best=act_best)
