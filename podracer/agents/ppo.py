"""Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Each batch is used for several epochs of minibatches with the clipped surrogate objective (equation 7), a value loss
and an entropy bonus (equation 9), with GAE advantages (Schulman et al. 2016) computed once per batch.

Choices beyond the paper, all fields of the config (Engstrom et al. 2020; Andrychowicz et al. 2021): advantages
normalised per minibatch over all devices, clipping of the gradient's norm, rewards normalised by the running scale of
the return, optional clipping of the value loss, optional running normalisation of observations.

Feed-forward networks shuffle single transitions; recurrent ones shuffle whole lanes, unrolled from the state stored
at the start of the rollout, or chunks of them. A rollout of T transitions has T + 1 time steps, of which the last one
only bootstraps. Each shard shuffles its own data alone. A run has the same shards on any number of devices, and so the
same results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, distributions, nets, returns, spaces
from podracer.agents import base
from podracer.learning import minibatches, moments
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, LearnerState, Metrics, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class PPOConfig(nets.NetworkConfig, OptimizerConfig):
    """The agent's settings, beside those of `podracer.nets.NetworkConfig` and
    `podracer.learning.optimizer_config.OptimizerConfig`. Paper values are those of table 5 (Atari)
    where it has them.

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
      value_clip_epsilon: range of the value's change per batch, or None to leave it free.
      value_cost: weight of half the squared error of values (paper: 1 for the whole error, so 2.0 here).
      entropy_cost: weight of the entropy bonus (paper: 0.01).
      learning_rate: of Adam (paper: 2.5e-4).
      learning_rate_schedule: of the rate over the run (paper: "linear").
      optimizer_eps: Adam's epsilon.
      max_grad_norm: clip by global norm.
      normalize_advantages: to zero mean and unit variance per minibatch.
      normalize_observations: by running mean and variance, clipped to [-10, 10]. Of named observations only parts of
        float32 are normalised.
      clip_rewards: to [-1, 1], as is usual for Atari.
      normalize_rewards: by the running standard deviation of the discounted return, clipped to [-10, 10].
      separate: whether policy and value have a torso each.
    """

    envs_per_device: int = configs.field(64, low=1)
    rollout_length: int = configs.field(64, low=1)
    chunk_length: int | None = configs.field(None, low=1)
    num_epochs: int = configs.field(4, low=1)
    num_minibatches: int = configs.field(4, low=1)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    gae_lambda: float = configs.field(0.95, low=0.0, high=1.0, tunable=True)
    clip_epsilon: float = configs.field(0.2, low=0.0, tunable=True)
    value_clip_epsilon: float | None = configs.field(None, low=0.0)
    value_cost: float = configs.field(0.5, low=0.0, tunable=True)
    entropy_cost: float = configs.field(0.01, low=0.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    optimizer_eps: float = configs.field(1e-5, low=0.0, tunable=True)
    max_grad_norm: float = configs.field(0.5, low=0.0, tunable=True)
    normalize_advantages: bool = True
    normalize_observations: bool = False
    clip_rewards: bool = False
    normalize_rewards: bool = True
    activation: Literal["relu", "tanh"] = "tanh"
    separate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.chunk_length and self.rollout_length % self.chunk_length:
            raise ValueError(f"chunk_length={self.chunk_length} must divide rollout_length={self.rollout_length}.")

    @classmethod
    def atari(cls, **overrides) -> PPOConfig:
        """The paper's Atari configuration (table 5), with the changes that later implementations share.

        Departures from the paper: the network of Mnih et al. 2015 ("nature") and not that of 2016 ("shallow"), a
        constant `clip_epsilon`, clipped gradients, normalised advantages, and 8 lanes a device. With clipped gradients
        most code has a `value_cost` of 0.5, a quarter of this; they were not compared here.
        """
        paper = {
            "envs_per_device": 8,
            "rollout_length": 128,
            "num_epochs": 3,
            "clip_epsilon": 0.1,
            "value_cost": 2.0,  # the paper's error is not halved
            "learning_rate": 2.5e-4,
            "clip_rewards": True,
            "normalize_rewards": False,
            "frame_stack": 4,
            "torso": "nature",
            "separate": False,
        }
        return cls(**(paper | overrides))


class Normalizers(NamedTuple):
    """Running statistics beside the parameters: `learning.moments.Moments`, or () where a normalisation is off."""

    observation: Any
    returns: Any


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
    # Not in the paper: e^40 is clipped in any case. A ratio that overflows would make metrics infinite, and gradients
    # NaN.
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
    distribution = distributions.for_space(spec.action_space)
    network = config.actor_critic("ppo", spec, network, separate=config.separate)
    floats = [leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(spaces.zeros(spec.observation_space))]
    if config.normalize_observations and not any(floats):
        raise ValueError(
            f"normalize_observations=True needs float32 observations, which {spec.name} does not have; leave it out."
        )
    if config.chunk_length and not network.recurrent:
        raise ValueError(
            f"chunk_length={config.chunk_length}: without a core, single transitions are shuffled; leave it out."
        )
    rule = config.make_optimizer(optimizer)
    functions = _PPO(spec, config, network, rule, loss, distribution)
    return functions.bundle("ppo", batch_loss=functions.batch_loss)


@dataclasses.dataclass(frozen=True, eq=False)
class _PPO(base.Functions):
    config: PPOConfig
    distribution: distributions.Distribution

    def aux(self, params: ArrayTree) -> Normalizers:
        observation_moments, return_moments = (), ()
        if self.config.normalize_observations:
            # Parts that are not normalised have () for moments.
            example = spaces.zeros(self.spec.observation_space)
            of_floats = lambda x: moments.initial(x.shape) if x.dtype == jnp.float32 else ()  # noqa: E731
            observation_moments = jax.tree.map(of_floats, example)
        if self.config.normalize_rewards:
            return_moments = moments.initial(())
        return Normalizers(observation_moments, return_moments)

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> tuple[ArrayTree, jax.Array]:
        return learner.aux.observation, learner.hyper["discount"]

    def start(self, lanes: jax.Array, num_lanes: int) -> PPOActorState:
        discounted_return = jnp.zeros(lanes.shape) if self.config.normalize_rewards else ()
        return PPOActorState(super().start(lanes, num_lanes), discounted_return)

    def act(
        self, actor: ActorParams, state: PPOActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[ArrayTree, ArrayTree, PPOActorState]:
        observation_moments, discount = actor.aux
        timestep = self._preprocess(timestep, observation_moments)
        outputs, _, network_state = nets.step(self.network, actor.params, state.network, timestep)
        action, extras = self.distribution.act(outputs, key, evaluation)
        # The discounted return so far, by whose scale rewards are divided (Engstrom et al. 2020).
        discounted_return = state.discounted_return
        if self.config.normalize_rewards:
            discounted_return = timestep.reward + discount * jnp.where(timestep.first, 0.0, discounted_return)
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

        learner, metrics = minibatches.run(
            functools.partial(self._loss_of_units, learner.hyper),
            learner,
            minibatch,
            order,
            (weighted.advantage, weighted.weight),
            optimizer=self.optimizer,
            learning_rate=self.learning_rate(learner, progress),
            observation=samples.inputs.observation,
            num_rows=samples.value.shape[0],
            split=minibatches.split,
        )
        return learner._replace(aux=normalizers), metrics

    def batch_loss(
        self, params: ArrayTree, learner: LearnerState, trajectory: Trajectory, progress: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        # All units are one minibatch; advantages and targets are constants, as they are while parameters move.
        samples, _ = self._samples(learner._replace(params=lax.stop_gradient(learner.params)), trajectory)
        total, (metrics, _) = self._loss_of_units(learner.hyper, params, normalize_minibatch(samples, self.config))
        return total, metrics

    def _loss_of_units(
        self, hyper: dict[str, jax.Array], params: ArrayTree, batch: Samples
    ) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
        outputs, values, _ = self.network.apply(params, batch.inputs, batch.core)
        total, metrics = self.loss(outputs, values, batch, self.distribution, hyper, self.config)
        return total, (metrics, ())

    def _preprocess(self, timesteps: TimeStep, observation_moments: ArrayTree) -> TimeStep:
        """Clips rewards and normalises observations, as the config says."""
        if self.config.clip_rewards:
            timesteps = timesteps._replace(reward=jnp.clip(timesteps.reward, -1.0, 1.0))
        if self.config.normalize_observations:
            normalize = lambda m, x: moments.normalize(x, m) if m else x  # noqa: E731
            observation = _map_moments(normalize, observation_moments, timesteps.observation)
            timesteps = timesteps._replace(observation=observation)
        return timesteps

    def _update_normalizers(self, normalizers: Normalizers, trajectory: Trajectory) -> Normalizers:
        timesteps = jax.tree.map(lambda x: x[:-1], trajectory.timesteps)
        observation, discounted_return = normalizers
        if self.config.normalize_observations:
            # Where two rows in succession are `first`, the earlier one is a filler: its lane waited for an environment.
            valid = (~(timesteps.first & trajectory.timesteps.first[1:])).astype(jnp.float32)
            merge = lambda m, x: moments.merge(m, x, valid) if m else m  # noqa: E731
            observation = _map_moments(merge, observation, timesteps.observation)
        if self.config.normalize_rewards:
            valid = 1.0 - timesteps.first.astype(jnp.float32)  # a first row has no reward
            discounted_return = moments.merge(discounted_return, trajectory.extras["discounted_return"], valid)
        return Normalizers(observation, discounted_return)

    def _samples(self, learner: LearnerState, trajectory: Trajectory) -> tuple[Samples, Normalizers]:
        """Units with their advantages and targets, computed once per batch before its first gradient step."""
        # Statistics of returns include this batch. Observations are normalised by those from before it, as acting did,
        # so that ratios begin at 1. (Actors of Sebulba may be some updates behind; then they begin near 1.)
        normalizers = self._update_normalizers(learner.aux, trajectory)
        timesteps = self._preprocess(trajectory.timesteps, learner.aux.observation)
        trajectory = trajectory._replace(timesteps=timesteps, actor_state=trajectory.actor_state.network)
        # Acting records no values: they are computed here for all T + 1 rows, with the bootstrap value in row T.
        inputs, core = nets.inputs(self.network, trajectory), trajectory.actor_state.core
        apply, step = functools.partial(self.network.apply, learner.params), returns.transitions(trajectory)
        chunk_length = (self.config.chunk_length if self.network.recurrent else None) or step.mask.shape[0]
        values, core = minibatches.unroll(apply, inputs, core, chunk_length)
        # Advantages by GAE (equations 11 and 12), and the value's targets.
        step = step._replace(discount=learner.hyper["discount"] * step.discount)
        if self.config.normalize_rewards:
            scale = lax.rsqrt(normalizers.returns.variance + 1e-8)
            step = step._replace(reward=jnp.clip(step.reward * scale, -10.0, 10.0))
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
            return minibatches.cut(samples, chunk_length), normalizers
        return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), samples), normalizers


def _map_moments(function: Callable[..., Any], running: ArrayTree, *trees: ArrayTree) -> ArrayTree:
    """`function(moments, *leaves)` of every part of an observation; moments are () of parts without any."""
    return jax.tree.map(function, running, *trees, is_leaf=lambda m: isinstance(m, tuple))
