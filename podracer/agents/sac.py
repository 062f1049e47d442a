"""Soft actor-critic (Haarnoja et al. 2018b, arXiv 1812.05905) and TD3 (Fujimoto et al. 2018), for actions in a Box.

One feed-forward agent learns a policy pi and critics Q_i from replayed rows. A sample is one transition, or n of them
joined into one (`returns.n_step_transition`); x_m is its last observation:

    y   = R + G (min_i Q-_i(x_m, a') - alpha log pi(a' | x_m)),   a' ~ pi(x_m)      Q-: targets that follow Q slowly
    Q_i : mean (Q_i(x_0, a_0) - y)^2 / 2
    pi  : mean alpha log pi(a | x_0) - min_i Q_i(x_0, a),   a ~ pi(x_0)
    alpha: mean alpha (-log pi(a | x_0) - A target_entropy),   A: elements of an action

| field | SAC (defaults) | TD3 (`--preset td3`) |
|---|---|---|
| `policy` | "gaussian": a = tanh(u), u from a Gaussian | "deterministic": a = tanh(mean); alpha is 0 |
| `noise`, `target_noise` | none: a policy explores by its own std | of acting, and of a' (target policy smoothing) |
| `policy_interval` | 1 | 2: the policy learns in every second update |
| `target_policy` | False | True: a' is of an older policy too |

With `values="categorical"` a critic says a distribution of returns z, and learns by cross-entropy to R - G alpha log pi
+ G z on its own atoms (Bellemare et al. 2017); Q is its mean. FastTD3 (Seo et al. 2025, arXiv 2505.22642), FastSAC and
SimbaV2 (Lee et al. 2025, arXiv 2502.15280) are presets.

Elements of actions are in [-1, 1] everywhere but in the environment: log-probabilities, entropies and noise are in
these units, so that equal tasks with other bounds train alike. The greedy action is tanh(mean), the median.

An update's order: critics; policy and alpha, by the new critics; targets. With n > 1, y has the entropy of row m alone.

Deviations from TD3's paper: the policy climbs the least critic and not the first, targets move in every update and not
in every second one, and the learning rate is SAC's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, distributions, nets, returns, trajectories
from podracer.agents import base
from podracer.learning import bins, delayed, normalizers, update, value_distributions
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.learning.sampled_statistics import SampledStatisticsConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, Batch, EnvSpec, LearnerState, Metrics, TimeStep


@dataclasses.dataclass(frozen=True)
class SACConfig(nets.CriticsConfig, SampledStatisticsConfig, OptimizerConfig):
    """The settings, beside those that are inherited; defaults are Haarnoja et al. 2018b's, unless they say else.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 1).
      rollout_length: T, rows of a lane between one round of updates and the next (paper: 1).
      batch_size: transitions per update, over all devices.
      replay_ratio: rows sampled to learn from per row added; `batch_size` is an update for every row (paper).
      replay_capacity: rows that are kept at least, over all devices.
      replay_min_size: rows before the first update (paper: not given; CleanRL: 5,000).
      discount: gamma.
      n_step: rewards in a return (paper: 1); not corrected for the policy that acted.
      tau: share of the way to the newest critics that their targets go in an update.
      policy_interval: D, updates from one step of the policy, and of alpha, to the next (TD3: 2).
      target_policy: whether a' is of a policy that follows the newest one, by `tau` (TD3: True).
      target_entropy: of the policy, per element of an action (paper: -1).
      alpha_init: the first alpha.
      policy_rate: the policy's learning rate is this times `learning_rate`.
      alpha_rate: alpha's learning rate is this times `learning_rate`; 0 leaves alpha as it begins.
      random_start: whether actions are uniform before the first update (paper: True); else the new policy acts.
      learning_rate: of the critics.
      learning_rate_schedule: (paper: "constant").
      max_grad_norm: clip the gradients of the critics, of the policy and of alpha, each by its norm; None or inf: off.
    """

    envs_per_device: int = configs.field(16, low=1)
    rollout_length: int = configs.field(1, low=1)
    batch_size: int = configs.field(256, low=1)
    replay_ratio: float = configs.field(256.0, low=1e-4)
    replay_capacity: int = configs.field(1_000_000, low=1)
    replay_min_size: int = configs.field(5_000, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    n_step: int = configs.field(1, low=1)
    tau: float = configs.field(0.005, low=0.0, high=1.0, tunable=True)
    policy_interval: int = configs.field(1, low=1)
    target_policy: bool = False
    target_entropy: float = configs.field(-1.0, high=0.693, tunable=True)
    alpha_init: float = configs.field(1.0, low=1e-8)
    policy_rate: float = configs.field(1.0, low=0.0, tunable=True)
    alpha_rate: float = configs.field(1.0, low=0.0, tunable=True)
    random_start: bool = True
    learning_rate: float = configs.field(3e-4, low=0.0, tunable=True)
    learning_rate_schedule: update.Schedule = "constant"
    max_grad_norm: float | None = configs.field(float("inf"), low=0.0, tunable=True)

    def __post_init__(self):
        self.clip_no_gradient()
        if isinstance(self.target_entropy, (int, float)) and self.target_entropy > 0.693:
            raise ValueError(
                f"target_entropy={self.target_entropy} must be below log 2 = 0.693, per action dimension: no policy on "
                "[-1, 1] has more; use -1.0."
            )
        super().__post_init__()
        normalizers.check_reward_scale(self.reward_scale, self.normalize_rewards)
        if self.policy == "deterministic":
            why = 'has no effect with policy="deterministic", which has no alpha'
            configs.require_defaults(self, ("target_entropy", "alpha_init", "alpha_rate"), why)


def loss(
    outputs: jax.Array,
    target: jax.Array,
    y: jax.Array,
    values: value_distributions.ValueDistribution,
    hyper: Mapping[str, jax.Array],
    config: SACConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics, jax.Array]:
    """The critics' loss and metrics of some samples: the sums over all samples are those of the batch.

    Args:
      outputs: [N, B, K]; of the critics, for x_0 and a_0.
      target: [N, B, K]; of each critic: y, or the distribution whose mean y is.
      y: [N, B].
      values: the meaning of the K numbers of a value.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.

    Returns:
      The scalar, the metrics, and the mean error of the critics for each sample [B].
    """
    errors, priority = jax.vmap(values.error)(outputs, target)
    q, total = values.mean(outputs), jnp.sum(errors) / batch_size
    terms = {"value/mean": jnp.mean(q, axis=0), "value/td_error": jnp.mean(jnp.abs(q - y), axis=0)}
    metrics = {name: jnp.sum(x) / batch_size for name, x in terms.items()} | {"loss/total": total}
    return total, metrics, jnp.mean(priority, axis=0)


@base.maker("sac", SACConfig, loss)
def make(
    spec: EnvSpec, config: SACConfig, network: nets.ActorCritic | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The SAC agent for an environment with actions in a Box; `podracer.agents` says what the arguments are.

    A user's own loss is that of the critics. A user's own network is a `nets.ActorCritic`.

    Raises:
      ValueError: for an action space, a network or a normalisation that does not fit.
    """
    base.check_bounded(spec, "sac")
    units = distributions.unit_box(spec.action_space)  # type: ignore[arg-type]
    network = config.actor_critic("sac", spec, network, units.size)
    config.check_observations(spec)
    values = value_distributions.make(
        config.values, max_error=math.inf, num_bins=config.num_bins, max_value=config.max_value or math.inf
    )
    # The critics are stacked: one tree of arrays with a leading axis.
    rules = [config.make_optimizer(optimizer, factors=("policy_rate", "alpha_rate"), stacked=x) for x in (False, True)]
    functions = _SAC(spec, config, network, rules[0], loss, rules[1], units, values)
    replay = base.replay_of_rows(
        config,
        config.n_step + 1,
        updates_per_draw=config.policy_interval,
        whole_draws=True,
        **nets.frame_context(1, lambda memory: memory.network),
    )
    remedy = "raise max_value" if config.normalize_rewards else "raise max_value, or set normalize_rewards=True"
    cautions = () if values.largest is None else (bins.caution(values.largest, remedy),)
    unused = ("target_noise", "target_noise_clip") if functions.gaussian else ("target_entropy", "alpha_rate")
    unused += ("reward_scale",) if config.normalize_rewards else ()
    return functions.bundle("sac", replay=replay, cautions=cautions, unused=unused)


class Memory(NamedTuple):
    """The memory of lanes: the policy's, which is empty, the noise's std and the running return, float32 [B] or ()."""

    network: nets.ActorState
    std: Any
    discounted_return: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _SAC(base.Functions):
    config: SACConfig
    critic_optimizer: update.OptimizerLike
    units: distributions.UnitBox
    values: value_distributions.ValueDistribution

    @property
    def gaussian(self) -> bool:
        return self.config.policy == "gaussian"

    def init(self, key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        policy_key, critic_key = jax.random.split(key)
        params = {"policy": self.network.policy.init(policy_key), "critic": self.network.critic.init(critic_key)}
        targets = {name: params[name] for name in ("critic", "policy") if name == "critic" or self.config.target_policy}
        if self.gaussian:
            params["log_alpha"] = jnp.float32(math.log(self.config.alpha_init))
        opt_state = {name: self._optimizer(name).init(tree, hyper) for name, tree in params.items()}
        aux = jax.tree.map(jnp.copy, targets) | {"statistics": self.config.initial_statistics(self.spec)}
        return LearnerState(params, opt_state, dict(hyper), jnp.int32(0), aux)

    def _optimizer(self, name: str) -> update.OptimizerLike:
        return self.critic_optimizer if name == "critic" else self.optimizer

    def optimized(self, learner: LearnerState) -> list[tuple[ArrayTree, ArrayTree]]:
        return [(learner.params[name], learner.opt_state[name]) for name in learner.params]

    def actor_params(self, learner: LearnerState, progress: jax.Array) -> ActorParams:
        discount = learner.hyper["discount"] if self.config.normalize_rewards else ()
        aux = learner.aux["statistics"].observation, discount
        return ActorParams(learner.params["policy"], learner.num_updates, aux)

    def start(self, lanes: jax.Array, num_lanes: int) -> Memory:
        zeros, config = jnp.zeros(lanes.shape), self.config
        return Memory(
            nets.start(self.network.policy, self.spec, lanes.shape[0]),
            zeros if config.noise[0] < config.noise[1] else (),
            zeros if config.normalize_rewards else (),
        )

    def act(
        self, actor: ActorParams, state: Memory, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, Memory]:
        config, (observation_moments, discount) = self.config, actor.aux
        row = config.with_normalized_observations(timestep, observation_moments)
        outputs, _, network = nets.step(self.network.policy, actor.params, state.network, row)
        state = state._replace(network=network)
        if evaluation:
            return self.units.to_action(jnp.tanh(outputs[..., : self.units.size])), {}, state
        noise_key, random_key, std_key = jax.random.split(key, 3)
        noise = jax.random.normal(noise_key, (*outputs.shape[:-1], self.units.size))
        if self.gaussian:
            action = jnp.tanh(self._law(outputs).sample(noise))
        else:
            low, high = config.noise
            std = jnp.full(noise.shape[:1], low)
            if low < high:
                drawn = jax.random.uniform(std_key, noise.shape[:1], minval=low, maxval=high)
                std = jnp.where(timestep.first, drawn, state.std)
                state = state._replace(std=std)
            action = jnp.tanh(outputs) + std[:, None] * noise
        if config.random_start:
            uniform = jax.random.uniform(random_key, action.shape, minval=-1.0, maxval=1.0)
            action = jnp.where(actor.version == 0, uniform, action)
        extras = {}
        if config.normalize_rewards:
            G = returns.running_return(timestep, discount, state.discounted_return)
            extras, state = {"discounted_return": G}, state._replace(discounted_return=G)
        return self.units.to_action(action), extras, state

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        return delayed.block(self._update, self.config.policy_interval, learner, batch, progress, key)

    def _update(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array, with_policy: bool
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        n = batch.weight.shape[0]
        batch_size = collectives.global_size(n)
        # All networks of this update normalise by statistics that have its samples.
        aux, largest = learner.aux, self.values.largest
        statistics, batch, scale = self.config.normalize_samples(aux["statistics"], batch, largest, learner.hyper)
        learner = learner._replace(aux=aux | {"statistics": statistics})
        # Noise of a' and of a, for every sample before they are divided into chunks.
        noise = distributions.standard_normal(key, (2, n, self.units.size))
        rate = self.learning_rate(learner, progress)
        learner, metrics, priorities = self._learn_critics(learner, (batch, noise[0]), scale, rate, batch_size)
        if with_policy:
            learner, policy_metrics = self._learn_policy(learner, (batch, noise[1]), rate, batch_size)
            metrics = metrics | policy_metrics
        # Targets: t + tau (w - t).
        tau, move = learner.hyper["tau"], ("critic", "policy") if self.config.target_policy else ("critic",)
        targets = {
            name: jax.tree.map(lambda old, new: old + tau * (new - old), learner.aux[name], learner.params[name])
            for name in move
        }
        learner = learner._replace(aux=learner.aux | targets, num_updates=learner.num_updates + 1)
        return learner, metrics, priorities

    def _learn_critics(
        self, learner: LearnerState, batch: Any, scale: jax.Array, rate: jax.Array | None, batch_size: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        """A step of the critics; `batch` is a `Batch` and noise [B, A], and `scale` a factor of rewards."""

        def loss(critic: ArrayTree, samples: Any) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
            batch, noise = samples
            trajectory: Any = batch.trajectory
            target, y = lax.stop_gradient(self._targets(learner, trajectory, scale, noise))
            action = self.units.to_units(trajectory.actions[0])
            outputs = self.network.critic.apply(critic, self._first_row(trajectory), action)
            total, metrics, priority = self.loss(
                outputs, target, y, self.values, learner.hyper, self.config, batch_size
            )
            if self.values.largest is not None:
                outside = (jnp.abs(y) > bins.SLACK * self.values.largest).astype(jnp.float32)
                metrics |= {"value/outside": jnp.sum(jnp.mean(outside, axis=0)) / batch_size}
            return total, (metrics, lax.stop_gradient(priority))

        grads, metrics, priorities = update.gradient(loss, learner.params["critic"], batch)
        learner, norm = self._step(learner, "critic", grads, rate)
        return learner, metrics | {"grad/norm": norm} | update.rate_metric(rate), priorities

    def _targets(
        self, learner: LearnerState, trajectory: Any, scale: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The target [N, B, K] of each critic, and its mean y = R + G (q' - alpha log pi(a' | x_m)), [N, B]."""
        config, hyper = self.config, learner.hyper
        # R, G and m of up to n steps.
        step = returns.transitions(trajectory)
        step = step._replace(reward=scale * step.reward, discount=hyper["discount"] * step.discount)
        R, G, m = returns.n_step_transition(step, config.n_step)
        # a' ~ pi(x_m).
        last = trajectories.row_of_lanes(nets.inputs(self.network.policy, trajectory), m, config.n_step)
        outputs = self._outputs(learner.aux.get("policy", learner.params["policy"]), last)
        if self.gaussian:
            law = self._law(outputs)
            u = law.sample(noise)
            action, cost = jnp.tanh(u), jnp.exp(learner.params["log_alpha"]) * law.log_prob(u)
        else:
            # Target policy smoothing (Fujimoto et al. 2018, section 5.3).
            limit = hyper["target_noise_clip"]
            smoothing = jnp.clip(hyper["target_noise"] * noise, -limit, limit)
            action, cost = jnp.clip(jnp.tanh(outputs) + smoothing, -1.0, 1.0), jnp.zeros(R.shape)
        z = self.network.critic.apply(learner.aux["critic"], last, action)
        q, N = self.values.mean(z), len(z)
        if config.critics == "min":
            # Clipped double Q-learning (Fujimoto et al. 2018, section 4.2): one target for all.
            z, q = value_distributions.least(z, q)[None], jnp.min(q, axis=0, keepdims=True)
        y = R[None] + G[None] * (q - cost[None])
        if self.values.largest is None:
            target = y[..., None]
        else:
            target = jax.vmap(self.values.target, (0, None, None))(z, R - G * cost, G)
        return jnp.broadcast_to(target, (N, *target.shape[1:])), jnp.broadcast_to(y, (N, *y.shape[1:]))

    def _learn_policy(
        self, learner: LearnerState, batch: Any, rate: jax.Array | None, batch_size: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        """A step of the policy, and of alpha; `batch` is a `Batch` and noise [B, A]."""
        names = ("policy", "log_alpha") if self.gaussian else ("policy",)

        def loss(params: ArrayTree, samples: Any) -> tuple[jax.Array, tuple[Metrics, ArrayTree]]:
            batch, noise = samples
            row = self._first_row(batch.trajectory)
            outputs, mean_of = self._outputs(params["policy"], row), lambda x: jnp.sum(x) / batch_size
            u = self._law(outputs).sample(noise) if self.gaussian else outputs
            q = self.values.mean(self.network.critic.apply(learner.params["critic"], row, jnp.tanh(u)))
            least = value_distributions.least(q[..., None], q)[:, 0]
            climbed = least if self.config.critics == "min" else jnp.mean(q, axis=0)
            if not self.gaussian:
                total = -mean_of(climbed)
                return total, ({"loss/policy": total}, ())
            log_prob, alpha = self._law(outputs).log_prob(u), jnp.exp(params["log_alpha"])
            total = mean_of(lax.stop_gradient(alpha) * log_prob - climbed)
            # The entropy that the policy has above its target lowers alpha (section 5, equation 18).
            surplus = -lax.stop_gradient(log_prob) - self.units.size * learner.hyper["target_entropy"]
            metrics = {
                "loss/policy": total,
                "policy/entropy": -mean_of(log_prob),
                "policy/std": mean_of(jnp.mean(jnp.exp(self._law(outputs).log_std), axis=-1)),
                "policy/alpha": alpha * mean_of(jnp.ones_like(log_prob)),
            }
            return total + alpha * mean_of(surplus), (metrics, ())

        grads, metrics, _ = update.gradient(loss, {name: learner.params[name] for name in names}, batch)
        for name, factor in zip(names, ("policy_rate", "alpha_rate")):
            own_rate = None if rate is None else rate * learner.hyper[factor]
            learner, _ = self._step(learner, name, grads[name], own_rate)
        return learner, metrics

    def _step(
        self, learner: LearnerState, name: str, grads: ArrayTree, rate: jax.Array | None
    ) -> tuple[LearnerState, jax.Array]:
        """A step of the optimiser for one of the trees, and the gradient's norm."""
        params, opt_state = learner.params, learner.opt_state
        tree, state, norm = update.step(
            *(self._optimizer(name), grads, opt_state[name], params[name]),
            learning_rate=rate,
            hyper=learner.hyper,
            project=None if name == "log_alpha" else self.network.project,
        )
        return learner._replace(params=params | {name: tree}, opt_state=opt_state | {name: state}), norm

    def _first_row(self, trajectory: Any) -> nets.Inputs:
        return jax.tree.map(lambda x: x[:1], nets.inputs(self.network.policy, trajectory))

    def _outputs(self, policy: ArrayTree, row: nets.Inputs) -> jax.Array:
        """The policy's outputs [B, P] at one row [1, B]."""
        return self.network.policy.apply(policy, row, ())[0][0]

    def _law(self, outputs: jax.Array) -> distributions.TanhGaussian:
        (mean, raw), config = jnp.split(outputs, 2, axis=-1), self.config
        return distributions.TanhGaussian(mean, distributions.bounded_log_std(raw, config.min_std, config.max_std))
