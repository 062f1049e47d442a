"""DQN (Mnih et al. 2015) and the improvements that Rainbow joins (Hessel et al. 2018), each a field of the config.

One feed-forward agent learns action values from replayed rows. A sample is one transition, or n of them joined into
one (`returns.n_step_transition`):

    Q(x_0, a_0) <- R + G Q-(x_m, argmax_a Q(x_m, a))        Q-: the target network, an older copy of Q

| field | paper |
|---|---|
| `double` | van Hasselt et al. 2016; without it, Q- chooses the action too |
| `dueling` | Wang et al. 2016 |
| `n_step` | Sutton 1988; not corrected for actions that were explored |
| `priority_exponent` | Schaul et al. 2016, proportional |
| `values="categorical"` | C51, Bellemare et al. 2017 |
| `values="quantile"` | QR-DQN, Dabney et al. 2018 |
| `noise` | noisy networks with factorised noise, Fortunato et al. 2018 |

Deviations from Mnih et al. 2015, all of them defaults that a field sets back:

*   Small networks, a small replay, a short exploration and a larger learning rate: what small tasks like.
*   Double Q-learning, Adam with a learning rate that falls to 0, and gradients clipped by their norm.

What no field changes: the loss is a mean over the batch; masked transitions are never replayed; exploration is by
updates (row t of a run is t * replay_ratio / batch_size updates after the replay was ready, and before that play is as
random as at the beginning), so that a run that was stopped goes on where it was; noise is drawn once for all lanes of a
step, and none in evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, returns, trajectories
from podracer.agents import base
from podracer.distributions import epsilon_greedy, greedy, value_of
from podracer.learning import bins, value_distributions
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.learning.resets import ResetConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, Batch, EnvSpec, LearnerState, Metrics, TimeStep


@dataclasses.dataclass(frozen=True)
class DQNConfig(nets.NetworkConfig, OptimizerConfig, ResetConfig):
    """The agent's settings, beside those of `podracer.nets.NetworkConfig`,
    `podracer.learning.optimizer_config.OptimizerConfig` and `podracer.learning.resets.ResetConfig`. Paper values are
    those of Mnih et al. 2015 (extended data table 1), unless they say else.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 1).
      rollout_length: T, rows of a lane between one round of updates and the next (paper: 4).
      batch_size: transitions per update, over all devices (paper: 32).
      replay_ratio: rows sampled to learn from per row added (paper: 8, an update of 32 every 4 rows). An update
        comes every batch_size / replay_ratio rows of all lanes.
      target_interval: updates between copies to the target network (paper: 10,000; most that followed: 2,500, which
        are 10,000 rows).
      replay_capacity: rows that are kept at least, over all devices (paper: 1,000,000); rollouts are kept whole.
      replay_min_size: N, rows before the first update (paper: 50,000).
      discount: gamma (paper: 0.99).
      n_step: rewards in a return (paper: 1; Rainbow: 3).
      double: whether the learner chooses the action that the target network values (Rainbow: True).
      dueling: whether the network has streams for the state's value and for advantages (Rainbow: True).
      optimizer: "rmsprop" is centred here, with decay 0.95 (paper).
      learning_rate: (paper: 2.5e-4).
      learning_rate_schedule: (paper: "constant").
      optimizer_eps: of RMSProp, inside the root (paper: 0.01 for a loss summed over a batch of 32, so 0.01 / 32^2); of
        Adam, outside it (C51: 0.01 / 32), which has to be set where a preset is for RMSProp.
      max_grad_norm: clip by global norm, inf for none (paper: inf).
      max_error: the largest error of a mean value that its gradient follows, inf for squared errors (paper: 1).
      values: "mean", or the distribution of returns: "categorical" or "quantile".
      num_bins: numbers of a distribution, its atoms or its quantiles (C51: 51; QR-DQN: 200).
      max_value: the largest return that a categorical distribution knows, the least being -max_value (C51: 10). None
        for 1 / (1 - discount), the largest return of rewards in [-1, 1], at most 1,000, by the config's discount even
        if others are tuned.
      noise: sigma_0 of noisy layers in the heads, 0 for none (Fortunato et al.: 0.5; Rainbow: 0.5, or 0.1).
      priority_exponent: alpha, 0 to replay all alike (Rainbow: 0.5).
      importance_exponent: beta in the beginning (Rainbow: 0.4).
      importance_exponent_final: beta at the end of the run, linear between them (Rainbow: 1).
      epsilon_start: chance of a random action in the beginning (paper: 1; Rainbow: 0).
      epsilon_final: at the end of exploration (paper: 0.1; Rainbow: 0).
      epsilon_decay: rows of all lanes from one to the other (paper: 1,000,000); the default is for small tasks, and a
        fiftieth of a run of 500,000: take a tenth of the run, and a larger replay, where rewards are rare.
      evaluation_epsilon: in evaluation (paper: 0.05); greedy policies and exports have 0.
      clip_rewards: to [-1, 1] (paper: True).
      torso: see `podracer.nets.make_q` (paper: "nature").
      head_size: units of a hidden layer of each head, 0 for none (paper: 0; Rainbow: 512 after "nature_conv").
      init: of weights; "uniform" is within 1 / sqrt(inputs) of 0, biases too, as Torch's was (paper).
    """

    envs_per_device: int = configs.field(16, low=1)
    rollout_length: int = configs.field(4, low=1)
    batch_size: int = configs.field(64, low=1)
    replay_ratio: float = configs.field(16.0, low=1e-4)
    target_interval: int = configs.field(250, low=1)
    replay_capacity: int = configs.field(20_000, low=1)
    replay_min_size: int = configs.field(1_000, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    n_step: int = configs.field(1, low=1)
    double: bool = True
    dueling: bool = False
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    optimizer_eps: float = configs.field(1e-5, low=1e-30, tunable=True)
    max_grad_norm: float = configs.field(10.0, low=0.0, tunable=True)
    max_error: float = configs.field(float("inf"), low=1e-6)
    values: value_distributions.Kind = "mean"
    num_bins: int = configs.field(51, low=2)
    max_value: float | None = configs.field(None)  # above 0, which no inclusive limit says
    noise: float = configs.field(0.0, low=0.0)
    priority_exponent: float = configs.field(0.0, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.4, low=0.0, high=1.0)
    importance_exponent_final: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_start: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_final: float = configs.field(0.05, low=0.0, high=1.0, at_most=("epsilon_start", ": exploration falls"))
    epsilon_decay: int = configs.field(10_000, low=0)
    evaluation_epsilon: float = configs.field(1e-3, low=0.0, high=1.0)
    clip_rewards: bool = False
    head_size: int = configs.field(0, low=0)
    init: Literal["glorot", "uniform"] = "glorot"

    def __post_init__(self):
        super().__post_init__()
        if self.max_value is not None and not 0.0 < self.max_value < float("inf"):
            raise ValueError(f"max_value={self.max_value} must be finite and above 0, such as 10.0.")
        if self.values == "mean":
            configs.require_defaults(self, ("num_bins", "max_value"), 'is of distributions, not of values="mean"')
        if not self.priority_exponent:
            why = "corrects for priorities, of which there are none with priority_exponent=0"
            configs.require_defaults(self, ("importance_exponent", "importance_exponent_final"), why)


class Samples(NamedTuple):
    """Transitions of up to n steps from the replay, [B].

    Attributes:
      action: int32; a_0, taken at row 0.
      reward: float32; R, of up to n steps.
      discount: float32; G, the weight of the value of row m.
      weight: float32; importance weights.
    """

    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    weight: jax.Array


def loss(
    outputs: jax.Array,
    bootstrap: jax.Array,
    batch: Samples,
    values: value_distributions.ValueDistribution,
    hyper: Mapping[str, jax.Array],
    config: DQNConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics, jax.Array]:
    """The loss and metrics of some samples: the sums over all samples are those of the batch.

    Args:
      outputs: [B, A, K]; the learner's predictions of every action at row 0.
      bootstrap: [B, K]; the target network's prediction of the best action at row m.
      batch: [B].
      values: the meaning of the K numbers of an action.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.

    Returns:
      The scalar, the metrics, and the priorities [B].
    """
    # The error between Q(x_0, a_0) and R + G Q-(x_m, a*), weighted against the bias of priorities (Schaul et al. 2016).
    predicted = _of_actions(outputs, batch.action)
    errors, priority = values.errors(predicted, bootstrap, batch.reward, batch.discount)
    total = jnp.sum(batch.weight * errors) / batch_size
    q_tm1, q_t = values.mean(predicted), values.mean(bootstrap)
    td_error = batch.reward + batch.discount * q_t - q_tm1
    terms = {"value/mean": q_tm1, "value/square": jnp.square(q_tm1), "value/td_error": jnp.abs(td_error)}
    return total, {name: jnp.sum(x) / batch_size for name, x in terms.items()} | {"loss/total": total}, priority


@base.maker("dqn", DQNConfig, loss)
def make(
    spec: EnvSpec, config: DQNConfig, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The DQN agent for an environment with discrete actions; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space or torso that does not fit, or a network: its outputs are action values, or
        `num_bins` numbers for each action in turn.
    """
    max_value = bins.largest_return(config.discount) if config.max_value is None else config.max_value
    values = value_distributions.make(
        config.values, max_error=config.max_error, num_bins=config.num_bins, max_value=max_value
    )
    if config.noise and network is not None:
        raise nets.NetworkError(
            f"noise={config.noise}: only the library's own network has noisy layers; use noise=0 with network=."
        )
    if network is not None:
        why = "is of the library's own network"
        configs.require_defaults(config, ("dueling", "head_size"), why, nets.NetworkError)
    network = config.action_values(
        "dqn",
        spec,
        network,
        head_size=config.head_size,
        dueling=config.dueling,
        num_bins=values.size,
        noise=config.noise,
        init=config.init,
        masked=False,  # `_means` does it, where actions are compared
    )
    if network.recurrent:
        raise nets.NetworkError("dqn replays single rows, of which no recurrent state is kept; r2d2 replays sequences.")
    name = "centred_rmsprop" if config.optimizer == "rmsprop" else config.optimizer
    rule = config.make_optimizer(optimizer, name=name, decay=0.95)
    functions = _DQN(spec, config, network, rule, loss, values)
    # Prioritised experience replay of single rows (Schaul et al. 2016, algorithm 1); beta rises linearly, for
    # importance weights matter most at the end (section 3.4).
    rise = config.importance_exponent_final - config.importance_exponent
    replay = base.replay_of_rows(
        config,
        config.n_step + 1,
        priority_exponent=config.priority_exponent,
        importance_exponent=lambda progress: config.importance_exponent + rise * progress,
        **nets.frame_context(config.frame_stack),
    )
    advice = "set max_value to the largest return, or values='quantile', which has no limit"
    cautions = (bins.caution(max_value, advice),)
    return functions.bundle("dqn", replay=replay, best=functions.best, cautions=cautions)


@dataclasses.dataclass(frozen=True, eq=False)
class _DQN(base.Functions):
    config: DQNConfig
    values: value_distributions.ValueDistribution

    def aux(self, params: ArrayTree) -> ArrayTree:
        return jax.tree.map(jnp.copy, params)  # the target network

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> jax.Array:
        return self._epsilon(learner.num_updates)

    def act(
        self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        # Epsilon-greedy (Mnih et al. 2015, algorithm 1), with noisy values if asked for (Fortunato et al. 2018).
        params, epsilon = actor.params, self.config.evaluation_epsilon if evaluation else actor.aux
        if self.config.noise and not evaluation:
            noise_key, key = jax.random.split(key)
            params = nets.perturb(params, noise_key)
        q, state = self._action_values(params, state, timestep)
        action = epsilon_greedy(q, epsilon, key, nets.action_masks.legal(self.spec, timestep.observation))
        return action, {}, state.after(action)

    def best(self, actor: ActorParams, state: nets.ActorState, timestep: TimeStep) -> tuple[jax.Array, nets.ActorState]:
        q, state = self._action_values(actor.params, state, timestep)
        action = greedy(q)
        return action, state.after(action)

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        config, values = self.config, self.values
        batch_size = collectives.global_size(batch.weight.shape[0])
        # Noise of the target network, of the choice and of Q, drawn independently (Fortunato et al. 2018, section 3.1).
        target_key, choice_key, key = jax.random.split(key, 3)
        target = self._with_noise(learner.aux, target_key)
        selector = self._with_noise(learner.params, choice_key) if config.double else target

        def loss(params: ArrayTree, batch: Batch) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
            rows, core = nets.inputs(self.network, batch.trajectory), batch.trajectory.actor_state.core
            # R, G and m of up to n steps (Sutton 1988).
            step = returns.transitions(batch.trajectory)
            reward = jnp.clip(step.reward, -1.0, 1.0) if config.clip_rewards else step.reward
            step = step._replace(reward=reward, discount=learner.hyper["discount"] * step.discount)
            R, G, m = returns.n_step_transition(step, config.n_step)
            # Q-(x_m, argmax_a Q(x_m, a)): double Q-learning (van Hasselt et al. 2016), or max_a Q-(x_m, a).
            next_row = trajectories.row_of_lanes(rows, m, config.n_step)
            outputs_target = self._apply(target, next_row, core)
            outputs_selector = self._apply(selector, next_row, core) if config.double else outputs_target
            best = jnp.argmax(self._means(outputs_selector, next_row.observation), axis=-1)
            bootstrap = lax.stop_gradient(_of_actions(outputs_target, best))
            # Q(x_0, a_0), moved to the target.
            outputs = self._apply(self._with_noise(params, key), jax.tree.map(lambda x: x[:1], rows), core)
            samples = Samples(batch.trajectory.actions[0], R, G, batch.weight)
            total, metrics, priority = self.loss(outputs, bootstrap, samples, values, learner.hyper, config, batch_size)
            if values.largest is not None:
                outside = jnp.abs(R + G * values.mean(bootstrap)) > bins.SLACK * values.largest
                metrics |= {"value/outside": jnp.sum(outside, dtype=jnp.float32) / batch_size}
            return total, (metrics, lax.stop_gradient(priority))

        epsilon = self._epsilon(learner.num_updates)
        # The step, and Q- := Q every C updates (Mnih et al. 2015, algorithm 1).
        rate = self.learning_rate(learner, progress)
        learner, metrics, priorities = self.update(loss, learner, batch, rate, copy_every=config.target_interval)
        return learner, metrics | {"policy/epsilon": epsilon}, priorities

    def _epsilon(self, num_updates: jax.Array) -> jax.Array:
        """Chance of a random action, which falls linearly."""
        config = self.config
        # Counted in updates, so that a run that was stopped goes on where it was.
        num_rows = config.batch_size / config.replay_ratio * num_updates.astype(jnp.float32)
        part = jnp.minimum(num_rows / max(config.epsilon_decay, 1), 1.0)
        return config.epsilon_start + (config.epsilon_final - config.epsilon_start) * part

    def _with_noise(self, params: ArrayTree, key: jax.Array) -> ArrayTree:
        return nets.perturb(params, key) if self.config.noise else params

    def _action_values(
        self, params: ArrayTree, state: nets.ActorState, timestep: TimeStep
    ) -> tuple[jax.Array, nets.ActorState]:
        outputs, _, state = nets.step(self.network, params, state, timestep)
        return self._means(self._by_action(outputs), timestep.observation), state

    def _means(self, outputs: jax.Array, observation: ArrayTree) -> jax.Array:
        """Action values [B, A] of predictions [B, A, K], lowered where illegal; observations are [..., B]."""
        q, legal = self.values.mean(outputs), nets.action_masks.legal(self.spec, observation)
        return q if legal is None else nets.action_masks.lower(q, legal.reshape(q.shape))

    def _apply(self, params: ArrayTree, row: nets.Inputs, core: ArrayTree) -> jax.Array:
        """Predictions [B, A, K] at one row [1, B]."""
        return self._by_action(self.network.apply(params, row, core)[0][0])

    def _by_action(self, outputs: jax.Array) -> jax.Array:
        return outputs.reshape(*outputs.shape[:-1], -1, self.values.size)


def _of_actions(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """Predictions [B, K] of actions [B], among [B, A, K] of all."""
    return value_of(jnp.swapaxes(outputs, 1, 2), action[:, None])
