"""EfficientZero (Ye et al. 2021): MuZero for few environment steps, with either driver.

    act      s_0 = h(o); a search over f and g from s_0 says the policy pi and the value nu
    learn    s_0 = h(o_0), s_k = g(s_{k-1}, a_{k-1}); at each k the model's prefix, value, policy and forecast are
             moved to P_k, z_k, pi_k and the projection of h(o_k)

    P_k = r_b + ... + r_k, since step b of the horizon that k is in
    z_k = r_{k+1} + d r_{k+2} + ... + d^m V(o_{k+m}), of fewer rewards the older they are

Before samples are learnt from, their policies are searched for again and V is the target network's: what once was done
in them says less and less of what should be.

Where we differ from the authors' code (YeWR/EfficientZero at 468bb03): an episode that was cut bootstraps; frames are
kept as they were; stacks of frames begin with zeros; the target network lags by 0 to one interval, and not by one to
two; the last state is not learnt twice. Its faults are tests of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, spaces, trajectories
from podracer.learning import augmentation, gradients, lars, optimizer
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
    Replay,
    TimeStep,
    Trajectory,
    check_one_player,
)


@dataclasses.dataclass(frozen=True)
class EfficientZeroConfig(search.Settings, prefix_models.Sizes):
    """The agent's settings, beside those of `search.Settings` and `prefix_models.Sizes`. Paper values are
    those of Ye et al. 2021 for Atari with 100,000 steps.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 4 to 8).
      rollout_length: T, rows of a lane between one round of updates and the next.
      least_range: of the values in a tree, that puct scales to [0, 1]; less is taken for no difference (paper: 0.01).
      unroll_length: K, steps of the model that are learnt from each sample (paper: 5).
      horizon: H, steps after which a prefix begins anew (paper: 5); 1 says every reward.
      n_step: n, rewards in a value's target at most (paper: 5).
      correction_interval: transitions by which experience ages until its targets have a reward less, 0 for never
        (paper: 0.3 of the run's).
      discount: gamma (paper: 0.997^4).
      max_value: the largest value or prefix that can be told apart from larger ones. None for what rewards within
        [-1, 1] can come to, 1 / (1 - discount) or H, with the discount of the config also where others are tuned.
      value_cost: weight of the value's loss (paper: 0.25).
      consistency_cost: weight of what forecasts lack (paper: 2).
      augment: whether images are shifted, by 4 pixels of 84 at most, and made brighter or darker before learning.
      batch_size: samples per update, over all devices (paper: 256).
      samples_per_row: how often a row is sampled to begin with, on average (paper: 256).
      replay_capacity: rows that are kept at least, over all devices (paper: all).
      replay_min_size: rows before the first update, in which actions are drawn at random (paper: 2,000).
      priority_exponent: alpha, 0 to replay all alike (paper: 0.6).
      importance_exponent: beta at the beginning; it rises to 1 (paper: 0.4).
      refresh_interval: updates in which all priorities are renewed by one set of parameters (Mei et al. 2023: 10), a
        multiple of `reanalyse_group`; 0 takes those of samples as they are learnt from (paper).
      reanalyse: part of the samples whose policies are renewed by a search, and values by the network, of parameters
        that are at most `target_interval` updates old (paper: 0.99 of policies, all values).
      value_target: what says renewed values: the "network" (the authors' code), or a "search" from every row (paper).
      reanalyse_group: G updates whose samples are drawn and reanalysed at once, which is as if one by one: G divides
        `target_interval`. What searches cost hardly depends on how many there are.
      target_interval: updates between copies of the parameters for it (paper: 200).
      optimizer: "adam"; "sgd" with momentum 0.9 (paper); or "clipped_lars" (Mei et al. 2023), for large batches.
      learning_rate: (paper: 0.2).
      warmup_updates: over which it rises from 0 (paper: 1,000).
      final_scale: of the learning rate in updates behind the last step, `final_updates` (paper: 0.1).
      l2_cost: c of a further loss c |params|^2, whose gradient is not clipped, with SGD and Adam (paper: 0.00005).
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
    value_cost: float = configs.field(0.25, low=0.0, tunable=True)
    consistency_cost: float = configs.field(2.0, low=0.0, tunable=True)
    augment: bool = True
    batch_size: int = configs.field(64, low=1)
    samples_per_row: float = configs.field(16.0, low=1e-4)
    replay_capacity: int = configs.field(100_000, low=1)
    replay_min_size: int = configs.field(500, low=1)
    priority_exponent: float = configs.field(0.6, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.4, low=0.0, high=1.0)
    refresh_interval: int = configs.field(0, low=0)
    reanalyse: float = configs.field(1.0, low=0.0, high=1.0)
    value_target: Literal["network", "search"] = "network"
    reanalyse_group: int = configs.field(1, low=1)
    target_interval: int = configs.field(100, low=1)
    optimizer: Literal["adam", "sgd", "clipped_lars"] = "adam"
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
        if self.target_interval % self.reanalyse_group:
            raise ValueError(
                f"reanalyse_group={self.reanalyse_group} must divide target_interval={self.target_interval}, so that "
                "the updates of a group have one target."
            )
        if self.refresh_interval % self.reanalyse_group:
            raise ValueError(
                f"reanalyse_group={self.reanalyse_group} must divide refresh_interval={self.refresh_interval}, so that "
                "the parts of a sweep are groups."
            )


class Aux(NamedTuple):
    """What a learner has beside its parameters: statistics of layers that have some, and older parameters and
    statistics that reanalyse and that priorities are refreshed by; () where nothing is."""

    statistics: ArrayTree
    target: tuple[ArrayTree, ArrayTree] | tuple[()]
    sweep: tuple[ArrayTree, ArrayTree] | tuple[()]


def loss(
    said: list[prefix_models.Said],
    seen: jax.Array,
    target: windows.Targets,
    weight: jax.Array,
    bins: Bins,
    hyper: Mapping[str, jax.Array],
    config: EfficientZeroConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """The part of the loss, and of metrics, that some samples have: sums over samples make the whole.

    Args:
      said: of the model's states 0 to K.
      seen: [K, B, F]; projections of what was seen at rows 1 to K.
      target: what they should be.
      weight: float32 [B]; importance weights.
      bins: what numbers of prefixes and values are.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.
    """
    sums = dict.fromkeys(("prefix", "value", "policy", "consistency"), jnp.zeros_like(weight))
    K = len(said) - 1
    for k, (policy, value, prefix, forecast) in enumerate(said):
        valid = target.valid[k]
        if prefix is not None and forecast is not None:
            sums["prefix"] += valid * bins.cross_entropy(prefix, target.reward[k])
            sums["consistency"] += valid * prefix_models.inconsistency(forecast, seen[k - 1])
        sums["value"] += valid * bins.cross_entropy(value, target.value[k])
        sums["policy"] -= target.acted[k] * jnp.sum(target.policy[k] * jax.nn.log_softmax(policy), axis=-1)
    mean = lambda x: jnp.sum(weight * x) / (K * batch_size)  # noqa: E731
    metrics = {f"loss/{name}": mean(x) for name, x in sums.items()}
    total = metrics["loss/prefix"] + hyper["value_cost"] * metrics["loss/value"] + metrics["loss/policy"]
    total += hyper["consistency_cost"] * metrics["loss/consistency"]
    metrics["policy/target_entropy"] = jnp.sum(jax.scipy.special.entr(target.policy[0])) / batch_size
    metrics["value/mean"] = jnp.sum(target.value[0]) / batch_size
    return total, metrics | {"loss/total": total}


def make(
    spec: EnvSpec,
    config: EfficientZeroConfig | None = None,
    network: prefix_models.PrefixModel | None = None,
    loss: Callable[..., tuple[jax.Array, Metrics]] = loss,
) -> Agent:
    """The EfficientZero agent for an environment with discrete actions.

    Args:
      spec: the environment's spec.
      config: settings; defaults if None.
      network: your own model (see `podracer.search.prefix_models.PrefixModel`); the config's if None.
      loss: your own loss, called as `loss` is and returning what it returns, with metrics of any names.

    Raises:
      ValueError: for an action space or a model that does not fit.
    """
    config = config or EfficientZeroConfig()
    check_one_player(spec, "efficientzero")
    if not isinstance(spec.action_space, spaces.Discrete):
        raise ValueError(
            f"{spec.name} takes actions in {spec.action_space}; efficientzero searches among Discrete ones: use ppo or "
            "vtrace."
        )
    K, n = config.unroll_length, config.n_step
    stacked = nets.stacked_spec(spec, config.frame_stack)
    model, bins = network or prefix_models.make(stacked, config), _bins(config)
    plan = planner(spec, config, model)
    augment = config.augment and world_models.takes_convolutions(stacked, config.torso)
    size = stacked.observation_space.shape[:2] if augment else (0, 0)  # type: ignore[union-attr]
    # Stacks frames, and leaves the rest to the search.
    observer = nets.Network(lambda _: (), lambda _, rows, core: (rows.observation, rows.reward, core), lambda lanes: ())
    init_optimizer, step = _optimiser(config)

    def init(key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        example = jax.tree.map(lambda x: x[None], spaces.zeros(stacked.observation_space))
        params, statistics = model.init(key, example)
        copy = lambda wanted: jax.tree.map(jnp.copy, (params, statistics)) if wanted else ()  # noqa: E731
        target, swept = copy(config.reanalyse), copy(config.refresh_interval)
        return LearnerState(params, init_optimizer(params), dict(hyper), jnp.int32(0), Aux(statistics, target, swept))

    def actor_params(learner: LearnerState, progress: jax.Array) -> ActorParams:
        aux = {
            "temperature": planning.temperature(progress),
            "discount": learner.hyper["discount"],
            "statistics": learner.aux.statistics,
        }
        return ActorParams(learner.params, learner.num_updates, aux)

    def start(lanes: jax.Array, num_lanes: int) -> nets.ActorState:
        return nets.start(observer, spec, lanes.shape[0], config.frame_stack)

    def act(
        actor: ActorParams, memory: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        # Until something was learnt, a search is no better than any action.
        return planning.act(plan, observer, actor, memory, timestep, key, evaluation, at_random=actor.version == 0)

    def learn(
        learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        B = batch.weight.shape[0]
        batch_size = collectives.global_sum(jnp.float32(B))
        # Of what is unrolled from and what is compared with it; one for all frames and rows of a sample.
        changes = [augmentation.draw(k, B, size) for k in jax.random.split(key)]
        learning_rate = learner.hyper["learning_rate"] * jnp.where(progress < 1, 1.0, config.final_scale)
        if config.warmup_updates:
            learning_rate *= jnp.minimum(1.0, (learner.num_updates + 1).astype(jnp.float32) / config.warmup_updates)

        def loss_fn(params: ArrayTree, group: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
            batch, changes = group
            rows = jax.tree.map(lambda x: x[: K + 1], batch.trajectory.timesteps)
            observation = nets.inputs(observer, batch.trajectory._replace(timesteps=rows)).observation
            first, later = (jax.tree.map(lambda x, at=at: x[at], observation) for at in (slice(1), slice(1, None)))
            if augment:
                first, later = (world_models.with_channels(x, 2) for x in (first, later))
                first, later = augmentation.apply(changes[0], first), augmentation.apply(changes[1], later)
            actions = batch.trajectory.actions[:K]
            said, seen, statistics = prefix_models.unroll(
                model, params, learner.aux.statistics, first, later, actions, config.horizon
            )
            target = jax.tree.map(lax.stop_gradient, _targets(learner.hyper["discount"], batch, config))
            total, metrics = loss(said, seen, target, batch.weight, bins, learner.hyper, config, batch_size)
            error = jnp.abs(lax.stop_gradient(bins.expectation(said[0].value)) - target.value[0])
            metrics |= {
                "value/error": jnp.sum(error) / batch_size,
                "value/outside": jnp.sum(windows.outside(target, bins)) / batch_size,
                "consistency/std": prefix_models.spread(lax.stop_gradient(seen)) * len(error) / batch_size,
            }
            return total, (metrics, (error, statistics))

        batch_norm = bool(jax.tree.leaves(learner.aux.statistics))  # which sees all rows, or would change with groups
        seen = batch.trajectory.timesteps.observation
        groups = 1 if batch_norm else B // gradients.at_a_time(seen, 2 * K + 1, B, unrolled=True)
        split = jax.tree.map(lambda x: trajectories.split(x, groups, 0), changes)
        grads, metrics, (errors, statistics) = gradients.accumulate(
            loss_fn, learner.params, (trajectories.split_batch(batch, groups), split)
        )
        grads, metrics = collectives.global_sum((grads, metrics))
        statistics = collectives.global_average(jax.tree.map(lambda x: x[0], statistics))
        rates = {"learning_rate": learning_rate, "max_grad_norm": learner.hyper["max_grad_norm"]}
        params, opt_state, grad_norm = step(grads, learner.opt_state, learner.params, **rates)
        num_updates = learner.num_updates + 1

        def copied(old: Any, interval: int) -> Any:
            copy = num_updates % interval == 0 if interval else False
            return jax.tree.map(lambda old, new: jnp.where(copy, new, old), old, (params, statistics)) if old else ()

        intervals = (config.target_interval, config.refresh_interval)
        aux = Aux(statistics, *map(copied, (learner.aux.target, learner.aux.sweep), intervals))
        learner = learner._replace(params=params, opt_state=opt_state, num_updates=num_updates, aux=aux)
        return learner, metrics | {"grad/norm": grad_norm}, errors.reshape(B)

    def earlier(what: str, interval: int, learner: LearnerState, progress: jax.Array) -> ActorParams:
        params, statistics = getattr(learner.aux, what)
        copied, aux = learner.num_updates // interval * interval, learner.aux._replace(statistics=statistics)
        return actor_params(learner._replace(params=params, num_updates=copied, aux=aux), progress)

    def refresh(actor: ActorParams, rows: Trajectory, age: jax.Array) -> jax.Array:
        seen = nets.inputs(observer, rows).observation
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
        value = plan.model.root(plan.variables(actor), flat).value.reshape(rows.timesteps.reward.shape)
        step = windows.transitions(rows.timesteps, actor.aux["discount"], config.clip_rewards)
        m = jnp.pad(_rewards_in_values(age, config), ((0, n), (0, 0)), mode="edge")
        return windows.errors(step, rows.timesteps.discount, value, n, m)[: len(age)]

    def reanalyse(actor: ActorParams, batch: Batch, key: jax.Array) -> Batch:
        parts = {"policies": K + 1 if config.value_target == "network" else K + n + 1, "values": K + n + 1}
        return reanalysis.renewed(plan, observer, actor, batch, key, part=config.reanalyse, observed=K + 1, **parts)

    beta = config.importance_exponent
    replay = Replay(
        starts="rows",
        capacity=config.replay_capacity,
        length=K + n + 2,  # one more than it takes, for the last row of a sequence comes without extras
        observed=K + n + 1 if config.reanalyse else K + 1,
        min_size=config.replay_min_size,
        batch_size=config.batch_size,
        group=config.reanalyse_group,
        refresh_interval=config.refresh_interval,
        reach=n,
        target_interval=config.target_interval if config.reanalyse else 0,
        ratio=config.samples_per_row,
        context=config.frame_stack - 1,
        priority_exponent=config.priority_exponent,
        importance_exponent=lambda progress: beta + (1.0 - beta) * progress if beta else jnp.float32(0),
        keep=nets.without_frames,
        restore=lambda kept, observation, first: nets.with_frames(kept, observation, first, config.frame_stack),
    )
    renewal: dict[str, Any] = {"cautions": (caution(bins.largest, "set max_value to the largest return"),)}
    if config.reanalyse:
        renewal |= {"target_params": partial(earlier, "target", config.target_interval), "reanalyse": reanalyse}
    if config.refresh_interval:
        renewal |= {"refresh_params": partial(earlier, "sweep", config.refresh_interval), "refresh": refresh}
    hyper = configs.tunables(config)
    return Agent("efficientzero", config, init, actor_params, start, act, learn, hyper, replay, **renewal)


def _bins(config: EfficientZeroConfig) -> Bins:
    """The bins of value prefixes and values."""
    largest = max(largest_return(config.discount), config.horizon)
    return Bins(config.num_bins, largest if config.max_value is None else config.max_value)


def _optimiser(config: EfficientZeroConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its `init` and its `step`."""
    if config.optimizer == "clipped_lars":
        made = lars.ClippedLARS(prefix_models.last_kernels, config.lars_start, config.lars_eta)
        return made.init, made.step
    plain = optimizer.make(config.optimizer, eps=1e-8, momentum=0.9)
    transformation = optimizer.decaying(plain, config.l2_cost) if config.l2_cost else plain
    return partial(optimizer.init, transformation), partial(optimizer.step, transformation)


def planner(
    spec: EnvSpec, config: EfficientZeroConfig, network: prefix_models.PrefixModel | None = None
) -> search.Planner:
    """How the agent searches: in its model (the config's if None), of parameters, statistics and gamma."""
    stacked = nets.stacked_spec(spec, config.frame_stack)
    expectation = _bins(config).expectation
    model = prefix_models.searched(network or prefix_models.make(stacked, config), expectation, stacked, config.horizon)
    return search.Planner(
        stacked.observation_space,
        model,
        lambda actor: (actor.params, actor.aux["statistics"], actor.aux["discount"]),
        search.settings(config, epsilon=config.least_range),
    )


def _targets(discount: jax.Array, batch: Batch, config: EfficientZeroConfig) -> windows.Targets:
    """Of windows [K+n+2, B]; the last row, whose search is not recorded, is not used."""
    rows = jax.tree.map(lambda x: x[:-1], batch.trajectory.timesteps._replace(observation=()))
    extras = batch.trajectory.extras
    return windows.targets(
        windows.transitions(rows, discount, config.clip_rewards),
        rows.discount,
        extras["policy"],
        extras["value"],
        unroll_length=config.unroll_length,
        n_step=config.n_step,
        rewards_in_values=_rewards_in_values(batch.age, config),
        horizon=config.horizon,
    )


def _rewards_in_values(age: jax.Array, config: EfficientZeroConfig) -> jax.Array:
    """How many, by how many transitions have been made since (Ye et al. 2021, section 4.3)."""
    lost = age // config.correction_interval if config.correction_interval else jnp.zeros_like(age)
    return jnp.clip(config.n_step - lost, 1, config.n_step)
