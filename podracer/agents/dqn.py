"""DQN (Mnih et al. 2015) and the improvements that Rainbow joins (Hessel et al. 2018), each a field of the config.

One feed-forward agent learns action values from replayed rows. A sample is one transition, or n of them joined into
one (`returns.n_step_transition`):

    Q(x_0, a_0) <- R + G Q-(x_m, argmax_a Q(x_m, a))        Q-: the target network, a copy of Q now and then

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
updates (row t of a run is t / `update_period` updates after the replay was ready, and before that play is as random as
at the beginning), so that a run that was stopped goes on where it was; noise is drawn once for all lanes of a step, and
none in evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, returns, trajectories
from podracer.distributions import epsilon_greedy, greedy, value_of
from podracer.learning import bins, gradients, optimizer, value_distributions
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
    check_one_player,
)


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """The agent's settings. Paper values are those of Mnih et al. 2015 (extended data table 1), unless they say else.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 1).
      rollout_length: T, rows of a lane between one round of updates and the next (paper: 4).
      update_period: F, rows of all lanes per update (paper: 4).
      batch_size: transitions per update, over all devices (paper: 32).
      target_period: C, rows of all lanes between copies to the target network, a multiple of F (paper: 10,000 updates;
        10,000 rows in most that followed).
      replay_capacity: rows that are kept at least, over all devices (paper: 1,000,000); rollouts are kept whole.
      replay_min_size: N, rows before the first update (paper: 50,000).
      discount: gamma (paper: 0.99).
      n_step: rewards in a return (paper: 1; Rainbow: 3).
      double: whether the learner chooses the action that the target network values (Rainbow: True).
      dueling: whether the network has streams for the state's value and for advantages (Rainbow: True).
      optimizer: "adam", or "rmsprop" centred and with decay 0.95 (paper).
      learning_rate: (paper: 2.5e-4).
      learning_rate_decay: whether it falls linearly to 0 over `total_steps` (paper: False).
      optimizer_eps: of RMSProp, inside the root (paper: 0.01 for a loss summed over a batch of 32, so 0.01 / 32^2); of
        Adam, behind it (C51: 0.01 / 32), which has to be set where a preset is for RMSProp.
      max_grad_norm: clip by global norm, inf for none (paper: inf).
      max_error: the largest error of a mean value that its gradient follows, inf for squared errors (paper: 1).
      values: "mean", or the distribution of returns: "categorical" or "quantile".
      num_atoms: of a distribution (C51: 51; QR-DQN: 200).
      v_max: the largest return that a categorical distribution knows, the least being -v_max (C51: 10). None for
        1 / (1 - discount), what rewards within [-1, 1] can come to, with the discount of the config also where others
        are tuned.
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
      frame_stack: how many of the newest observations the network sees (paper: 4).
      torso: see `podracer.nets.make_q` (paper: "nature").
      hidden_sizes: of the MLP.
      activation: of the MLP.
      head_size: units of a hidden layer of each head, 0 for none (paper: 0; Rainbow: 512 behind "nature_conv").
      init: of weights; "uniform" is within 1 / sqrt(inputs) of 0, biases too, as Torch's was (paper).
      compute_dtype: of the torso, "float32" or "bfloat16" (see `podracer.nets.make`).
    """

    envs_per_device: int = configs.field(16, low=1)
    rollout_length: int = configs.field(4, low=1)
    update_period: int = configs.field(4, low=1)
    batch_size: int = configs.field(64, low=1)
    target_period: int = configs.field(1_000, low=1)
    replay_capacity: int = configs.field(20_000, low=1)
    replay_min_size: int = configs.field(1_000, low=1)
    discount: float = configs.field(0.99, low=0.0, high=1.0, tunable=True)
    n_step: int = configs.field(1, low=1)
    double: bool = True
    dueling: bool = False
    optimizer: Literal["adam", "rmsprop"] = "adam"
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    learning_rate_decay: bool = True
    optimizer_eps: float = configs.field(1e-5, low=0.0)
    max_grad_norm: float = configs.field(10.0, low=0.0, tunable=True)
    max_error: float = configs.field(float("inf"), low=1e-6)
    values: value_distributions.Kind = "mean"
    num_atoms: int = configs.field(51, low=2)
    v_max: float | None = configs.field(None)  # above 0, which no inclusive limit says
    noise: float = configs.field(0.0, low=0.0)
    priority_exponent: float = configs.field(0.0, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.4, low=0.0, high=1.0)
    importance_exponent_final: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_start: float = configs.field(1.0, low=0.0, high=1.0)
    epsilon_final: float = configs.field(0.05, low=0.0, high=1.0)
    epsilon_decay: int = configs.field(10_000, low=0)
    evaluation_epsilon: float = configs.field(1e-3, low=0.0, high=1.0)
    clip_rewards: bool = False
    frame_stack: int = configs.field(1, low=1)
    torso: nets.Torso = "auto"
    hidden_sizes: tuple[int, ...] = configs.field((64, 64), low=1)
    activation: Literal["relu", "tanh"] = "relu"
    head_size: int = configs.field(0, low=0)
    init: Literal["glorot", "uniform"] = "glorot"
    compute_dtype: nets.ComputeDtype = "float32"

    def __post_init__(self):
        configs.check(self)
        F, C = self.update_period, self.target_period
        if C % F:
            fits = " or ".join(str(x) for x in (C // F * F, -(-C // F) * F) if x)
            raise ValueError(f"target_period={C} must be a multiple of update_period={F}, such as {fits}.")
        if self.replay_min_size > self.replay_capacity:
            raise ValueError(
                f"replay_min_size={self.replay_min_size} must be at most replay_capacity={self.replay_capacity}, or "
                f"learning would never begin; use {self.replay_capacity}."
            )
        if self.v_max is not None and not 0.0 < self.v_max < float("inf"):
            raise ValueError(f"v_max={self.v_max} must be finite and above 0, such as 10.0.")
        if self.epsilon_final > self.epsilon_start:
            raise ValueError(
                f"epsilon_final={self.epsilon_final} must be at most epsilon_start={self.epsilon_start}: exploration "
                f"falls; use {self.epsilon_start}."
            )


class Samples(NamedTuple):
    """What was replayed, [B].

    Attributes:
      action: int32; a_0, taken at row 0.
      reward: float32; R, of up to n steps.
      discount: float32; G, what the value of row m counts.
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
    """The part of the loss, and of metrics, that some samples have: sums over samples make the whole.

    Args:
      outputs: [B, A, K]; what the learner's parameters say of every action at row 0.
      bootstrap: [B, K]; what the target network says of the best action at row m.
      batch: [B].
      values: what K numbers say of an action.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.

    Returns:
      The scalar, the metrics, and the priorities [B].
    """
    taken = _of(outputs, batch.action)
    each, priority = values.errors(taken, bootstrap, batch.reward, batch.discount)
    total = jnp.sum(batch.weight * each) / batch_size
    before, after = values.mean(taken), values.mean(bootstrap)
    error = batch.reward + batch.discount * after - before
    terms = {"value/mean": before, "value/square": jnp.square(before), "value/td_error": jnp.abs(error)}
    return total, {name: jnp.sum(x) / batch_size for name, x in terms.items()} | {"loss/total": total}, priority


def make(
    spec: EnvSpec,
    config: DQNConfig | None = None,
    network: nets.Network | None = None,
    loss: Callable[..., tuple[jax.Array, Metrics, jax.Array]] = loss,
) -> Agent:
    """The DQN agent for an environment with discrete actions.

    Args:
      spec: the environment's spec.
      config: settings; defaults if None.
      network: your own network (see `podracer.nets.Network`), whose outputs are action values, or `num_atoms` numbers
        for each action in turn; the config's if None.
      loss: your own loss, called as `loss` is and returning what it returns, with metrics of any names.

    Raises:
      ValueError: for an action space, torso or network that does not fit.
    """
    config = config or DQNConfig()
    check_one_player(spec, "dqn")
    seen = nets.stacked_spec(spec, config.frame_stack)
    v_max = bins.largest_return(config.discount) if config.v_max is None else config.v_max
    values = value_distributions.make(
        config.values, max_error=config.max_error, num_atoms=config.num_atoms, v_max=v_max
    )
    if network is not None:
        _check(network, seen, config, values.size)
    network = network or nets.make_q(
        seen,
        torso=config.torso,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        head_size=config.head_size,
        dueling=config.dueling,
        num_atoms=values.size,
        noise=config.noise,
        init=config.init,
        compute_dtype=config.compute_dtype,
    )
    name = "centred_rmsprop" if config.optimizer == "rmsprop" else "adam"
    transformation = optimizer.make(name, eps=config.optimizer_eps, decay=0.95)
    hyper = configs.tunables(config)

    def init(key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        params = network.init(key)
        target = jax.tree.map(jnp.copy, params)
        return LearnerState(params, optimizer.init(transformation, params), dict(hyper), jnp.int32(0), target)

    def epsilon(num_updates: jax.Array) -> jax.Array:
        rows = config.update_period * num_updates.astype(jnp.float32)
        fallen = jnp.minimum(rows / max(config.epsilon_decay, 1), 1.0)
        return config.epsilon_start + (config.epsilon_final - config.epsilon_start) * fallen

    def actor_params(learner: LearnerState, progress: jax.Array) -> ActorParams:
        return ActorParams(learner.params, learner.num_updates, epsilon(learner.num_updates))

    def start(lanes: jax.Array, num_lanes: int) -> nets.ActorState:
        return nets.start(network, spec, lanes.shape[0], config.frame_stack)

    def noisy(params: ArrayTree, key: jax.Array) -> ArrayTree:
        return nets.perturb(params, key) if config.noise else params

    def by_action(outputs: jax.Array) -> jax.Array:
        return outputs.reshape(*outputs.shape[:-1], -1, values.size)

    def action_values(
        params: ArrayTree, memory: nets.ActorState, timestep: TimeStep
    ) -> tuple[jax.Array, nets.ActorState]:
        outputs, _, memory = nets.step(network, params, memory, timestep)
        return values.mean(by_action(outputs)), memory

    def act(
        actor: ActorParams, memory: nets.ActorState, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
        params = actor.params
        if config.noise and not evaluation:
            noise_key, key = jax.random.split(key)
            params = noisy(params, noise_key)
        q, memory = action_values(params, memory, timestep)
        action = epsilon_greedy(q, config.evaluation_epsilon if evaluation else actor.aux, key)
        return action, {}, memory.after(action)

    def act_best(actor: ActorParams, memory: nets.ActorState, timestep: TimeStep) -> tuple[jax.Array, nets.ActorState]:
        q, memory = action_values(actor.params, memory, timestep)
        action = greedy(q)
        return action, memory.after(action)

    def apply(params: ArrayTree, row: nets.Inputs, core: ArrayTree) -> jax.Array:
        """[B, A, K] at one row [1, B]."""
        return by_action(network.apply(params, row, core)[0][0])

    def learn(
        learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        B = batch.weight.shape[0]
        batch_size = collectives.global_sum(jnp.float32(B))
        target_key, choice_key, key = jax.random.split(key, 3)
        target = noisy(learner.aux, target_key)
        chooser = noisy(learner.params, choice_key) if config.double else target

        def loss_fn(params: ArrayTree, batch: Batch) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
            rows, core = nets.inputs(network, batch.trajectory), batch.trajectory.actor_state.core
            step = returns.transitions(batch.trajectory)
            reward = jnp.clip(step.reward, -1.0, 1.0) if config.clip_rewards else step.reward
            step = step._replace(reward=reward, discount=learner.hyper["discount"] * step.discount)
            R, G, m = returns.n_step_transition(step, config.n_step)
            behind = _row(rows, m, config.n_step)
            said = apply(target, behind, core)
            best = jnp.argmax(values.mean(apply(chooser, behind, core) if config.double else said), axis=-1)
            outputs = apply(noisy(params, key), jax.tree.map(lambda x: x[:1], rows), core)
            samples = Samples(batch.trajectory.actions[0], R, G, batch.weight)
            bootstrap = lax.stop_gradient(_of(said, best))
            total, metrics, priority = loss(outputs, bootstrap, samples, values, learner.hyper, config, batch_size)
            if values.largest is not None:
                beyond = jnp.abs(R + G * values.mean(bootstrap)) > bins.SLACK * values.largest
                metrics |= {"value/outside": jnp.sum(beyond, dtype=jnp.float32) / batch_size}
            return total, (metrics, lax.stop_gradient(priority))

        groups = B // gradients.at_a_time(batch.trajectory.timesteps.observation, 1, B)
        split = trajectories.split_batch(batch, groups)
        grads, metrics, priorities = gradients.accumulate(loss_fn, learner.params, split)
        grads, metrics = collectives.global_sum((grads, metrics))
        params, opt_state, grad_norm = optimizer.step(
            transformation,
            grads,
            learner.opt_state,
            learner.params,
            learning_rate=learner.hyper["learning_rate"] * (1.0 - progress if config.learning_rate_decay else 1.0),
            max_grad_norm=learner.hyper["max_grad_norm"],
        )
        metrics |= {"grad/norm": grad_norm, "policy/epsilon": epsilon(learner.num_updates)}
        num_updates = learner.num_updates + 1
        copy = num_updates % (config.target_period // config.update_period) == 0
        aux = jax.tree.map(lambda new, old: jnp.where(copy, new, old), params, learner.aux)
        learner = learner._replace(params=params, opt_state=opt_state, num_updates=num_updates, aux=aux)
        return learner, metrics, priorities.reshape(B)

    def importance_exponent(progress: jax.Array) -> jax.Array:
        rise = config.importance_exponent_final - config.importance_exponent
        return config.importance_exponent + rise * progress

    replay = Replay(
        starts="rows",
        capacity=config.replay_capacity,
        length=config.n_step + 1,
        min_size=config.replay_min_size,
        batch_size=config.batch_size,
        ratio=config.batch_size / config.update_period,
        context=config.frame_stack - 1,
        priority_exponent=config.priority_exponent,
        importance_exponent=importance_exponent,
        keep=nets.without_frames,
        restore=lambda kept, observation, first: nets.with_frames(kept, observation, first, config.frame_stack),
    )
    return Agent(
        name="dqn",
        config=config,
        init=init,
        actor_params=actor_params,
        start=start,
        act=act,
        learn=learn,
        hyper=hyper,
        replay=replay,
        best=act_best,
        cautions=(bins.caution(v_max, "set v_max to the largest return, or values='quantile', which has no limit"),),
    )


def _check(network: nets.Network, seen: EnvSpec, config: DQNConfig, num_atoms: int) -> None:
    """Checks a network of one's own.

    Raises:
      ValueError: where it does not fit.
    """
    nets.check(network, seen, "dqn", action_values=True, num_atoms=num_atoms)
    if network.recurrent:
        raise nets.NetworkError("dqn replays single rows, of which no recurrent state is kept; r2d2 replays sequences.")
    if config.noise:
        raise nets.NetworkError(
            f"noise={config.noise}: only the library's own network has noisy layers; use noise=0 with network=."
        )


def _row(rows: nets.Inputs, number: jax.Array, n: int) -> nets.Inputs:
    """Row `number` [B], from 1 to n, of each lane, [1, B]."""

    def pick(x: jax.Array) -> jax.Array:
        # Comparisons, not a gather: they join what makes the rows, such as stacking frames.
        row = x[1:2]
        for i in range(2, n + 1):
            row = jnp.where((number >= i).reshape(1, -1, *(1,) * (x.ndim - 2)), x[i : i + 1], row)
        return row

    return jax.tree.map(pick, rows)


def _of(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """What is said [B, K] of actions [B], among [B, A, K] of all."""
    return value_of(jnp.swapaxes(outputs, 1, 2), action[:, None])
