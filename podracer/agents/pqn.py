"""PQN: Q-learning without replay or target network (Gallici et al. 2024, https://arxiv.org/abs/2407.04811).

Layer normalisation keeps temporal-difference learning stable. Epsilon-greedy rollouts give the targets of Peng's
Q(lambda) (Peng and Williams 1994: traces are not cut at exploratory actions), computed once per rollout, to which
several epochs of minibatches move the values of the actions taken:

    G_t = r_{t+1} + gamma_{t+1} (lambda G_{t+1} + (1 - lambda) max_a Q(x_{t+1}, a))

Feed-forward networks shuffle single transitions, recurrent ones whole lanes, from the state at the rollout's start.

Defaults are those of small tasks; `PQNConfig.atari()` sets all the paper's, but the head's weights are Glorot's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer import configs, nets, returns
from podracer.agents import base
from podracer.distributions import epsilon_greedy, greedy, value_of
from podracer.learning import gradients, minibatches
from podracer.learning import optimizer as optimizers
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, LearnerState, Metrics, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class PQNConfig(nets.NetworkConfig, OptimizerConfig):
    """The agent's settings, beside those of `podracer.nets.NetworkConfig` and
    `podracer.learning.optimizer_config.OptimizerConfig`. Paper values are those for Atari.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 128).
      rollout_length: T, transitions of a lane in a batch (paper: 32).
      num_epochs: passes over each batch (paper: 2).
      num_minibatches: gradient steps per pass (paper: 32, of 128 rows each).
      discount: gamma (paper: 0.99).
      trace_lambda: of the targets (paper: 0.65).
      learning_rate: of RAdam (paper: 2.5e-4).
      learning_rate_schedule: (paper: "constant").
      optimizer_eps: RAdam's epsilon (paper: 1e-8).
      max_grad_norm: clip by global norm (paper: 10).
      epsilon_start: probability of a random action at first (paper: 1).
      epsilon_final: probability of a random action in the end (paper: 0.001).
      epsilon_decay: share of `total_steps` over which it falls linearly from one to the other (paper: 0.1).
      evaluation_epsilon: of all lanes in evaluation (paper: 0); greedy policies and exports have 0.
      layer_norm: whether layers of the torso are normalised; their weights are then He's normal ones (paper: True).
      clip_rewards: to [-1, 1] (paper: True).
      torso: see `podracer.nets.make_q` (paper: that of Nature).
    """

    envs_per_device: int = configs.field(128, low=1)
    rollout_length: int = configs.field(32, low=1)
    num_epochs: int = configs.field(4, low=1)
    num_minibatches: int = configs.field(32, low=1)
    discount: float = configs.field(0.995, low=0.0, high=1.0, tunable=True)
    trace_lambda: float = configs.field(0.95, low=0.0, high=1.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    optimizer: optimizers.Name = "radam"
    optimizer_eps: float = configs.field(1e-8, low=1e-30, tunable=True)
    max_grad_norm: float = configs.field(10.0, low=0.0, tunable=True)
    epsilon_start: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_final: float = configs.field(0.2, low=0.0, high=1.0, at_most=("epsilon_start", ": exploration falls"))
    epsilon_decay: float = configs.field(0.1, low=0.0, high=1.0)
    evaluation_epsilon: float = configs.field(0.0, low=0.0, high=1.0)
    layer_norm: bool = True
    clip_rewards: bool = False

    @classmethod
    def atari(cls, **overrides) -> PQNConfig:
        """The paper's Atari configuration."""
        paper = {
            "num_epochs": 2,
            "discount": 0.99,
            "trace_lambda": 0.65,
            "learning_rate": 2.5e-4,
            "learning_rate_schedule": "constant",
            "epsilon_final": 0.001,
            "clip_rewards": True,
            "frame_stack": 4,
            "torso": "nature",
        }
        return cls(**(paper | overrides))


class Samples(NamedTuple):
    """A minibatch of n units (lanes, or transitions with T = 1).

    Attributes:
      inputs: of the network, [T, n, ...].
      core: state of the core before row 0, [n, ...]; () without one.
      action: int32 [T, n]; taken.
      target: [T, n]; of its value.
      weight: [T, n]; 1 for a real transition, else 0. In a minibatch they sum to 1 over all shards.
    """

    inputs: nets.Inputs
    core: ArrayTree
    action: jax.Array
    target: jax.Array
    weight: jax.Array


def loss(
    q: jax.Array,
    actions: jax.Array,
    targets: jax.Array,
    weight: jax.Array,
    hyper: Mapping[str, jax.Array],
    config: PQNConfig,
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some transitions: the sums over all of them are those of the minibatch.

    Args:
      q: [n, A]; action values of the learner's parameters.
      actions: int32 [n]; taken.
      targets: [n]; of their values.
      weight: float32 [n]; sums to 1 over a minibatch of all shards; 0 where masked.
      hyper: tunable numbers.
      config: the static settings.
    """
    # Half the squared error to the targets, which are constants (algorithm 1).
    taken = value_of(q, actions)
    errors = targets - taken
    terms = {"loss/total": 0.5 * jnp.square(errors), "value/mean": taken, "value/td_error": jnp.abs(errors)}
    metrics = {name: jnp.sum(weight * x) for name, x in terms.items()}
    return metrics["loss/total"], metrics


@base.maker("pqn", PQNConfig, loss)
def make(
    spec: EnvSpec, config: PQNConfig, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The PQN agent for an environment with discrete actions; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space, torso or network that does not fit; while tracing, where `num_minibatches` does
        not divide what a shard holds.
    """
    init = "he" if config.layer_norm else "glorot"
    network = config.action_values("pqn", spec, network, head_size=0, dueling=False, init=init)
    functions = _PQN(spec, config, network, config.make_optimizer(optimizer), loss)
    return functions.bundle("pqn", best=functions.best)


@dataclasses.dataclass(frozen=True, eq=False)
class _PQN(base.Functions):
    config: PQNConfig

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> jax.Array:
        # Epsilon falls linearly over the first part of the run.
        config = self.config
        part = jnp.minimum(progress / max(config.epsilon_decay, 1e-9), 1.0)
        return config.epsilon_start + (config.epsilon_final - config.epsilon_start) * part

    def act(
        self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        q, _, state = nets.step(self.network, actor.params, state, timestep)
        epsilon = self.config.evaluation_epsilon if evaluation else actor.aux
        action = epsilon_greedy(q, epsilon, key, nets.action_masks.legal(self.spec, timestep.observation))
        return action, {}, state.after(action)

    def best(self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep) -> tuple[jax.Array, nets.ActorState]:
        q, _, state = nets.step(self.network, actor.params, state, timestep)
        action = greedy(q)
        return action, state.after(action)

    def learn(
        self, learner: LearnerState, trajectory: Trajectory, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        # Targets of the whole rollout by Q(lambda), before the first gradient step (algorithm 1).
        samples = self._samples(learner, trajectory)

        # Epochs of minibatches. Weights of a mean over real transitions, for all minibatches at once.
        config = self.config
        order = minibatches.minibatches(key, samples.weight.shape[1], config.num_epochs, config.num_minibatches)
        weight = jnp.moveaxis(samples.weight[:, order], 1, 0)
        weights = weight / jnp.maximum(collectives.global_sum(jnp.sum(weight, axis=(1, 2), keepdims=True)), 1.0)

        def minibatch(units: jax.Array, weight: jax.Array) -> Samples:
            return minibatches.take(samples._replace(weight=()), units)._replace(weight=weight)

        def loss(params: ArrayTree, batch: Samples) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
            q = self.network.apply(params, batch.inputs, batch.core)[0]
            flat = [x.reshape(-1, *x.shape[2:]) for x in (q, batch.action, batch.target, batch.weight)]
            total, metrics = self.loss(*flat, learner.hyper, config)
            return total, (metrics, ())

        return minibatches.run(
            loss,
            learner,
            minibatch,
            order,
            weights,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate(learner, progress),
            observation=trajectory.timesteps.observation,
            num_rows=samples.weight.shape[0],
        )

    def _samples(self, learner: LearnerState, trajectory: Trajectory) -> Samples:
        """Units with their targets."""
        inputs, core = nets.inputs(self.network, trajectory), trajectory.actor_state.core
        # max_a Q of all rows.
        if self.network.recurrent:
            q = self.network.apply(learner.params, inputs, core)[0]
        else:
            q = gradients.forward(lambda x: self.network.apply(learner.params, x, ())[0], inputs)
        values = jnp.max(q, axis=-1)
        step = returns.transitions(trajectory)
        reward = jnp.clip(step.reward, -1.0, 1.0) if self.config.clip_rewards else step.reward
        step = step._replace(reward=reward, discount=learner.hyper["discount"] * step.discount)
        # G_t of Peng's Q(lambda) is max_a Q plus the sum of lambda-weighted errors, as with GAE.
        targets = returns.gae(values, step, learner.hyper["trace_lambda"]) + values[:-1]
        samples = Samples(jax.tree.map(lambda x: x[:-1], inputs), core, trajectory.actions, targets, step.mask)
        # A unit is a lane where the network is recurrent, else a transition.
        if self.network.recurrent:
            return samples
        return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), samples)
