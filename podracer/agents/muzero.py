"""MuZero (Schrittwieser et al. 2020): plans in a model that it learns, from samples of a replay, with either driver.

    act      s_0 = h(o); a search over f and g from s_0 gives the policy pi and the value nu; both are recorded
    learn    s_0 = h(o_0), s_k = g(s_{k-1}, a_{k-1}); at each k the model's reward, value and policy are trained
             towards u_k, z_k and pi_k

    z_k = u_{k+1} + gamma u_{k+2} + ... + gamma^{n-1} u_{k+n} + gamma^n nu_{k+n}, cut at the end of the episode:
    a termination is worth 0, a truncation the nu of its last row

u are observed rewards. In a game for two players gamma is negative, for every second row is the opponent's. No loss
compares a state with an observation: the state has to predict rewards, values and policies, and nothing else.

Departures from the paper: Adam, clipped gradients, and no L2 term; h sees frames but no past actions; values are scaled
by their range among a node's actions and its own value, not in the whole tree; games for two players have bins as well,
n-step targets, and the temperatures of other tasks; after learning, a priority is made of the network's value;
importance weights are divided by the largest of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets
from podracer.agents import base
from podracer.learning.bins import Bins, caution, largest_return
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.search import planning, reanalysis, search, windows, world_models
from podracer.search.world_models import WorldModel
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
class MuZeroConfig(search.AgentSettings, world_models.Sizes, OptimizerConfig):
    """The agent's settings, beside those of `search.AgentSettings`, `world_models.Sizes` and
    `podracer.learning.optimizer_config.OptimizerConfig`. Paper values are those of Schrittwieser et al. 2020 for Atari,
    unless they say else.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 350 actors).
      rollout_length: T, rows of a lane between one round of updates and the next.
      least_range: the smallest range of a node's values that puct, and gumbel's sigma, scale to [0, 1].
      unroll_length: K, steps of the model that are learnt from each sample (paper: 5).
      n_step: n, rewards in a value's target (paper: 10; appendix H: 5). More, such as 50, suits late effects.
      absorbing: True to learn rewards and values of 0 after a termination, under random actions (paper: absorbing
        states). False masks these rows out.
      discount: gamma (paper: 0.997).
      max_reward: the largest reward that the bins represent. The bins of rewards and values reach to max_reward / (1 -
        discount), with the config's discount, at most to 1,000 times max_reward, and to max_reward in games for two
        players (paper: 601 bins, to 300 after rescaling).
      termination_cost: weight of the loss of terminations. Above 0, the model predicts them, and a search discounts by
        the probability that the episode goes on. With 0, values alone tell of an end (paper).
      value_cost: weight of the value's loss (paper: 1; appendix H, Reanalyze: 0.25).
      batch_size: samples per update, over all devices (paper: 1,024).
      replay_ratio: samples per transition that is added (paper: 0.1; appendix H: 2).
      replay_capacity: the least number of transitions kept, over all devices (paper: 125,000 sequences of 200).
      replay_min_size: rows before the first update.
      priority_exponent: alpha; 0 samples uniformly (paper: 1).
      importance_exponent: beta (paper: 1).
      reanalyse: fraction of the samples whose targets a target network recomputes: policies by a search, values by its
        value head (paper, appendix H: 0.8).
      target_interval: updates between copies to that target network.
      learning_rate: (paper: 0.05, with SGD).
      learning_rate_schedule: (paper: to a tenth every 350,000 updates).
      optimizer_eps: of Adam.
      max_grad_norm: clip by global norm, inf for none (paper: inf).
      clip_rewards: to [-1, 1].
      frame_stack: how many of the newest observations the model sees (paper: 32).
    """

    envs_per_device: int = configs.field(16, low=1)
    rollout_length: int = configs.field(8, low=1)
    least_range: float = configs.field(0.01, low=1e-8)
    unroll_length: int = configs.field(5, low=1)
    n_step: int = configs.field(10, low=1)
    absorbing: bool = False
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    max_reward: float = configs.field(1.0, low=1e-6)
    termination_cost: float = configs.field(0.0, low=0.0)
    value_cost: float = configs.field(0.25, low=0.0, tunable=True)
    batch_size: int = configs.field(64, low=1)
    replay_ratio: float = configs.field(16.0, low=1e-4)
    replay_capacity: int = configs.field(50_000, low=1)
    replay_min_size: int = configs.field(1_000, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    priority_exponent: float = configs.field(0.0, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.0, low=0.0, high=1.0)
    reanalyse: float = configs.field(0.0, low=0.0, high=1.0)
    target_interval: int = configs.field(200, low=1)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    optimizer_eps: float = configs.field(1e-8, low=1e-30, tunable=True)
    max_grad_norm: float = configs.field(5.0, low=0.0, tunable=True)
    clip_rewards: bool = False
    frame_stack: int = configs.field(1, low=1)


class Prediction(NamedTuple):
    """Predictions at one of the model's states.

    Attributes:
      reward: [B, bins]; of the step to it, zeros for the first state.
      policy: logits [B, A].
      value: [B, bins].
      termination: logits [B]; () for the first state, and for a model that does not predict it.
    """

    reward: jax.Array
    policy: jax.Array
    value: jax.Array
    termination: Any = ()


def loss(
    predictions: list[Prediction],
    target: windows.Targets,
    weight: jax.Array,
    bins: Bins,
    hyper: Mapping[str, jax.Array],
    config: MuZeroConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some samples (equation 1, without the L2 term); summed over samples, those of the batch.

    Args:
      predictions: of the model's states 0 to K.
      target: of the predictions.
      weight: float32 [B]; importance weights.
      bins: the bins that represent rewards and values.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.
    """
    names = ("reward", "value", "policy", *(("termination",) if config.termination_cost else ()))
    sums = dict.fromkeys(names, jnp.zeros_like(weight))
    K = len(predictions) - 1
    # Rows after an episode's end are not `valid` (unless they are absorbing). Its last row has a value but no policy,
    # for nothing acted there: it is not `acted`.
    for k, (reward, policy, value, logit) in enumerate(predictions):
        # Losses of the unrolled steps weigh 1 / K, so that their sum does not grow with K (appendix G).
        scale = 1.0 if k == 0 else 1.0 / K
        if k:
            sums["reward"] += scale * target.valid[k] * bins.cross_entropy(reward, target.reward[k])
            if config.termination_cost:
                sums["termination"] += scale * target.valid[k] * windows.termination_loss(logit, target.ended[k])
        sums["value"] += scale * target.valid[k] * bins.cross_entropy(value, target.value[k])
        cross_entropy = -jnp.sum(target.policy[k] * jax.nn.log_softmax(policy), axis=-1)
        sums["policy"] += scale * target.acted[k] * cross_entropy
    mean = lambda x: jnp.sum(weight * x) / batch_size  # noqa: E731
    metrics = {f"loss/{name}": mean(x) for name, x in sums.items()}
    total = metrics["loss/reward"] + hyper["value_cost"] * metrics["loss/value"] + metrics["loss/policy"]
    if config.termination_cost:
        total += config.termination_cost * metrics["loss/termination"]
    metrics["policy/target_entropy"] = jnp.sum(jax.scipy.special.entr(target.policy[0])) / batch_size
    metrics["value/target_mean"] = jnp.sum(target.value[0]) / batch_size
    return total, metrics | {"loss/total": total}


@base.maker("muzero", MuZeroConfig, loss, two_players=True)
def make(
    spec: EnvSpec, config: MuZeroConfig, network: WorldModel | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The MuZero agent for an environment with discrete actions; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space, or a model (`podracer.search.world_models.WorldModel`), that does not fit.
    """
    base.check_discrete(spec, "muzero")
    world_models.check_terminations(config.termination_cost, network, network is not None and bool(network.termination))
    model, bins = network or _model(spec, config), _bins(spec, config)
    rule = config.make_optimizer(optimizer)
    functions = _MuZero(spec, config, model, rule, loss, planner(spec, config, model), bins)
    remedy = f"set max_reward, which is {config.max_reward:g}, to the largest reward of a step"
    others: dict[str, Any] = {"cautions": (caution(bins.largest, remedy),)}
    if config.reanalyse:
        others |= {"target_params": functions.target_params, "reanalyse": functions.reanalyse}
    # Prioritised replay of windows that begin at any row (appendix G).
    K, n = config.unroll_length, config.n_step
    replay = base.replay_of_rows(
        config,
        K + n + 2,  # targets need rows 0 to K + n; in the last row of a sequence nothing has acted yet
        # h needs row 0 alone, reanalysis all rows of the targets.
        observation_rows=K + n + 1 if config.reanalyse else 1,
        priority_exponent=config.priority_exponent,
        importance_exponent=config.importance_exponent,
        priority=functions.first_priority if config.priority_exponent else None,
        acting_numbers=("discount",) if config.priority_exponent else (),
        target_interval=config.target_interval if config.reanalyse else 0,
        **nets.frame_context(config.frame_stack),
    )
    return functions.bundle("muzero", replay=replay, **others)


@dataclasses.dataclass(frozen=True, eq=False)
class _MuZero(base.Functions):
    config: MuZeroConfig
    network: WorldModel
    planner: search.Planner
    bins: Bins

    def aux(self, params: ArrayTree) -> ArrayTree:
        return jax.tree.map(jnp.copy, params) if self.config.reanalyse else ()  # the target network

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> dict[str, jax.Array]:
        return {"temperature": planning.temperature(progress), "discount": learner.hyper["discount"]}

    def act(
        self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        # The search from s_0 = h(o), whose policy and value are recorded (section 3).
        action, extras, state = planning.act(self.planner, actor, state, timestep, key, evaluation)
        if self.config.priority_exponent:  # the first priorities' gamma, which a population varies
            extras["discount"] = jnp.broadcast_to(actor.aux["discount"], extras["value"].shape)
        return action, extras, state

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        config = self.config
        batch_size = collectives.global_size(batch.weight.shape[0])
        if config.absorbing:
            batch = batch._replace(
                trajectory=_with_random_actions(batch.trajectory, key, self.spec, config.unroll_length)
            )

        def loss(params: ArrayTree, batch: Batch) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
            predictions = self._unroll(params, batch.trajectory)
            # Targets u_k, z_k and pi_k (section 3).
            target = jax.tree.map(lax.stop_gradient, _targets(learner.hyper["discount"], batch.trajectory, config))
            total, metrics = self.loss(predictions, target, batch.weight, self.bins, learner.hyper, config, batch_size)
            # Priorities |v - z| with the network's value v; the paper has the search's nu (appendix G).
            value = lax.stop_gradient(self.bins.expectation(predictions[0].value))
            error = jnp.abs(value - target.value[0])
            metrics |= {
                "value/mean": jnp.sum(value) / batch_size,
                "value/error": jnp.sum(error) / batch_size,
                "value/outside": jnp.sum(windows.outside(target, self.bins)) / batch_size,
            }
            return total, (metrics, error)

        # The step, new priorities, and the copy to the target network.
        rate = self.learning_rate(learner, progress)
        num_rows, copy_every = config.unroll_length + 1, config.target_interval if config.reanalyse else 0
        return self.update(loss, learner, batch, rate, num_rows=num_rows, unrolled=True, copy_every=copy_every)

    def _unroll(self, params: ArrayTree, trajectory: Trajectory) -> list[Prediction]:
        """Predictions of the model's states 0 to K."""
        # s_0 = h(o_0); no reward leads to it.
        first_row = jax.tree.map(lambda x: x[:1], trajectory.timesteps)
        stacked = nets.inputs(nets.FRAME_STACKER, trajectory._replace(timesteps=first_row)).observation
        state = self.network.represent(params, jax.tree.map(lambda x: x[0], stacked))
        no_reward = jnp.zeros((trajectory.lane.shape[0], self.bins.size))
        predictions = [Prediction(no_reward, *self.network.predict(params, state))]
        # s_k, r_k = g(s_{k-1}, a_{k-1}), with half of the gradient at every step (appendix G).
        for action in trajectory.actions[: self.config.unroll_length]:
            state = jax.tree.map(world_models.half_gradient, state)
            state, reward = self.network.dynamics(params, state, action)
            end = self.network.termination(params, state) if self.network.termination else ()
            predictions.append(Prediction(reward, *self.network.predict(params, state), end))
        return predictions

    def target_params(self, learner: LearnerState, progress: jax.Array) -> ActorParams:
        interval = self.config.target_interval
        num_updates = learner.num_updates // interval * interval
        return self.actor_params(learner._replace(params=learner.aux, num_updates=num_updates), progress)

    def reanalyse(self, actor: ActorParams, batch: Batch, key: jax.Array) -> Batch:
        # Policies by a new search, values by the network (Schrittwieser et al. 2021).
        K, n = self.config.unroll_length, self.config.n_step
        counts = {"policy_rows": K + 1, "value_rows": K + n + 1, "observation_rows": 1}
        return reanalysis.reanalyse(self.planner, actor, batch, key, part=self.config.reanalyse, **counts)

    def first_priority(self, timesteps: TimeStep, extras: ArrayTree) -> jax.Array:
        """Priorities |nu - z| of consecutive rows, by the values that acting recorded."""
        K, n = self.config.unroll_length, self.config.n_step
        step = windows.transitions(timesteps, extras["discount"][:-1], self.config.clip_rewards)
        errors = windows.errors(step, timesteps.discount, extras["value"], n)
        return errors[: len(timesteps.discount) - (K + n + 1)]


def _model(spec: EnvSpec, config: MuZeroConfig) -> WorldModel:
    """The config's model."""
    terminations = config.termination_cost > 0
    return world_models.make(nets.stacked_spec(spec, config.frame_stack), config, terminations=terminations)


def _bins(spec: EnvSpec, config: MuZeroConfig) -> Bins:
    """The bins that represent rewards and values. With two players, returns never exceed `max_reward`."""
    most_rewards = 1.0 if spec.num_players == 2 else largest_return(config.discount)
    return Bins(config.num_bins, config.max_reward * most_rewards)


def planner(spec: EnvSpec, config: MuZeroConfig, network: WorldModel | None = None) -> search.Planner:
    """The agent's search in its model (the config's if None); the model's variables are (params, gamma)."""
    model = world_models.searched(network or _model(spec, config), _bins(spec, config).expectation, spec)
    return search.Planner(
        nets.stacked_spec(spec, config.frame_stack).observation_space,
        model,
        lambda actor: (actor.params, actor.aux["discount"]),
        search.settings(config, epsilon=config.least_range),
    )


def _with_random_actions(trajectory: Trajectory, key: jax.Array, spec: EnvSpec, unroll_length: int) -> Trajectory:
    """Replaces the actions after the end of an episode by random ones: a search may take any action after an end."""
    actions = trajectory.actions[:unroll_length]
    over = jnp.cumsum(trajectory.timesteps.first[1 : unroll_length + 1], axis=0) > 0
    drawn = jax.random.randint(key, actions.shape, 0, nets.num_actions(spec), actions.dtype)
    return trajectory._replace(actions=trajectory.actions.at[:unroll_length].set(jnp.where(over, drawn, actions)))


def _targets(discount: jax.Array, trajectory: Trajectory, config: MuZeroConfig) -> windows.Targets:
    """Rewards u, values z and policies pi [K + 1, B, ...] with their masks (see `podracer.search.windows`)."""
    return windows.of_trajectory(trajectory, discount, config, absorbing=config.absorbing)
