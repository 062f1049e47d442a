"""Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Each batch is used for several epochs of minibatches with the clipped surrogate objective (equation 7), a value loss
and an entropy bonus (equation 9), with GAE advantages (Schulman et al. 2016) computed once per batch.

Choices beyond the paper, all fields of the config (Engstrom et al. 2020; Andrychowicz et al. 2021): advantages
normalised per minibatch over all devices, separate networks for policy and value, linear decay of the learning rate,
rewards normalised by the running scale of the return, optional clipping of the value loss, optional running
normalisation of observations.

Feed-forward networks shuffle single transitions; recurrent ones shuffle whole lanes, unrolled from the state stored
at the start of the rollout. Shuffling and minibatches belong to a shard, so that equal shards give equal results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, distributions, nets, returns, spaces, trajectories
from podracer.learning import gradients, minibatches, moments, optimizer
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
class PPOConfig:
    """The agent's settings. Paper values are those of table 5 (Atari) where it has them.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 8 actors).
      rollout_length: T, transitions of a lane in a batch (paper: 128).
      num_epochs: passes over each batch (paper: 3; MuJoCo 10).
      num_minibatches: gradient steps per pass (paper: batch 1024 in minibatches of 256, so 4).
      discount: gamma (paper: 0.99).
      gae_lambda: (paper: 0.95).
      clip_epsilon: range of the probability ratio (paper: 0.1 times a decay, Atari; 0.2, MuJoCo).
      value_clip_epsilon: range of the value's change per batch, or None to leave it free.
      value_cost: weight of the value loss, itself half a squared error (paper: 1).
      entropy_cost: weight of the entropy bonus (paper: 0.01).
      learning_rate: of Adam (paper: 2.5e-4).
      learning_rate_decay: whether it falls linearly to 0 over `total_steps` (paper: True).
      adam_eps: Adam's epsilon.
      max_grad_norm: clip by global norm.
      normalize_advantages: to zero mean and unit variance per minibatch.
      normalize_observations: by running mean and variance, clipped to [-10, 10]; of named parts those of float32, while
        choices and bytes stay as they are.
      clip_rewards: to [-1, 1] (paper: Atari).
      normalize_rewards: by the running standard deviation of the discounted return, clipped to [-10, 10].
      frame_stack: how many of the newest observations the network sees (paper: 4).
      torso: see `podracer.nets.make`.
      hidden_sizes: of the MLP.
      activation: of the MLP.
      separate: whether policy and value have a torso each.
      lstm_size: units of an LSTM core, 0 for none.
      compute_dtype: of the torso, "float32" or "bfloat16" (see `podracer.nets.make`).
    """

    envs_per_device: int = configs.field(64, low=1)
    rollout_length: int = configs.field(64, low=1)
    num_epochs: int = configs.field(4, low=1)
    num_minibatches: int = configs.field(4, low=1)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    gae_lambda: float = configs.field(0.95, low=0.0, high=1.0, tunable=True)
    clip_epsilon: float = configs.field(0.2, low=0.0, tunable=True)
    value_clip_epsilon: float | None = configs.field(None, low=0.0)
    value_cost: float = configs.field(0.5, low=0.0, tunable=True)
    entropy_cost: float = configs.field(0.01, low=0.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    learning_rate_decay: bool = True
    adam_eps: float = configs.field(1e-5, low=0.0)
    max_grad_norm: float = configs.field(0.5, low=0.0, tunable=True)
    normalize_advantages: bool = True
    normalize_observations: bool = False
    clip_rewards: bool = False
    normalize_rewards: bool = True
    frame_stack: int = configs.field(1, low=1)
    torso: nets.Torso = "auto"
    hidden_sizes: tuple[int, ...] = configs.field((64, 64), low=1)
    activation: Literal["relu", "tanh"] = "tanh"
    separate: bool = True
    lstm_size: int = configs.field(0, low=0)
    compute_dtype: nets.ComputeDtype = "float32"

    def __post_init__(self):
        configs.check(self)

    @classmethod
    def atari(cls, **overrides) -> PPOConfig:
        """The paper's Atari configuration (table 5), but for the decay of `clip_epsilon`; gradients are clipped.

        With clipped gradients most code has a `value_cost` of 0.5, a quarter of this; they were not compared here.
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
    """What PPO keeps beside its parameters: `learning.moments.Moments`, or () where a normalisation is off."""

    observation: Any
    returns: Any


class PPOActorState(NamedTuple):
    """The network's memory, and the running discounted return that reward normalisation measures (or ())."""

    network: nets.ActorState
    discounted_return: Any


class Samples(NamedTuple):
    """What a minibatch holds: fields of [T, n] for n units (lanes, or transitions with T = 1)."""

    inputs: nets.Inputs
    core: ArrayTree
    sample: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    mask: jax.Array


def weigh(batch: Samples, config: PPOConfig) -> Samples:
    """Makes weights that sum to 1 over all shards of a minibatch's mask, and normalises its advantages.

    Both are [..., T, n]: of one minibatch, or of many, each by itself.
    """
    advantage, axes = batch.advantage, (-2, -1)
    spread = lambda x: x[..., None, None]  # noqa: E731
    if config.normalize_advantages:
        mean, variance, count = collectives.global_moments(advantage, batch.mask, axes)
        advantage = (advantage - spread(mean)) * lax.rsqrt(spread(variance) + 1e-8)
    else:
        count = collectives.global_sum(jnp.sum(batch.mask, axes))
    return batch._replace(advantage=advantage, mask=batch.mask / jnp.maximum(spread(count), 1.0))


def loss(
    outputs: jax.Array,
    values: jax.Array,
    batch: Samples,
    distribution: distributions.Distribution,
    hyper: dict[str, jax.Array],
    config: PPOConfig,
) -> tuple[jax.Array, Metrics]:
    """The part of the clipped surrogate loss (equations 7 and 9) that some units have; all arrays [T, n].

    Args:
      outputs: of the policy, [T, n, P].
      values: [T, n].
      batch: from `weigh`: its mask holds the weights, and its advantages are normalised.
      distribution: of the action space.
      hyper: tunable numbers.
      config: the static settings.

    Returns:
      The scalar and the metrics whose sums over all units of all shards are the loss and its metrics.
    """
    advantage, weights = batch.advantage, batch.mask
    log_ratio = jnp.where(batch.mask > 0, distribution.log_prob(outputs, batch.sample) - batch.log_prob, 0.0)
    # A ratio that overflows is an infinite metric, and NaN in the gradient even where it is clipped.
    log_ratio = jnp.minimum(log_ratio, 40.0)
    ratio = jnp.exp(log_ratio)
    epsilon = hyper["clip_epsilon"]
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon) * advantage)

    errors = jnp.square(values - batch.target)
    if config.value_clip_epsilon is not None:
        change = jnp.clip(values - batch.value, -config.value_clip_epsilon, config.value_clip_epsilon)
        errors = jnp.maximum(errors, jnp.square(batch.value + change - batch.target))

    terms = {
        "loss/policy": -surrogate,
        "loss/value": 0.5 * errors,
        "policy/entropy": distribution.entropy(outputs),
        "policy/kl": ratio - 1.0 - log_ratio,
        "policy/clip_fraction": (jnp.abs(ratio - 1.0) > epsilon).astype(jnp.float32),
        "value/mean": values,
    }
    metrics = dict(zip(terms, collectives.sums([weights * x for x in terms.values()])))
    policy, value, entropy = (metrics[name] for name in ("loss/policy", "loss/value", "policy/entropy"))
    total = policy + hyper["value_cost"] * value - hyper["entropy_cost"] * entropy
    return total, metrics | {"loss/total": total}


def make(
    spec: EnvSpec,
    config: PPOConfig | None = None,
    network: nets.Network | None = None,
    loss: Callable[..., tuple[jax.Array, Metrics]] = loss,
) -> Agent:
    """The PPO agent for an environment.

    Args:
      spec: the environment's spec.
      config: settings; defaults if None.
      network: your own network (see `podracer.nets.Network`); the config's if None.
      loss: your own loss, called as `loss` is and returning what it returns, with metrics of any names.

    Raises:
      ValueError: for an action space, torso, network or normalisation that does not fit the environment; while tracing,
        where `num_minibatches` does not divide what a shard holds.
    """
    config = config or PPOConfig()
    check_one_player(spec, "ppo")
    distribution = distributions.for_space(spec.action_space)
    seen = nets.stacked_spec(spec, config.frame_stack)
    if network is not None:
        nets.check(network, seen, "ppo")
    network = network or nets.make(
        seen,
        torso=config.torso,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        separate=config.separate,
        lstm_size=config.lstm_size,
        compute_dtype=config.compute_dtype,
    )
    transformation = optimizer.make("adam", eps=config.adam_eps)
    example = spaces.zeros(spec.observation_space)
    if config.normalize_observations and all(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(example)):
        raise ValueError(
            f"normalize_observations=True needs float32 observations, which {spec.name} does not have; leave it out."
        )

    # Parts that are not normalised have () for moments.
    of_floats = lambda x: moments.initial(x.shape) if x.dtype == jnp.float32 else ()  # noqa: E731
    each = functools.partial(jax.tree.map, is_leaf=lambda m: isinstance(m, tuple))

    def init(key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        params = network.init(key)
        normalizers = Normalizers(
            jax.tree.map(of_floats, example) if config.normalize_observations else (),
            moments.initial(()) if config.normalize_rewards else (),
        )
        return LearnerState(params, optimizer.init(transformation, params), dict(hyper), jnp.int32(0), normalizers)

    def actor_params(learner: LearnerState, progress: jax.Array) -> ActorParams:
        return ActorParams(learner.params, learner.num_updates, (learner.aux.observation, learner.hyper["discount"]))

    def clip(reward: jax.Array) -> jax.Array:
        return jnp.clip(reward, -1.0, 1.0) if config.clip_rewards else reward

    def normalize_observation(observation: ArrayTree, running: ArrayTree) -> ArrayTree:
        if not config.normalize_observations:
            return observation
        return each(lambda m, x: moments.normalize(x, m) if m else x, running, observation)

    def act(
        actor: ActorParams, state: PPOActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[ArrayTree, ArrayTree, PPOActorState]:
        running, discount = actor.aux
        timestep = timestep._replace(reward=clip(timestep.reward))
        timestep = timestep._replace(observation=normalize_observation(timestep.observation, running))
        outputs, _, memory = nets.step(network, actor.params, state.network, timestep)
        sample = distribution.mode(outputs) if evaluation else distribution.sample(outputs, key)
        action = distribution.to_action(sample)
        extras = {"log_prob": distribution.log_prob(outputs, sample)}
        if sample is not action:
            extras["sample"] = sample
        discounted = state.discounted_return
        if config.normalize_rewards:
            discounted = timestep.reward + discount * jnp.where(timestep.first, 0.0, discounted)
            extras["discounted_return"] = discounted
        return action, extras, PPOActorState(memory.after(action), discounted)

    def start(lanes: jax.Array, num_lanes: int) -> PPOActorState:
        discounted = jnp.zeros(lanes.shape) if config.normalize_rewards else ()
        return PPOActorState(nets.start(network, spec, lanes.shape[0], config.frame_stack), discounted)

    def update_normalizers(normalizers: Normalizers, trajectory: Trajectory) -> Normalizers:
        rows = jax.tree.map(lambda x: x[:-1], trajectory.timesteps)
        observation, discounted = normalizers
        if config.normalize_observations:
            # A `first` row before another one was not played: its lane waits for an environment.
            shown = ~(rows.first & trajectory.timesteps.first[1:])
            merge = lambda m, x: moments.merge(m, x, shown.astype(jnp.float32)) if m else m  # noqa: E731
            observation = each(merge, observation, rows.observation)
        if config.normalize_rewards:
            arrived = 1.0 - rows.first.astype(jnp.float32)
            discounted = moments.merge(discounted, trajectory.extras["discounted_return"], arrived)
        return Normalizers(observation, discounted)

    def prepare(learner: LearnerState, trajectory: Trajectory, returned: Any) -> Samples:
        """Advantages and targets, computed once per batch before its first gradient step."""
        state: nets.ActorState = trajectory.actor_state.network
        trajectory = trajectory._replace(actor_state=state)
        # Values of all rows in one pass: acting needs none, and row T has no value yet.
        values = nets.unroll(network, learner.params, trajectory)[1]
        step = returns.transitions(trajectory)
        step = step._replace(discount=learner.hyper["discount"] * step.discount)
        if config.normalize_rewards:
            step = step._replace(reward=jnp.clip(step.reward * lax.rsqrt(returned.variance + 1e-8), -10.0, 10.0))
        advantages = returns.gae(values, step, learner.hyper["gae_lambda"])
        return Samples(
            inputs=jax.tree.map(lambda x: x[:-1], nets.inputs(network, trajectory)),
            core=state.core,
            sample=trajectory.extras.get("sample", trajectory.actions),
            log_prob=trajectory.extras["log_prob"],
            value=values[:-1],
            advantage=advantages,
            target=advantages + values[:-1],
            mask=step.mask,
        )

    def learn(
        learner: LearnerState, trajectory: Trajectory, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        normalizers = update_normalizers(learner.aux, trajectory)
        rows = trajectory.timesteps
        observation = normalize_observation(rows.observation, learner.aux.observation)
        timesteps = rows._replace(observation=observation, reward=clip(rows.reward))
        trajectory = trajectory._replace(timesteps=timesteps)
        samples = prepare(learner, trajectory, normalizers.returns)
        if not network.recurrent:
            samples = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), samples)
        learning_rate = learner.hyper["learning_rate"]
        if config.learning_rate_decay:
            learning_rate = learning_rate * (1.0 - progress)

        def loss_fn(params: ArrayTree, batch: Samples) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
            outputs, values, _ = network.apply(params, batch.inputs, batch.core)
            total, metrics = loss(outputs, values, batch, distribution, learner.hyper, config)
            return total, (metrics, ())

        def minibatch(
            carry: tuple[optimizer.Parts, ArrayTree], now: tuple[jax.Array, ...]
        ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            params, opt_state = carry
            units, advantage, weights = now
            batch = take(samples, units)._replace(advantage=advantage, mask=weights)
            T, n = weights.shape
            groups = split(batch, n // gradients.at_a_time(batch.inputs.observation, T, n))
            grads, metrics, _ = gradients.accumulate(loss_fn, restore(params), groups)
            params, opt_state, norm = optimizer.step_joined(
                transformation,
                collectives.global_sum(optimizer.joined(grads)[0]),
                opt_state,
                params,
                learning_rate=learning_rate,
                max_grad_norm=learner.hyper["max_grad_norm"],
            )
            return (params, opt_state), (jnp.stack(list(metrics.values())), norm)  # one vector through the scan

        order = minibatches.minibatches(key, samples.mask.shape[1], config.num_epochs, config.num_minibatches)
        # Moments of all minibatches at once: within the scan, the gradient is all that devices have to agree on.
        pick = lambda x: jnp.moveaxis(x[:, order], 1, 0)  # noqa: E731
        weighed = weigh(samples._replace(advantage=pick(samples.advantage), mask=pick(samples.mask)), config)
        names = jax.eval_shape(loss_fn, learner.params, samples)[1][0]
        samples = samples._replace(advantage=(), mask=())
        # Joined through the scan: taking parameters apart and together again is a copy for every array.
        params, restore = optimizer.joined(learner.params)
        (params, opt_state), (sums, norms) = lax.scan(
            minibatch, (params, learner.opt_state), (order, weighed.advantage, weighed.mask)
        )
        metrics = dict(zip(names, collectives.global_sum(jnp.mean(sums, axis=0))))
        metrics |= {"grad/norm": jnp.mean(norms), "grad/learning_rate": learning_rate}
        return LearnerState(restore(params), opt_state, learner.hyper, learner.num_updates + 1, normalizers), metrics

    return Agent(
        name="ppo",
        config=config,
        init=init,
        actor_params=actor_params,
        start=start,
        act=act,
        learn=learn,
        hyper=configs.tunables(config),
    )


def take(samples: Samples, units: jax.Array) -> Samples:
    """Some units: fields [T, n, ...] -> [T, len(units), ...]; the core's state has no T."""
    core = jax.tree.map(lambda x: x[units], samples.core)
    fields = jax.tree.map(lambda x: x[:, units], samples._replace(core=()))
    return fields._replace(core=core)


def split(batch: Samples, groups: int) -> Samples:
    """[T, n] -> [groups, T, n / groups]."""
    core = jax.tree.map(lambda x: trajectories.split(x, groups, 0), batch.core)
    fields = jax.tree.map(lambda x: trajectories.split(x, groups, 1), batch._replace(core=()))
    return fields._replace(core=core)
