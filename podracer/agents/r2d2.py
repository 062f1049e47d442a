"""R2D2: recurrent replay distributed DQN (Kapturowski et al. 2019), as SEED RL reproduced it (Espeholt et al. 2020).

Action values of a recurrent dueling network are learnt from prioritised sequences. A sequence brings the recurrent
state that the actor had before it, but for GTrXL's window, which is too large; its first rows only burn the state in.
Targets are double-Q returns of n steps, in
rescaled values (SEED RL, section 3.2 and tables 8 and 9).

    h(r_{t+1} + ... + gamma^n h^-1(Q_target(x_{t+n}, argmax_a Q(x_{t+n}, a))))        h: podracer.returns.rescale

Deviations from the papers, all of them defaults that a field sets back (`R2D2Config.atari()` sets them all):

*   Small networks, shorter sequences, more updates and a larger learning rate: what small tasks like.
*   The target network is copied every 200 updates rather than 2,500.

What no field changes: weights are Glorot's except those of the LSTM's recurrence, which are orthogonal; returns are
shorter at the end of a sequence, and stop at truncations and breaks, where they bootstrap. With `core="none"` this is
the Ape-X form of DQN (Horgan et al. 2018), on sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, returns
from podracer.agents import base
from podracer.distributions import epsilon_greedy, greedy, value_of
from podracer.learning import update
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.learning.resets import ResetConfig
from podracer.topology import collectives
from podracer.types import ActorParams, Agent, ArrayTree, Batch, EnvSpec, LearnerState, Metrics, ReplaySpec, TimeStep


@dataclasses.dataclass(frozen=True)
class R2D2Config(nets.NetworkConfig, OptimizerConfig, ResetConfig):
    """The agent's settings, beside those of `podracer.nets.NetworkConfig`,
    `podracer.learning.optimizer_config.OptimizerConfig` and `podracer.learning.resets.ResetConfig`. Paper values are
    those of SEED RL's table 8.

    Attributes:
      envs_per_device: lanes per device when `num_envs` is not given (paper: 610 actors in all).
      rollout_length: T, rows from one sequence to the next (paper: 80, so that sequences overlap by their burn-in).
      burn_in: rows that open a sequence and are not learnt from (paper: 40).
      trace_length: transitions of a sequence that are learnt from (paper: 80).
      n_step: rewards in a return (paper: 5).
      discount: gamma (paper: 0.997).
      learning_rate: of Adam (paper: 1e-4).
      optimizer_eps: (paper: 1e-3); with less, small networks learn sooner, and less steadily.
      max_grad_norm: clip by global norm (paper: 80).
      batch_size: sequences per update, over all devices (paper: 64).
      replay_capacity: rows that are kept at least, over all devices (paper: 100,000 sequences, one every 80 rows).
      replay_min_size: rows in the replay before the first update, as many as the sequences there were cut from (paper:
        5,000 sequences).
      replay_ratio: rows sampled to learn from per row added (paper: 0.75); a sequence has `trace_length` of them.
      priority_exponent: alpha (paper: 0.9).
      importance_exponent: beta (paper: 0.6).
      priority_max_weight: eta; a priority is eta max|td| + (1 - eta) mean|td| (paper: 0.9).
      target_interval: updates between copies to the target network (paper: 2,500).
      value_rescaling: whether values are in the scale of h (paper: True).
      epsilon_base: lane i of N explores with probability epsilon_base^(1 + epsilon_alpha i / (N - 1)) (paper: 0.4); one
        lane alone as the middle of many, 0.016, also where a trained agent acts that is not greedy.
      epsilon_alpha: (paper: 7).
      evaluation_epsilon: of all lanes in evaluation (paper: 1e-3); greedy policies and exports have 0.
      core: see `podracer.nets.NetworkConfig` (paper: an LSTM of 512).
      head_size: units of each dueling head (paper: 512).
    """

    envs_per_device: int = configs.field(64, low=1)
    rollout_length: int = configs.field(20, low=1)
    burn_in: int = configs.field(10, low=0)
    trace_length: int = configs.field(40, low=1)
    n_step: int = configs.field(5, low=1)
    discount: float = configs.field(0.997, low=0.0, high=1.0, tunable=True)
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    learning_rate_schedule: update.Schedule = "constant"
    optimizer_eps: float = configs.field(1e-3, low=1e-30, tunable=True)
    max_grad_norm: float = configs.field(80.0, low=0.0, tunable=True)
    batch_size: int = configs.field(64, low=1)
    replay_capacity: int = configs.field(200_000, low=1)
    replay_min_size: int = configs.field(10_000, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    replay_ratio: float = configs.field(32.0, low=1e-4)
    priority_exponent: float = configs.field(0.9, low=0.0, high=1.0)
    importance_exponent: float = configs.field(0.6, low=0.0, high=1.0)
    priority_max_weight: float = configs.field(0.9, low=0.0, high=1.0)
    target_interval: int = configs.field(200, low=1)
    value_rescaling: bool = True
    epsilon_base: float = configs.field(0.4, low=0.0, high=1.0)
    epsilon_alpha: float = configs.field(7.0, low=0.0)
    evaluation_epsilon: float = configs.field(1e-3, low=0.0, high=1.0)
    hidden_sizes: tuple[int, ...] = configs.field((64,), low=1)
    core: nets.CoreName = "lstm"
    head_size: int = configs.field(64, low=1)

    def __post_init__(self):
        super().__post_init__()
        if self.burn_in < (rows := self.core_settings.rows_to_rebuild):
            raise ValueError(
                f"burn_in={self.burn_in}: replay does not store the state of {self.core}, and burning in rebuilds it "
                f"from core_layers x core_memory rows; use {rows} or more, or lower core_memory."
            )

    @classmethod
    def atari(cls, **overrides) -> R2D2Config:
        """SEED RL's configuration for Atari (table 8), but for the number of actors."""
        # Sequences of 40 + 80 rows that overlap by the 40: a new one every 80 rows, so that 100,000 sequences are 8M
        # rows, and a ratio of sequences is one of rows. What section 4.3 reports agrees: in 260K frames/s, 65K rows/s,
        # 9.5 updates/s of 64 x 80 rows are 0.75.
        paper = {
            "rollout_length": 80,
            "burn_in": 40,
            "trace_length": 80,
            "learning_rate": 1e-4,
            "replay_capacity": 8_000_000,
            "replay_min_size": 400_000,
            "replay_ratio": 0.75,
            "target_interval": 2_500,
            "frame_stack": 4,
            "torso": "nature",
            "core": "lstm",
            "core_size": 512,
            "head_size": 512,
        }
        return cls(**(paper | overrides))


class Memory(NamedTuple):
    """The agent's memory of a lane: its network's state, and epsilon, float32 [B], which never changes."""

    net: nets.ActorState
    epsilon: jax.Array


def targets(
    values: jax.Array, step: returns.Transitions, hyper: Mapping[str, jax.Array], config: R2D2Config
) -> jax.Array:
    """Targets of the values of the actions taken, [T, B], in the network's scale (SEED RL, section 3.2).

    Args:
      values: [T+1, B]; the bootstrap values, in the network's scale.
      step: [T, B].
      hyper: tunable numbers.
      config: the static settings.
    """
    step = step._replace(discount=hyper["discount"] * step.discount)
    if not config.value_rescaling:
        return returns.n_step(values, step, config.n_step)
    return returns.rescale(returns.n_step(returns.unrescale(values), step, config.n_step))


def sequence_priority(errors: jax.Array, mask: jax.Array, config: R2D2Config) -> jax.Array:
    """eta max|td| + (1 - eta) mean|td| over the valid transitions (Kapturowski et al. 2019, section 2.3), [B]."""
    errors = jnp.abs(errors) * mask
    mean = jnp.sum(errors, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    eta = config.priority_max_weight
    return eta * jnp.max(errors, axis=0) + (1.0 - eta) * mean


def loss(
    q: jax.Array,
    target_q: jax.Array,
    actions: jax.Array,
    step: returns.Transitions,
    weight: jax.Array,
    hyper: Mapping[str, jax.Array],
    config: R2D2Config,
    batch_size: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Metrics, jax.Array]:
    """The loss and metrics of some sequences: the sums over all sequences are those of the batch.

    Args:
      q: [T+1, B, A]; action values of the learner's parameters, after the burn-in.
      target_q: [T+1, B, A]; of the target network.
      actions: int32 [T, B]; those taken.
      step: [T, B].
      weight: float32 [B]; importance weights.
      hyper: tunable numbers.
      config: the static settings.
      batch_size: sequences of all shards.
      count: valid transitions of all sequences of all shards, at least 1.

    Returns:
      The scalar, the metrics, and the temporal differences [T, B], of which priorities are made; 0 where masked.
    """
    # Double Q-learning: Q chooses the action that the target network values (van Hasselt et al. 2016).
    bootstrap = value_of(target_q, jnp.argmax(q, axis=-1).astype(jnp.int32))
    taken = value_of(q[:-1], actions)
    # Half the squared error to n-step targets in the scale of h, summed over a sequence, with importance weights.
    errors = step.mask * (lax.stop_gradient(targets(bootstrap, step, hyper, config)) - taken)
    total = jnp.sum(weight * 0.5 * jnp.sum(jnp.square(errors), axis=0)) / batch_size
    mean = lambda x: jnp.sum(step.mask * x) / count  # noqa: E731
    return total, {"loss/total": total, "value/mean": mean(taken), "value/td_error": mean(jnp.abs(errors))}, errors


@base.maker("r2d2", R2D2Config, loss)
def make(
    spec: EnvSpec, config: R2D2Config, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The R2D2 agent for an environment with discrete actions; `podracer.agents` says what the arguments are.

    Raises:
      ValueError: for an action space, torso or network that does not fit.
    """
    rebuilt = network is None and config.core_settings.rows_to_rebuild > 0
    network = config.action_values("r2d2", spec, network, head_size=config.head_size)
    functions = _R2D2(spec, config, network, config.make_optimizer(optimizer), loss)
    T = config.rollout_length  # a sequence begins every T rows
    replay = ReplaySpec(
        capacity=-(-config.replay_capacity // T),
        length=config.burn_in + config.trace_length + 1,
        min_size=-(-config.replay_min_size // T),
        batch_size=config.batch_size,
        ratio=config.replay_ratio * T / config.trace_length,
        priority_exponent=config.priority_exponent,
        importance_exponent=config.importance_exponent,
        priority=functions.first_priority,
        acting_numbers=("discount",),
        **nets.frame_context(config.frame_stack, lambda memory: memory.net, network.start if rebuilt else None),
    )
    return functions.bundle("r2d2", replay=replay, best=functions.best)


@dataclasses.dataclass(frozen=True, eq=False)
class _R2D2(base.Functions):
    config: R2D2Config

    def aux(self, params: ArrayTree) -> ArrayTree:
        return jax.tree.map(jnp.copy, params)  # the target network

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> dict[str, jax.Array]:
        return {"discount": learner.hyper["discount"]}

    def start(self, lanes: jax.Array, num_lanes: int) -> Memory:
        # Every lane has an epsilon of its own (Horgan et al. 2018, section 4.1).
        place = lanes.astype(jnp.float32) / (num_lanes - 1) if num_lanes > 1 else jnp.full(lanes.shape, 0.5)
        exponent = 1.0 + self.config.epsilon_alpha * place
        return Memory(super().start(lanes, num_lanes), jnp.float32(self.config.epsilon_base) ** exponent)

    def act(
        self, actor: ActorParams, memory: Memory, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, Memory]:
        q, _, state = nets.step(self.network, actor.params, memory.net, timestep)
        epsilon = self.config.evaluation_epsilon if evaluation else memory.epsilon
        action = epsilon_greedy(q, epsilon, key, nets.action_masks.legal(self.spec, timestep.observation))
        # The numbers from which first priorities are made.
        extras = {"q_taken": value_of(q, action), "q_max": jnp.max(q, axis=-1)}
        extras["discount"] = jnp.broadcast_to(actor.aux["discount"], extras["q_max"].shape)
        return action, extras, memory._replace(net=state.after(action))

    def best(self, actor: ActorParams, memory: Memory, timestep: TimeStep) -> tuple[jax.Array, Memory]:
        q, _, state = nets.step(self.network, actor.params, memory.net, timestep)
        action = greedy(q)
        return action, memory._replace(net=state.after(action))

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        config = self.config
        mask = self._after_burn_in(returns.transitions(batch.trajectory).mask)
        batch_size, count = collectives.global_sum((jnp.float32(batch.weight.shape[0]), jnp.sum(mask)))
        count = jnp.maximum(count, 1.0)

        def loss(params: ArrayTree, batch: Batch) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
            trajectory = batch.trajectory
            # Q and Q- of the sequence, from the stored state through the burn-in.
            inputs, core = nets.inputs(self.network, trajectory), trajectory.actor_state.core
            q, target_q = self._unroll(params, inputs, core), self._unroll(learner.aux, inputs, core)
            step = self._after_burn_in(returns.transitions(trajectory))
            actions = trajectory.actions[config.burn_in :]
            total, metrics, errors = self.loss(
                q, target_q, actions, step, batch.weight, learner.hyper, config, batch_size, count
            )
            return total, (metrics, sequence_priority(lax.stop_gradient(errors), step.mask, config))

        # The step, new priorities, and Q- := Q every `target_interval` updates.
        rate, num_rows = self.learning_rate(learner, progress), config.burn_in + config.trace_length
        return self.update(loss, learner, batch, rate, num_rows=num_rows, copy_every=config.target_interval)

    def first_priority(self, timesteps: TimeStep, extras: Mapping[str, jax.Array]) -> jax.Array:
        """The priority of a new sequence, with the actor's greedy value as the bootstrap (Horgan et al. 2018)."""
        timesteps, extras = self._after_burn_in((timesteps, extras))
        reward, discount, first = timesteps.reward[1:], timesteps.discount[1:], timesteps.first[1:]
        step = returns.Transitions(reward, discount, 1.0 - first.astype(jnp.float32))
        wanted = targets(extras["q_max"], step, {"discount": extras["discount"][:-1]}, self.config)
        return sequence_priority(wanted - extras["q_taken"][:-1], step.mask, self.config)[None]

    def _unroll(self, params: ArrayTree, inputs: nets.Inputs, core: ArrayTree) -> jax.Array:
        """Action values of the rows after the burn-in."""
        # The burn-in: the stored state as these parameters would have it, without a gradient (section 3).
        if self.network.recurrent and self.config.burn_in:
            opening = jax.tree.map(lambda x: x[: self.config.burn_in], inputs)
            core = lax.stop_gradient(self.network.apply(params, opening, core)[2])
        return self.network.apply(params, self._after_burn_in(inputs), core)[0]

    def _after_burn_in(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x[self.config.burn_in :], tree)
