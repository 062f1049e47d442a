"""V-trace actor-critic: IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561).

One gradient step per batch on the sum of three losses (section 4.2): the policy gradient with V-trace advantages, half
the squared error to the V-trace targets, and an entropy bonus. Off-policy corrections are those of table 2.

Deviations from the paper, all of them defaults that a field sets back (`VTraceConfig.atari()` sets them all):

*   Adam with means over the batch as in SEED RL (table 6), instead of RMSProp (eps 0.01) with sums: the learning rate
    then means the same for every batch size. The learning rate is larger because small networks and many lanes like it.
*   A two-layer MLP where observations are not images.
*   Orthogonal weights, small ones for the policy's head, instead of LeCun's, which the authors' code has.
*   The behaviour policy is stored as the log-probability of the action taken, which is all that V-trace needs.

PopArt (`popart`; Hessel et al. 2018) came after the paper and is off by default: see `podracer.learning.popart`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, distributions, nets, returns
from podracer.agents import base
from podracer.learning import popart, update
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.topology import collectives
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    EnvSpec,
    LearnerState,
    Metrics,
    ReplaySpec,
    TimeStep,
    Trajectory,
    task_of,
)

Correction = Literal["vtrace", "one_step", "epsilon", "none"]
RewardTransform = Literal["none", "abs_one", "asymmetric_paper", "asymmetric_code"]

UNUSED: dict[Correction, tuple[str, ...]] = {
    "vtrace": (),
    "one_step": ("rho_bar", "c_bar"),
    "epsilon": ("rho_bar", "c_bar", "rho_bar_pg"),
    "none": ("rho_bar", "c_bar", "rho_bar_pg"),
}
"""The tunable numbers that a correction does not learn by."""


@dataclasses.dataclass(frozen=True)
class VTraceConfig(nets.NetworkConfig, OptimizerConfig):
    """The agent's settings, beside those of `podracer.nets.NetworkConfig` and
    `podracer.learning.optimizer_config.OptimizerConfig`. Paper values are those of tables C.3 and F.1
    (Atari).

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: batch 32).
      rollout_length: T, transitions of a lane in a batch (paper: 20; 100 for DMLab).
      discount: gamma (paper: 0.99).
      learning_rate: of the optimiser (paper: 6e-4).
      learning_rate_schedule: (paper: "linear").
      optimizer: (paper: "rmsprop"; SEED RL: "adam").
      optimizer_eps: of rmsprop inside the root (paper: 0.01, taken as outside: 0.01^2 inside).
      rmsprop_decay: (paper: 0.99).
      momentum: of rmsprop and sgd (paper: 0).
      max_grad_norm: clip by global norm (paper: 40, of summed losses).
      loss_reduction: "sum" over T and B (paper) or "mean" over valid transitions (SEED RL).
      value_cost: weight of the value loss, itself half a squared error (paper: 0.5).
      entropy_cost: weight of the entropy bonus (paper: 0.01).
      trace_lambda: scales the trace coefficients (paper: 1; SEED RL: 0.9 to 1).
      rho_bar: clips the importance ratio of the value's temporal difference (paper: 1).
      c_bar: clips the trace coefficient (paper: 1).
      rho_bar_pg: clips the importance ratio of the policy gradient (paper: 1).
      correction: off-policy correction of table 2: "vtrace"; "one_step" (ratios in the policy gradient only);
        "epsilon" (no ratios, log(pi + 1e-6) in the policy gradient); "none".
      reward_transform: "none"; "abs_one" clips to [-1, 1] (Atari); "asymmetric_paper" is
        0.3 min(tanh r, 0) + 5 max(tanh r, 0); "asymmetric_code" is 5 tanh(r / 5), negatives times 0.3, as in the
        authors' code.
      replay_fraction: of every batch that is drawn from a replay, 0 for none (paper: 0.5 in section 5.2.2).
      replay_capacity: rows that are kept at least, over all devices; the oldest go first (paper: 10,000 trajectories of
        T rows).
      popart: True learns values in units of each task's targets, by a value head for each task (Hessel et al.
        2018; `podracer.learning.popart`). Rewards are then not transformed. It may cost another pass forward.
      popart_step_size: beta of its statistics (Hessel et al. 2018: 3e-4).
      core: see `podracer.nets.NetworkConfig` (paper: none, or an LSTM of 256).
      init: of weights: "orthogonal", small ones for the policy's head, or "lecun", uniform ones for heads too (the
        authors' code: LeCun's normal ones). Small weights of the head keep the policy's gradient from the torso.
      evaluation_policy: "mode", the most likely actions, or "sample", as in training (the authors' code). Greedy
        policies and exports take the mode.
    """

    envs_per_device: int = configs.field(32, low=1)
    rollout_length: int = configs.field(20, low=1)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    learning_rate: float = configs.field(2e-3, low=0.0, tunable=True)
    optimizer_eps: float = configs.field(1e-5, low=1e-30, tunable=True)
    rmsprop_decay: float = configs.field(0.99, low=0.0, high=1.0)
    momentum: float = configs.field(0.0, low=0.0, high=1.0)
    max_grad_norm: float = configs.field(1.0, low=0.0, tunable=True)
    loss_reduction: Literal["sum", "mean"] = "mean"
    value_cost: float = configs.field(0.5, low=0.0, tunable=True)
    entropy_cost: float = configs.field(0.01, low=0.0, tunable=True)
    trace_lambda: float = configs.field(1.0, low=0.0, high=1.0, tunable=True)
    rho_bar: float = configs.field(1.0, low=0.0, tunable=True)
    c_bar: float = configs.field(1.0, low=0.0, tunable=True)
    rho_bar_pg: float = configs.field(1.0, low=0.0, tunable=True)
    correction: Correction = "vtrace"
    reward_transform: RewardTransform = "none"
    replay_fraction: float = configs.field(0.0, low=0.0, high=0.5)
    replay_capacity: int = configs.field(200_000, low=1)
    popart: bool = False
    popart_step_size: float = configs.field(3e-4, low=0.0, high=0.5)
    init: Literal["orthogonal", "lecun"] = "orthogonal"
    evaluation_policy: base.EvaluationPolicy = "mode"

    def __post_init__(self):
        super().__post_init__()
        if not self.popart:
            configs.require_defaults(self, ("popart_step_size",), "is of popart=True")
        if not self.replay_fraction:
            configs.require_defaults(self, ("replay_capacity",), "is of a replay, which replay_fraction=0 does without")
        if self.popart and self.reward_transform != "none":
            raise ValueError(
                f"popart=True learns the scale of rewards, which reward_transform={self.reward_transform!r} hides; use "
                "reward_transform='none'."
            )

    @classmethod
    def atari(cls, **overrides) -> VTraceConfig:
        """The paper's Atari configuration (table F.1), feed-forward."""
        paper = {
            "envs_per_device": 32,
            "learning_rate": 6e-4,
            "optimizer": "rmsprop",
            # The paper's 0.01, outside the root. Inside it, as TensorFlow has it, the small gradients of "shallow" are
            # all but ignored (docs/adr/0046-rmsprop-of-impala.md).
            "optimizer_eps": 0.01**2,
            "max_grad_norm": 40.0,
            "loss_reduction": "sum",
            "reward_transform": "abs_one",
            "evaluation_policy": "sample",
            "frame_stack": 4,
            "torso": "shallow",
            "init": "lecun",
        }
        return cls(**(paper | overrides))


def transform_reward(reward: jax.Array, name: RewardTransform) -> jax.Array:
    """Squashes rewards (IMPALA, appendix C and F); see `VTraceConfig.reward_transform`."""
    if name == "abs_one":
        return jnp.clip(reward, -1.0, 1.0)
    if name == "asymmetric_paper":
        squashed = jnp.tanh(reward)
        return 0.3 * jnp.minimum(squashed, 0.0) + 5.0 * jnp.maximum(squashed, 0.0)
    if name == "asymmetric_code":
        squashed = jnp.tanh(reward / 5.0)
        return 5.0 * jnp.where(reward < 0, 0.3 * squashed, squashed)
    return reward


def importance_ratios(
    outputs: jax.Array, trajectory: Trajectory, distribution: distributions.Distribution
) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probabilities of the actions, and their ratios to the actor's without a gradient, [T, B]."""
    # Importance ratios of the learner's policy pi to the actor's mu (section 4.1).
    samples = trajectory.extras.get("sample", trajectory.actions)
    log_probs = distribution.log_prob(outputs[:-1], samples)
    return log_probs, jnp.exp(lax.stop_gradient(log_probs) - trajectory.extras["log_prob"])


def corrected_returns(
    values: jax.Array,
    step: returns.Transitions,
    ratios: jax.Array,
    hyper: dict[str, jax.Array],
    config: VTraceConfig,
) -> returns.VTraceReturns:
    """`returns.vtrace` by the settings, on-policy where `correction` is another; arguments as there."""
    corrected = config.correction == "vtrace"
    return returns.vtrace(
        values,
        step,
        ratios if corrected else jnp.ones_like(ratios),
        lambda_=hyper["trace_lambda"],
        rho_bar=hyper["rho_bar"] if corrected else 1.0,
        c_bar=hyper["c_bar"] if corrected else 1.0,
        rho_bar_pg=hyper["rho_bar_pg"] if corrected else 1.0,
    )


def loss(
    outputs: jax.Array,
    values: jax.Array,
    trajectory: Trajectory,
    distribution: distributions.Distribution,
    hyper: dict[str, jax.Array],
    config: VTraceConfig,
    count: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some lanes: the sums over all lanes are those of the batch.

    Args:
      outputs: [T+1, B, P] policy outputs of the learner's parameters.
      values: [T+1, B].
      trajectory: [T, B] transitions; rewards already transformed.
      distribution: of the action space.
      hyper: tunable numbers.
      config: the static settings.
      count: valid transitions of all lanes of all shards, at least 1.

    Returns:
      The scalar and the metrics.
    """
    step = returns.transitions(trajectory)
    step = step._replace(discount=hyper["discount"] * step.discount)
    log_probs, ratios = importance_ratios(outputs, trajectory, distribution)

    # V-trace targets v_s (equation 1) and advantages r_s + gamma v_{s+1} - V(x_s) (section 4.2).
    corrections = corrected_returns(lax.stop_gradient(values), step, ratios, hyper, config)

    # The other corrections of table 2.
    advantages = corrections.advantages
    if config.correction == "one_step":
        advantages = advantages * jnp.minimum(hyper["rho_bar_pg"], ratios)
    if config.correction == "epsilon":
        log_probs = jnp.log(jnp.exp(log_probs) + 1e-6)

    # The policy gradient, the value's squared error and the entropy bonus (section 4.2).
    entropies = distribution.entropy(outputs[:-1])
    weights = step.mask if config.loss_reduction == "sum" else step.mask / count
    valid = lambda x: jnp.where(step.mask > 0, x, 0.0)  # noqa: E731
    terms = {
        "loss/policy": weights * log_probs * advantages,
        "loss/value": weights * jnp.square(corrections.targets - values[:-1]),
        "entropy": weights * entropies,
        "policy/entropy": valid(entropies),
        # As the value's targets are made of them: unclipped, one may be infinite while the loss is sound.
        "policy/importance_ratio": valid(jnp.minimum(hyper.get("rho_bar", config.rho_bar), ratios)),
        "value/mean": valid(values[:-1]),
    }
    sums = dict(zip(terms, collectives.local_sums(list(terms.values()))))
    policy, value, entropy = -sums["loss/policy"], 0.5 * sums["loss/value"], sums["entropy"]
    total = policy + hyper["value_cost"] * value - hyper["entropy_cost"] * entropy
    means = ("policy/entropy", "policy/importance_ratio", "value/mean")
    metrics = {"loss/total": total, "loss/policy": policy, "loss/value": value}
    metrics |= {name: sums[name] / count for name in means}
    return total, metrics


@base.maker("vtrace", VTraceConfig, loss)
def make(
    spec: EnvSpec, config: VTraceConfig, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The V-trace agent for an environment; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space, torso or network that does not fit the environment, or a number of another
        optimiser.
    """
    distribution = distributions.for_space(spec.action_space)
    if config.popart and network is not None:
        raise ValueError(
            "popart=True moves the weights of the value head, which it cannot find in a network of your own; leave "
            "network out, or use popart=False."
        )
    num_values = max(1, len(spec.tasks)) if config.popart else None
    network = config.actor_critic("vtrace", spec, network, num_values=num_values, init=config.init)
    config.check_numbers(optimizer, ("rmsprop_decay",), ("rmsprop", "centred_rmsprop"))
    config.check_numbers(optimizer, ("momentum",), ("rmsprop", "centred_rmsprop", "sgd"))
    rule = config.make_optimizer(optimizer, decay=config.rmsprop_decay, momentum=config.momentum)
    replay = ReplaySpec(
        capacity=-(-config.replay_capacity // config.rollout_length),
        length=config.rollout_length + 1,
        fraction=config.replay_fraction,
        **nets.frame_context(config.frame_stack),
    )
    functions = _VTrace(spec, config, network, rule, loss, distribution)
    unused = UNUSED[config.correction]
    return functions.bundle("vtrace", replay=replay if config.replay_fraction else None, unused=unused)


@dataclasses.dataclass(frozen=True, eq=False)
class _VTrace(base.PolicyFunctions):
    config: VTraceConfig

    def aux(self, params: ArrayTree) -> ArrayTree:
        return popart.initial(max(1, len(self.spec.tasks))) if self.config.popart else ()

    def play(
        self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, mode: bool
    ) -> tuple[Any, Any, nets.ActorState]:
        # The behaviour policy mu, with the parameters that were published last.
        outputs, _, state = nets.step(self.network, actor.params, state, self._with_rewards(timestep))
        action, extras = self.distribution.act(outputs, key, mode)
        return action, extras, state.after(action)

    def learn(
        self, learner: LearnerState, trajectory: Trajectory, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        of_values: Metrics = {}
        if self.config.popart:
            learner, of_values = self._follow_targets(learner, trajectory)
        loss, trajectory = self._loss_of_lanes(learner, trajectory)
        # One gradient step a batch.
        rate = self.learning_rate(learner, progress)
        num_rows, independent = self.config.rollout_length, not self.network.recurrent
        learner, metrics, _ = self.update(loss, learner, trajectory, rate, num_rows=num_rows, independent=independent)
        return learner, metrics | of_values | update.rate_metric(rate)

    def batch_loss(
        self, params: ArrayTree, learner: LearnerState, trajectory: Trajectory, progress: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        loss, trajectory = self._loss_of_lanes(learner, trajectory)
        total, (metrics, _) = loss(params, trajectory)
        return total, metrics

    def _loss_of_lanes(self, learner: LearnerState, trajectory: Trajectory) -> tuple[update.Loss, Trajectory]:
        """The loss of some lanes of a trajectory, and the trajectory as it takes it."""
        trajectory = trajectory._replace(timesteps=self._with_rewards(trajectory.timesteps))
        count = jnp.maximum(collectives.global_sum(jnp.sum(returns.transitions(trajectory).mask)), 1.0)

        def loss(params: ArrayTree, trajectory: Trajectory) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
            # pi and V of all rows, by the parameters that are learnt.
            outputs, values = nets.unroll(self.network, params, trajectory)
            if self.config.popart:
                values, trajectory = self._in_units_of_targets(values, trajectory, learner)
            total, metrics = self.loss(
                outputs, values, trajectory, self.distribution, learner.hyper, self.config, count
            )
            return total, (metrics, ())

        return loss, trajectory

    def _follow_targets(self, learner: LearnerState, trajectory: Trajectory) -> tuple[LearnerState, Metrics]:
        """PopArt before the gradient step: statistics of this batch too, and the head of the same values.

        Returns:
          The learner with them, and the metric of V, which the loss does not see.
        """
        outputs, normalized = nets.unroll(self.network, learner.params, trajectory)
        task = task_of(trajectory.lane, len(self.spec.tasks))
        values = popart.unnormalize(popart.select(normalized, task), learner.aux, task)
        step = returns.transitions(trajectory)
        mean = collectives.global_mean(values[:-1], step.mask)
        step = step._replace(discount=learner.hyper["discount"] * step.discount)
        _, ratios = importance_ratios(outputs, trajectory, self.distribution)
        targets = corrected_returns(values, step, ratios, learner.hyper, self.config).targets
        statistics = popart.update(learner.aux, targets, step.mask, task, self.config.popart_step_size)
        head = popart.preserve(nets.value_head(learner.params), learner.aux, statistics)
        learner = learner._replace(params=nets.with_value_head(learner.params, head), aux=statistics)
        return learner, {"value/mean": mean}

    def _in_units_of_targets(
        self, outputs: jax.Array, trajectory: Trajectory, learner: LearnerState
    ) -> tuple[jax.Array, Trajectory]:
        """The values n of each lane's task, and rewards in their units: the loss is then that of (G - mu) / sigma."""
        task, rows = task_of(trajectory.lane, len(self.spec.tasks)), trajectory.timesteps
        discount = learner.hyper["discount"] * rows.discount
        reward = popart.normalize_rewards(rows.reward, discount, learner.aux, task)
        return popart.select(outputs, task), trajectory._replace(timesteps=rows._replace(reward=reward))

    def _with_rewards(self, timesteps: TimeStep) -> TimeStep:
        return timesteps._replace(reward=transform_reward(timesteps.reward, self.config.reward_transform))
