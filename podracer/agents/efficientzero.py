"""EfficientZero (Ye et al. 2021): MuZero for few environment steps, with either driver.

    act      s_0 = h(o); a search over f and g from s_0 gives the policy pi and the value nu
    learn    s_0 = h(o_0), s_k = g(s_{k-1}, a_{k-1}); at each k the model's prefix, value, policy and forecast are
             moved to P_k, z_k, pi_k and the projection of h(o_k)

    P_k = r_b + ... + r_k, since step b of the horizon that k is in
    z_k = r_{k+1} + d r_{k+2} + ... + d^m V(o_{k+m}), of fewer rewards the older they are

Samples are reanalysed before each update: a new search gives the policy, and the target network gives V, because
recorded ones go stale.

Where we differ from the authors' code (YeWR/EfficientZero at 468bb03): an episode that was cut bootstraps; frames are
kept as they were; stacks of frames begin with zeros; the target network lags by 0 to one interval, and not by one to
two; the last state is not learnt twice. Each fault found there has a regression test here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, spaces
from podracer.agents import base
from podracer.learning import augmentation, lars, update
from podracer.learning import optimizer as optimizers
from podracer.learning.bins import Bins, caution, largest_return
from podracer.search import planning, prefix_models, reanalysis, search, windows, world_models
from podracer.topology import collectives
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    Batch,
    EnvSpec,
    LearnerState,
    Metrics,
    TimeStep,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class EfficientZeroConfig(search.AgentSettings, prefix_models.Sizes):
    """The agent's settings, beside those of the bases. Paper values are those of Ye et al. 2021 for Atari-100k.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 4 to 8).
      rollout_length: T, rows of a lane between one round of updates and the next.
      least_range: the smallest range of a node's values that puct, and gumbel's sigma, scale to [0, 1] (paper: 0.01).
      unroll_length: K, steps of the model that are learnt from each sample (paper: 5).
      horizon: H, steps after which a prefix begins anew (paper: 5); 1 predicts every reward.
      n_step: n, rewards in a value's target at most (paper: 5).
      correction_interval: transitions of age by which targets have a reward less, 0 for never (paper: 0.3 of the run).
      discount: gamma (paper: 0.997^4).
      max_value: the largest value or prefix that can be told apart from larger ones. None for the largest of rewards in
        [-1, 1], 1 / (1 - discount), at most 1,000, or H, by the discount of the config even where others are tuned.
      termination_cost: weight of the loss of terminations, which the model predicts above 0; see `MuZeroConfig`.
      value_cost: weight of the value's loss (paper: 0.25).
      consistency_cost: weight of the consistency loss (paper: 2).
      augment: whether images are shifted, by 4 pixels of 84 at most, and made brighter or darker before learning.
      batch_size: samples per update, over all devices (paper: 256).
      replay_ratio: rows sampled to learn from per row added (paper: 256); a sample is the one row where it begins.
      replay_capacity: rows that are kept at least, over all devices (paper: all).
      replay_min_size: rows before the first update, in which actions are drawn at random (paper: 2,000).
      priority_exponent: alpha, 0 to replay all alike (paper: 0.6).
      importance_exponent: beta at the beginning; it rises to 1 (paper: 0.4).
      refresh_interval: updates in which all priorities are renewed by one set of parameters (Mei et al. 2023: 10), a
        multiple of `reanalyse_group`; 0 takes those of samples as they are learnt from (paper).
      reanalyse: part of the samples whose policies are renewed by a search, and values by the network, of parameters
        that are at most `target_interval` updates old (paper: 0.99 of policies, all values).
      value_target: source of renewed values: the "network" (the authors' code), or a "search" from every row (paper).
      reanalyse_group: G updates whose samples are drawn and reanalysed at once. G divides `target_interval`.
      target_interval: updates between copies of the parameters for it (paper: 200).
      optimizer: "sgd" with momentum 0.9 (paper), "clipped_lars" (Mei et al. 2023), or see `optimizer.make`.
      optimizer_eps: the epsilon of Adam, AdamW and Muon.
      weight_decay: see `OptimizerConfig`.
      learning_rate: (paper: 0.2).
      warmup_updates: over which it rises from 0 (paper: 1,000).
      final_scale: of the learning rate in updates after the last step, `final_updates` (paper: 0.1).
      l2_cost: c of a loss c |params|^2, whose gradient joins the loss's after the clip by norm; Clipped LARS has 2 c as
        its decay beta. 0, the default, is no decay, with Clipped LARS too (paper: 0.00005).
      lars_eta: the largest step of an array by its norm, with Clipped LARS (Mei et al.: 0.03, 0.01 or 0.005).
      lars_start: updates before which it is SGD with momentum (Mei et al.: 600).
      max_grad_norm: clip by global norm, inf for none (paper: 5).
      clip_rewards: to [-1, 1].
      frame_stack: how many of the newest observations the model sees (paper: 4).
    """

    envs_per_device: int = configs.field(16, low=1)
    rollout_length: int = configs.field(8, low=1)
    least_range: float = configs.field(0.01, low=1e-8)
    unroll_length: int = configs.field(5, low=1)
    horizon: int = configs.field(5, low=1)
    n_step: int = configs.field(5, low=1)
    correction_interval: int = configs.field(20_000, low=0)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    max_value: float | None = configs.field(None, low=1e-6)
    termination_cost: float = configs.field(0.0, low=0.0)
    value_cost: float = configs.field(0.25, low=0.0, tunable=True)
    consistency_cost: float = configs.field(2.0, low=0.0, tunable=True)
    augment: bool = True
    batch_size: int = configs.field(64, low=1)
    replay_ratio: float = configs.field(16.0, low=1e-4)
    replay_capacity: int = configs.field(100_000, low=1)
    replay_min_size: int = configs.field(500, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    priority_exponent: float = configs.field(0.6, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.4, low=0.0, high=1.0)
    refresh_interval: int = configs.field(0, low=0)
    reanalyse: float = configs.field(1.0, low=0.0, high=1.0)
    value_target: Literal["network", "search"] = "network"
    reanalyse_group: int = configs.field(1, low=1)
    target_interval: int = configs.field(100, low=1)
    optimizer: Literal["adam", "sgd", "adamw", "muon", "clipped_lars"] = "adam"
    optimizer_eps: float = configs.field(1e-8, low=1e-30, tunable=True)
    weight_decay: float = configs.field(1e-2, low=0.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    warmup_updates: int = configs.field(0, low=0)
    final_scale: float = configs.field(1.0, low=0.0)
    l2_cost: float = configs.field(0.0, low=0.0)
    lars_eta: float = configs.field(0.03, low=0.0)
    lars_start: int = configs.field(600, low=0)
    max_grad_norm: float = configs.field(5.0, low=0.0, tunable=True)
    clip_rewards: bool = False
    frame_stack: int = configs.field(1, low=1)

    def __post_init__(self):
        super().__post_init__()
        G, reasons = self.reanalyse_group, ("the updates of a group have one target", "the parts of a sweep are groups")
        for name, reason in zip(("target_interval", "refresh_interval"), reasons):
            if getattr(self, name) % G:
                raise ValueError(f"reanalyse_group={G} must divide {name}={getattr(self, name)}, so that {reason}.")


class Aux(NamedTuple):
    """The learner's state beside its parameters; () where there is none.

    Attributes:
      statistics: of batch normalisation.
      target: older parameters and statistics, which reanalyse.
      sweep: older parameters and statistics, by which priorities are refreshed.
    """

    statistics: ArrayTree
    target: tuple[ArrayTree, ArrayTree] | tuple[()]
    sweep: tuple[ArrayTree, ArrayTree] | tuple[()]


def loss(
    predictions: prefix_models.Predictions,
    projections: jax.Array,
    target: windows.Targets,
    weight: jax.Array,
    bins: Bins,
    hyper: Mapping[str, jax.Array],
    config: EfficientZeroConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some samples: the sums over all samples are those of the batch.

    Args:
      predictions: policies and values [K + 1, B, ...] of the model's states 0 to K, and prefixes and forecasts
        [K, B, ...] of states 1 to K.
      projections: [K, B, F]; of the observations at rows 1 to K.
      target: of the predictions.
      weight: float32 [B]; importance weights.
      bins: the bins that represent prefixes and values.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.
    """
    K, valid = len(predictions.prefix), target.valid
    sums = {
        # Value prefixes (section 4.2).
        "prefix": valid[1:] * bins.cross_entropy(predictions.prefix, target.reward[1:]),
        "value": valid * bins.cross_entropy(predictions.value, target.value),
        "policy": -target.acted * jnp.sum(target.policy * jax.nn.log_softmax(predictions.policy), axis=-1),
        # The cosine loss of the self-supervised consistency (section 4.1).
        "consistency": valid[1:] * prefix_models.cosine_loss(predictions.forecast, projections),
    }
    if config.termination_cost:
        sums["termination"] = valid[1:] * windows.termination_loss(predictions.termination, target.ended[1:])
    mean = lambda x: jnp.sum(weight * jnp.sum(x, axis=0)) / (K * batch_size)  # noqa: E731
    metrics = {f"loss/{name}": mean(x) for name, x in sums.items()}
    total = metrics["loss/prefix"] + hyper["value_cost"] * metrics["loss/value"] + metrics["loss/policy"]
    total += hyper["consistency_cost"] * metrics["loss/consistency"]
    if config.termination_cost:
        total += config.termination_cost * metrics["loss/termination"]
    metrics["policy/target_entropy"] = jnp.sum(jax.scipy.special.entr(target.policy[0])) / batch_size
    metrics["value/target_mean"] = jnp.sum(target.value[0]) / batch_size
    return total, metrics | {"loss/total": total}


@base.maker("efficientzero", EfficientZeroConfig, loss)
def make(
    spec: EnvSpec,
    config: EfficientZeroConfig,
    network: prefix_models.PrefixModel | None,
    loss: base.LossFn,
    optimizer: optimizers.Own | None,
) -> Agent:
    """The EfficientZero agent for an environment with discrete actions; see `podracer.agents` for the arguments.

    Raises:
      ValueError: for an action space, or a model (`podracer.search.prefix_models.PrefixModel`), that does not fit.
    """
    base.check_discrete(spec, "efficientzero")
    stacked = nets.stacked_spec(spec, config.frame_stack)
    world_models.check_terminations(config.termination_cost, network, network is not None and network.terminations)
    model = network or prefix_models.make(stacked, config, terminations=config.termination_cost > 0)
    augments = config.augment and world_models.chosen_torso(stacked, config.torso) == "convolutions"
    bins, rule, plan = _bins(config), _optimizer(config, optimizer), planner(spec, config, model)
    functions = _EfficientZero(spec, config, model, rule, loss, plan, bins, augments)
    others: dict[str, Any] = {"cautions": (caution(bins.largest, "set max_value to the largest return"),)}
    if config.reanalyse:
        others |= {"target_params": functions.target_params, "reanalyse": functions.reanalyse}
    if config.refresh_interval:
        others |= {"refresh_params": functions.refresh_params, "refresh": functions.refresh}
    # Prioritised replay of windows that begin at any row; beta rises to 1.
    K, n, beta = config.unroll_length, config.n_step, config.importance_exponent
    replay = base.replay_of_rows(
        config,
        K + n + 2,  # one more than it takes, for the last row of a sequence comes without extras
        observation_rows=K + n + 1 if config.reanalyse else K + 1,
        updates_per_draw=config.reanalyse_group,
        refresh_interval=config.refresh_interval,
        reach=n,
        target_interval=config.target_interval if config.reanalyse else 0,
        priority_exponent=config.priority_exponent,
        importance_exponent=lambda progress: beta + (1.0 - beta) * progress if beta else jnp.float32(0),
        **nets.frame_context(config.frame_stack),
    )
    return functions.bundle("efficientzero", replay=replay, **others)


@dataclasses.dataclass(frozen=True, eq=False)
class _EfficientZero(base.Functions):
    config: EfficientZeroConfig
    network: prefix_models.PrefixModel
    planner: search.Planner
    bins: Bins
    augments: bool

    def init(self, key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        example = jax.tree.map(lambda x: x[None], spaces.zeros(self.planner.space))
        params, statistics = self.network.init(key, example)
        copy = lambda wanted: jax.tree.map(jnp.copy, (params, statistics)) if wanted else ()  # noqa: E731
        aux = Aux(statistics, target=copy(self.config.reanalyse), sweep=copy(self.config.refresh_interval))
        return update.init(params, self.optimizer, hyper, aux)

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> dict[str, Any]:
        numbers = {"temperature": planning.temperature(progress), "discount": learner.hyper["discount"]}
        return numbers | {"statistics": learner.aux.statistics}

    def act(
        self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        # Before the first update, a search is no better than any action.
        return planning.act(self.planner, actor, state, timestep, key, evaluation, at_random=actor.version == 0)

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        config, B = self.config, batch.weight.shape[0]
        batch_size = collectives.global_size(B)
        # One change of the unrolled image and one of those that are compared with it, for all rows of a sample.
        size = self.planner.space.shape[:2] if self.augments else (0, 0)  # type: ignore[union-attr]
        changes = [augmentation.draw(k, B, size) for k in jax.random.split(key)]

        def loss(params: ArrayTree, part: tuple[Batch, Any]) -> tuple[jax.Array, tuple[Metrics, Any]]:
            batch, changes = part
            predictions, projections, statistics = self._unroll(params, learner.aux.statistics, batch, changes)
            # Targets P_k, z_k and pi_k.
            target = jax.tree.map(lax.stop_gradient, _targets(learner.hyper["discount"], batch, config))
            total, metrics = self.loss(
                predictions, projections, target, batch.weight, self.bins, learner.hyper, config, batch_size
            )
            # Priorities |nu - z|.
            value = lax.stop_gradient(self.bins.expectation(predictions.value[0]))
            error, std = jnp.abs(value - target.value[0]), prefix_models.projection_std(lax.stop_gradient(projections))
            metrics |= {
                "value/mean": jnp.sum(value) / batch_size,
                "value/error": jnp.sum(error) / batch_size,
                "value/outside": jnp.sum(windows.outside(target, self.bins)) / batch_size,
                "consistency/std": std * len(error) / batch_size,
            }
            return total, (metrics, (error, statistics))

        # The step; batch normalisation has to see all samples of a shard.
        rate = self.learning_rate(learner, progress)
        num_rows, batch_norm = 2 * config.unroll_length + 1, bool(jax.tree.leaves(learner.aux.statistics))
        learner, metrics, (errors, statistics) = self.update(
            loss, learner, (batch, changes), rate, num_rows=num_rows, unrolled=True, together=batch_norm
        )
        # Copies for reanalysis (section 4.3) and for the next sweep of priorities (Mei et al. 2023).
        statistics = collectives.global_average(statistics)
        current, (_, target, sweep) = (learner.params, statistics), learner.aux
        if target:
            target = update.copy_target(learner, config.target_interval, current, target)
        if sweep:
            sweep = update.copy_target(learner, config.refresh_interval, current, sweep)
        return learner._replace(aux=Aux(statistics, target, sweep)), metrics, errors

    def learning_rate(self, learner: LearnerState, progress: jax.Array) -> jax.Array | None:
        """The tunable number, which rises over the warm-up and is smaller in the updates after the last step."""
        if "learning_rate" not in learner.hyper:
            return None
        rate = learner.hyper["learning_rate"] * jnp.where(progress < 1, 1.0, self.config.final_scale)
        if self.config.warmup_updates:
            number = (learner.num_updates + 1).astype(jnp.float32)
            rate *= jnp.minimum(1.0, number / self.config.warmup_updates)
        return rate

    def _unroll(
        self, params: ArrayTree, statistics: ArrayTree, batch: Batch, changes: Any
    ) -> tuple[prefix_models.Predictions, jax.Array, ArrayTree]:
        """Predictions of the model's states 0 to K, projections [K, B, F] of rows 1 to K, and statistics."""
        K = self.config.unroll_length
        timesteps = jax.tree.map(lambda x: x[: K + 1], batch.trajectory.timesteps)
        stacked = nets.inputs(nets.FRAME_STACKER, batch.trajectory._replace(timesteps=timesteps)).observation
        # o_0, which is unrolled from, and o_1 to o_K; both augmented (appendix A).
        first, later = (jax.tree.map(lambda x, at=at: x[at], stacked) for at in (slice(1), slice(1, None)))
        if self.augments:
            first, later = (world_models.with_channels(x, 2) for x in (first, later))
            first, later = augmentation.apply(changes[0], first), augmentation.apply(changes[1], later)
        actions = batch.trajectory.actions[:K]
        # s_0 = h(o_0), s_k = g(s_{k-1}, a_{k-1}) with its predictions, and the projections of h(o_k) (section 4.1).
        return prefix_models.unroll(self.network, params, statistics, first, later, actions, self.config.horizon)

    def target_params(self, learner: LearnerState, progress: jax.Array) -> ActorParams:
        return self._copy_params(learner, learner.aux.target, self.config.target_interval, progress)

    def refresh_params(self, learner: LearnerState, progress: jax.Array) -> ActorParams:
        return self._copy_params(learner, learner.aux.sweep, self.config.refresh_interval, progress)

    def _copy_params(self, learner: LearnerState, copy: Any, interval: int, progress: jax.Array) -> ActorParams:
        """Parameters as they were when they were copied last."""
        params, statistics = copy
        num_updates, aux = learner.num_updates // interval * interval, learner.aux._replace(statistics=statistics)
        return self.actor_params(learner._replace(params=params, num_updates=num_updates, aux=aux), progress)

    def reanalyse(self, actor: ActorParams, batch: Batch, key: jax.Array) -> Batch:
        # Policies by a new search, values by the network or from the search of every row (section 4.3).
        config, unrolled = self.config, self.config.unroll_length + 1
        value_rows = unrolled + config.n_step
        policy_rows = unrolled if config.value_target == "network" else value_rows
        counts = {"policy_rows": policy_rows, "value_rows": value_rows, "observation_rows": unrolled}
        return reanalysis.reanalyse(self.planner, actor, batch, key, part=config.reanalyse, **counts)

    def refresh(self, actor: ActorParams, trajectory: Trajectory, age: jax.Array) -> jax.Array:
        # Priorities |V - z| of all rows by one set of parameters (Mei et al. 2023).
        n = self.config.n_step
        stacked = nets.inputs(nets.FRAME_STACKER, trajectory).observation
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)
        root = self.planner.model.root(self.planner.variables(actor), flat)
        value = root.value.reshape(trajectory.timesteps.reward.shape)
        step = windows.transitions(trajectory.timesteps, actor.aux["discount"], self.config.clip_rewards)
        num_rewards = jnp.pad(windows.rewards_in_values(age, self.config), ((0, n), (0, 0)), mode="edge")
        return windows.errors(step, trajectory.timesteps.discount, value, n, num_rewards)[: len(age)]


def _bins(config: EfficientZeroConfig) -> Bins:
    """The bins of value prefixes and values."""
    largest = max(largest_return(config.discount), config.horizon)
    return Bins(config.num_bins, largest if config.max_value is None else config.max_value)


def _optimizer(config: EfficientZeroConfig, own: optimizers.Own | None = None) -> update.OptimizerLike:
    if own is None and config.optimizer == "clipped_lars":
        decay = 2.0 * config.l2_cost  # the gradient of c |params|^2
        return lars.ClippedLARS(prefix_models.last_kernels, config.lars_start, config.lars_eta, decay=decay)
    scheduled = config.warmup_updates > 0 or config.final_scale != 1.0
    remedy = "warmup_updates=0, final_scale=1" if scheduled else ""
    rule = optimizers.make(config.optimizer, momentum=0.9) if own is None else optimizers.of(own, remedy)  # type: ignore[arg-type]
    return rule._replace(l2_cost=config.l2_cost, l2_clipped=False)


def planner(
    spec: EnvSpec, config: EfficientZeroConfig, network: prefix_models.PrefixModel | None = None
) -> search.Planner:
    """The agent's search in its model (the config's if None), of parameters, statistics and gamma."""
    stacked, expectation = nets.stacked_spec(spec, config.frame_stack), _bins(config).expectation
    model = network or prefix_models.make(stacked, config, terminations=config.termination_cost > 0)
    return search.Planner(
        stacked.observation_space,
        prefix_models.searched(model, expectation, stacked, config.horizon),
        lambda actor: (actor.params, actor.aux["statistics"], actor.aux["discount"]),
        search.settings(config, epsilon=config.least_range),
    )


def _targets(discount: jax.Array, batch: Batch, config: EfficientZeroConfig) -> windows.Targets:
    # Prefixes P_k of each horizon (section 4.2), and values z_k of fewer rewards for older samples (section 4.3).
    num_rewards, horizon = windows.rewards_in_values(batch.age, config), config.horizon
    return windows.of_trajectory(batch.trajectory, discount, config, rewards_in_values=num_rewards, horizon=horizon)
