"""Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Each batch is used for several epochs of minibatches with the clipped surrogate objective (equation 7), a value loss
and an entropy bonus (equation 9), with GAE advantages (Schulman et al. 2016) computed once per batch.

Choices beyond the paper, all fields of the config (Engstrom et al. 2020; Andrychowicz et al. 2021): advantages
normalised per minibatch over all devices, clipping of the gradient's norm, rewards normalised by the running scale of
the return, optional clipping of the value loss, optional running normalisation of observations, optional squashing of
continuous actions by tanh, an optional learning rate that follows the divergence from the acting policy.

Feed-forward networks shuffle single transitions; recurrent ones shuffle whole lanes, unrolled from the state stored at
the start of the rollout, or chunks of them. A rollout of T transitions has T + 1 time steps: row t has what was
observed before action t, and the reward of action t - 1. From the last row no action is learnt. Each shard shuffles its
own data alone. A run has the same shards on any number of devices, and so the same results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, distributions, nets, returns
from podracer.agents import base
from podracer.learning import gradients, minibatches
from podracer.learning.normalizers import NormalizerConfig, Normalizers
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, LearnerState, Metrics, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class PPOConfig(nets.PolicyConfig, NormalizerConfig, OptimizerConfig):
    """The agent's settings, beside those of `podracer.nets.PolicyConfig`, `podracer.nets.NetworkConfig`,
    `podracer.learning.normalizers.NormalizerConfig` and `podracer.learning.optimizer_config.OptimizerConfig`. Paper
    values are those of table 5 (Atari) where it has them.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 8 actors).
      rollout_length: T, transitions of a lane in a batch (paper: 128).
      chunk_length: c, rows of a unit of minibatches where there is a core; None for T, whole lanes. It divides T. Each
        chunk begins with the core's state that the parameters before the first gradient step had there, and gradients
        end with it.
      num_epochs: passes over each batch (paper: 3; MuJoCo 10).
      num_minibatches: gradient steps per pass (paper: batch 1024 in minibatches of 256, so 4).
      discount: gamma (paper: 0.99).
      gae_lambda: lambda of the advantages (paper: 0.95).
      clip_epsilon: range of the probability ratio (paper: 0.1 times a decay, Atari; 0.2, MuJoCo).
      clip_epsilon_decay: whether that range falls to 0 over `total_steps` (paper: True, Atari).
      value_clip_epsilon: range of the value's change per batch, or None to leave it free.
      value_cost: weight of half the squared error of values (paper: 1 for the whole error, so 2.0 here).
      entropy_cost: weight of the entropy bonus (paper: 0.01).
      target_kl: the divergence between acting and new policy that the learning rate follows: after each minibatch it
        falls where the divergence is more than twice the target, and rises where it is less than half (brax, rsl_rl:
        0.01). None leaves the rate to its schedule (paper).
      learning_rate: of Adam (paper: 2.5e-4); the first one with `target_kl`.
      learning_rate_schedule: of the rate over the run (paper: "linear").
      optimizer_eps: Adam's epsilon.
      max_grad_norm: clip by global norm; None, or inf, leaves the gradient as it is.
      normalize_advantages: to zero mean and unit variance per minibatch.
      evaluation_policy: "mode", the most likely actions, or "sample", as in training. Greedy policies and exports take
        the mode.
    """

    envs_per_device: int = configs.field(64, low=1)
    rollout_length: int = configs.field(64, low=1)
    chunk_length: int | None = configs.field(None, low=1)
    num_epochs: int = configs.field(4, low=1)
    num_minibatches: int = configs.field(4, low=1)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    gae_lambda: float = configs.field(0.95, low=0.0, high=1.0, tunable=True)
    clip_epsilon: float = configs.field(0.2, low=0.0, tunable=True)
    clip_epsilon_decay: bool = False
    value_clip_epsilon: float | None = configs.field(None, low=0.0)
    value_cost: float = configs.field(0.5, low=0.0, tunable=True)
    entropy_cost: float = configs.field(0.01, low=0.0, tunable=True)
    target_kl: float | None = configs.field(None, low=1e-8)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    optimizer_eps: float = configs.field(1e-5, low=1e-30, tunable=True)
    max_grad_norm: float | None = configs.field(0.5, low=0.0, tunable=True)
    normalize_advantages: bool = True
    activation: nets.Activation = "tanh"
    evaluation_policy: base.EvaluationPolicy = "mode"

    def __post_init__(self):
        self.clip_no_gradient()
        super().__post_init__()
        self.check_normalization()
        if self.target_kl is not None:
            minibatches.check_target_kl(self)
        if self.chunk_length and self.rollout_length % self.chunk_length:
            raise ValueError(f"chunk_length={self.chunk_length} must divide rollout_length={self.rollout_length}.")

    @classmethod
    def atari(cls, **overrides) -> PPOConfig:
        """The paper's Atari configuration (table 5), with the changes that later implementations share.

        Departures from the paper: the network of Mnih et al. 2015 ("nature") and not that of 2016 ("shallow"), a
        constant `clip_epsilon` without `clip_epsilon_decay=True`, clipped gradients, normalised advantages, and 8 lanes
        a device. With clipped gradients most code has a `value_cost` of 0.5, a quarter of this; they were not compared
        here.
        """
        paper = {
            "envs_per_device": 8,
            "rollout_length": 128,
            "num_epochs": 3,
            "clip_epsilon": 0.1,
            "evaluation_policy": "sample",
            "value_cost": 2.0,  # the paper's error is not halved
            "learning_rate": 2.5e-4,
            "clip_rewards": True,
            "normalize_rewards": False,
            "frame_stack": 4,
            "torso": "nature",
            "separate": False,
        }
        return cls(**(paper | overrides))


class PPOAux(NamedTuple):
    """Running statistics (`learning.normalizers.Normalizers`), and with `target_kl` the learning rate, float32 []."""

    observation: Any
    returns: Any
    learning_rate: Any = ()


class PPOActorState(NamedTuple):
    """The network's memory, and the running discounted return that reward normalisation measures (or ())."""

    network: nets.ActorState
    discounted_return: Any


class Samples(NamedTuple):
    """A minibatch of n units (lanes, chunks of them with T = c, or transitions with T = 1).

    Attributes:
      inputs: of the network, [T, n, ...].
      core: state of the core before row 0, [n, ...]; () without one.
      sample: the sampled action before it was clipped to the action space, or the action, [T, n, ...].
      log_prob: of the acting policy, [T, n].
      value: V before the first gradient step, [T, n].
      advantage: by GAE, [T, n].
      target: of the value, [T, n].
      weight: [T, n]; 0 for a transition across two episodes, else 1. `normalize_minibatch` makes them sum to 1 over all
        shards.
    """

    inputs: nets.Inputs
    core: ArrayTree
    sample: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


def normalize_minibatch(batch: Samples, config: PPOConfig) -> Samples:
    """Divides the weights of a minibatch by their sum over all shards, and normalises its advantages.

    Both are [..., T, n]: leading axes number minibatches, each of which is normalised by itself.
    """
    advantage, axes = batch.advantage, (-2, -1)
    if config.normalize_advantages:
        mean, variance, count = collectives.global_moments(advantage, batch.weight, axes)
        advantage = (advantage - mean[..., None, None]) * lax.rsqrt(variance[..., None, None] + 1e-8)
    else:
        count = collectives.global_sum(jnp.sum(batch.weight, axes))
    return batch._replace(advantage=advantage, weight=batch.weight / jnp.maximum(count[..., None, None], 1.0))


def loss(
    outputs: jax.Array,
    values: jax.Array,
    batch: Samples,
    distribution: distributions.Distribution,
    hyper: dict[str, jax.Array],
    config: PPOConfig,
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate loss (equations 7 and 9) of some units; all arrays [T, n].

    Args:
      outputs: of the policy, [T, n, P].
      values: [T, n].
      batch: from `normalize_minibatch`, with its weights and its normalised advantages.
      distribution: of the action space.
      hyper: tunable numbers.
      config: the static settings.

    Returns:
      This part of the loss and of its metrics; summed over all units of all shards, they are the whole.
    """
    advantage, weights = batch.advantage, batch.weight
    # The probability ratio r_t of the new policy to the one that acted (section 3).
    log_ratio = jnp.where(batch.weight > 0, distribution.log_prob(outputs, batch.sample) - batch.log_prob, 0.0)
    # Not in the paper: a ratio that overflows would make metrics infinite, and gradients NaN. Beyond e^40 a sample has
    # no gradient, also where its advantage is negative and the objective does not clip it.
    log_ratio = jnp.minimum(log_ratio, 40.0)
    ratio = jnp.exp(log_ratio)

    # L^CLIP: the smaller of the plain and the clipped objective (equation 7).
    epsilon = hyper["clip_epsilon"]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon) * advantage)

    # L^VF, the squared error of the value (equation 9), optionally the larger one of it and of a value that has moved
    # by at most `value_clip_epsilon`.
    errors = jnp.square(values - batch.target)
    if config.value_clip_epsilon is not None:
        change = jnp.clip(values - batch.value, -config.value_clip_epsilon, config.value_clip_epsilon)
        errors = jnp.maximum(errors, jnp.square(batch.value + change - batch.target))

    # L^CLIP+VF+S, with an entropy bonus S (equation 9). Weights make the sum over all shards a mean. The divergence
    # KL(acting || new) is estimated by (r - 1) - log r (Schulman 2020).
    terms = {
        "loss/policy": -surrogate,
        "loss/value": 0.5 * errors,
        "policy/entropy": distribution.entropy(outputs),
        "policy/kl": ratio - 1.0 - log_ratio,
        "policy/clip_fraction": (jnp.abs(ratio - 1.0) > epsilon).astype(jnp.float32),
        "value/mean": values,
    }
    if distribution.std is not None:
        terms["policy/std"] = distribution.std(outputs)
    metrics = dict(zip(terms, collectives.local_sums([weights * x for x in terms.values()])))
    policy, value, entropy = (metrics[name] for name in ("loss/policy", "loss/value", "policy/entropy"))
    total = policy + hyper["value_cost"] * value - hyper["entropy_cost"] * entropy
    return total, metrics | {"loss/total": total}


@base.maker("ppo", PPOConfig, loss)
def make(
    spec: EnvSpec, config: PPOConfig, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The PPO agent for an environment; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space, torso, network or normalisation that does not fit the environment; while tracing,
        where `num_minibatches` does not divide what a shard holds.
    """
    network, distribution = config.policy_and_value("ppo", spec, network)
    config.check_normalization(spec)
    if config.chunk_length and not network.recurrent:
        raise ValueError(
            f"chunk_length={config.chunk_length}: without a core, single transitions are shuffled; leave it out."
        )
    rule = config.make_optimizer(optimizer)
    if config.target_kl is not None and "learning_rate" not in rule.uses:
        raise ValueError(
            f"target_kl={config.target_kl} sets the learning rate, and optimizer= has one of its own: give a function, "
            "such as optimizer=lambda learning_rate: optax.adam(learning_rate)."
        )
    unused = ("reward_scale",) if config.normalize_rewards else ()
    functions = _PPO(spec, config, network, rule, loss, distribution)
    return functions.bundle("ppo", unused=unused)


@dataclasses.dataclass(frozen=True, eq=False)
class _PPO(base.PolicyFunctions):
    config: PPOConfig

    def aux(self, params: ArrayTree) -> PPOAux:
        return PPOAux(*self.config.initial_normalizers(self.spec))

    def _begin(self, params: ArrayTree, hyper: Mapping[str, jax.Array]) -> LearnerState:
        learner = super()._begin(params, hyper)
        if self.config.target_kl is None:
            return learner
        return learner._replace(aux=learner.aux._replace(learning_rate=hyper["learning_rate"]))

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> tuple[ArrayTree, jax.Array]:
        return learner.aux.observation, learner.hyper["discount"]

    def start(self, lanes: jax.Array, num_lanes: int) -> PPOActorState:
        discounted_return = jnp.zeros(lanes.shape) if self.config.normalize_rewards else ()
        return PPOActorState(super().start(lanes, num_lanes), discounted_return)

    def play(
        self, actor: ActorParams, state: PPOActorState, timestep: TimeStep, key: jax.Array, mode: bool
    ) -> tuple[ArrayTree, ArrayTree, PPOActorState]:
        observation_moments, discount = actor.aux
        timestep = self.config.preprocess(timestep, observation_moments)
        outputs, _, network_state = nets.step(self.network, actor.params, state.network, timestep)
        action, extras = self.distribution.act(outputs, key, mode)
        # The discounted return so far, by whose scale rewards are divided (Engstrom et al. 2020).
        discounted_return = state.discounted_return
        if self.config.normalize_rewards:
            discounted_return = returns.running_return(timestep, discount, discounted_return)
            extras["discounted_return"] = discounted_return
        return action, extras, PPOActorState(network_state.after(action), discounted_return)

    def learn(
        self, learner: LearnerState, trajectory: Trajectory, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        config = self.config
        samples, normalizers = self._samples(learner, trajectory)

        # K epochs of minibatches (algorithm 1). The advantages of all minibatches, [epochs * minibatches, T, n], are
        # normalised before the loop, by one sum over shards instead of one a minibatch.
        order = minibatches.minibatches(key, samples.weight.shape[1], config.num_epochs, config.num_minibatches)
        in_order = lambda x: jnp.moveaxis(x[:, order], 1, 0)  # noqa: E731
        weighted = normalize_minibatch(
            samples._replace(advantage=in_order(samples.advantage), weight=in_order(samples.weight)), config
        )
        samples = samples._replace(advantage=(), weight=())

        def minibatch(units: jax.Array, weights: tuple[jax.Array, jax.Array]) -> Samples:
            advantage, weight = weights
            return minibatches.take(samples, units)._replace(advantage=advantage, weight=weight)

        # An adapted rate goes on where the last rollout left it.
        rate = self.learning_rate(learner, progress) if config.target_kl is None else learner.aux.learning_rate
        learner, metrics = minibatches.run(
            functools.partial(self._loss_of_units, learner.hyper, progress),
            learner,
            minibatch,
            order,
            (weighted.advantage, weighted.weight),
            optimizer=self.optimizer,
            learning_rate=rate,
            observation=samples.inputs.observation,
            num_rows=samples.value.shape[0],
            target_kl=config.target_kl,
        )
        rate = () if config.target_kl is None else metrics["grad/learning_rate"]
        return learner._replace(aux=PPOAux(*normalizers, rate)), metrics

    def batch_loss(
        self, params: ArrayTree, learner: LearnerState, trajectory: Trajectory, progress: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        # All units are one minibatch; advantages and targets are constants, as they are while parameters move.
        samples, _ = self._samples(learner._replace(params=lax.stop_gradient(learner.params)), trajectory)
        samples = normalize_minibatch(samples, self.config)
        total, (metrics, _) = self._loss_of_units(learner.hyper, progress, params, samples)
        return total, metrics

    def _loss_of_units(
        self, hyper: Mapping[str, jax.Array], progress: jax.Array, params: ArrayTree, batch: Samples
    ) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
        hyper = dict(hyper)
        if self.config.clip_epsilon_decay:
            hyper["clip_epsilon"] = hyper["clip_epsilon"] * (1.0 - progress)
        outputs, values, _ = self.network.apply(params, batch.inputs, batch.core)
        total, metrics = self.loss(outputs, values, batch, self.distribution, hyper, self.config)
        return total, (metrics, ())

    def _samples(self, learner: LearnerState, trajectory: Trajectory) -> tuple[Samples, Normalizers]:
        """Units with their advantages and targets, computed once per batch before its first gradient step."""
        # Statistics of returns include this batch. Observations are normalised by those from before it, as acting did,
        # so that ratios begin at 1. (Actors of Sebulba may be some updates behind; then they begin near 1.)
        normalizers = self.config.update_normalizers(Normalizers(*learner.aux[:2]), trajectory)
        timesteps = self.config.preprocess(trajectory.timesteps, learner.aux.observation)
        trajectory = trajectory._replace(timesteps=timesteps, actor_state=trajectory.actor_state.network)
        # Acting records no values: they are computed here for all T + 1 rows, with the bootstrap value in row T.
        inputs, core = nets.inputs(self.network, trajectory), trajectory.actor_state.core
        apply, step = functools.partial(self.network.apply, learner.params), returns.transitions(trajectory)
        chunk_length = (self.config.chunk_length if self.network.recurrent else None) or step.mask.shape[0]
        if self.network.recurrent:
            values, core = minibatches.unroll(apply, inputs, core, chunk_length)
        else:
            values = gradients.forward(lambda x: apply(x, ())[1], inputs)
        # Advantages by GAE (equations 11 and 12), and the value's targets.
        step = step._replace(
            reward=self.config.scale_rewards(step.reward, normalizers.returns, learner.hyper),
            discount=learner.hyper["discount"] * step.discount,
        )
        advantages = returns.gae(values, step, learner.hyper["gae_lambda"])
        samples = Samples(
            inputs=jax.tree.map(lambda x: x[:-1], inputs),
            core=core,
            sample=trajectory.extras.get("sample", trajectory.actions),
            log_prob=trajectory.extras["log_prob"],
            value=values[:-1],
            advantage=advantages,
            target=advantages + values[:-1],
            weight=step.mask,
        )
        # A unit is a lane where the network is recurrent, or a chunk of one, else a transition.
        if self.network.recurrent:
            samples = minibatches.cut(samples, chunk_length)
        else:
            samples = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), samples)
        return samples, normalizers
