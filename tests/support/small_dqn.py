"""Small DQN agents, sequences as their replay gives them, and calls that learn and act with them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import agents, nets, spaces
from podracer.agents import DQNConfig
from podracer.types import Agent, Batch, EnvSpec, Trajectory
from tests.support import harness

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
A, K = 4, 5
SMALL: dict[str, Any] = {
    "hidden_sizes": (8,),
    "replay_ratio": 16.0,
    "target_interval": 3,
    "max_error": 1.0,
}
ROWS, LANES = 12, 6


@functools.cache
def made(**overrides: Any) -> Agent:
    distribution = {"num_bins": K, "max_value": 3.0} if overrides.get("values", "mean") != "mean" else {}
    return agents.dqn.make(SPEC, DQNConfig(**(SMALL | distribution | overrides)))


def network_of(agent: Agent) -> nets.Network:
    """The network of the agent's config, without noise."""
    config = agent.config
    return nets.make_q(
        nets.stacked_spec(SPEC, config.frame_stack),
        hidden_sizes=(8,),
        head_size=config.head_size,
        dueling=config.dueling,
        num_bins=1 if config.values == "mean" else K,
    )


@functools.cache
def sequences(n: int, context: int = 0, seed: int = 0) -> tuple[Trajectory, Any]:
    """All sequences of n + 1 rows, with ends of all kinds, whose first transition is real; and the rows before them."""
    rows = jax.tree.map(np.asarray, harness.timesteps(seed, ROWS, LANES))
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, A, (ROWS, LANES), np.int32)
    starts = [(r, i) for i in range(LANES) for r in range(context, ROWS - n + 1) if not rows.first[r + 1, i]]
    starts = starts[: len(starts) // 2 * 2]
    row, lane = (np.array(x, np.int32) for x in zip(*starts))
    window = lambda x, offsets: x[row[None] + np.asarray(offsets, np.int32)[:, None], lane[None]]  # noqa: E731
    timesteps = jax.tree.map(lambda x: window(x, np.arange(n + 1)), rows)
    before = window(rows.observation, np.arange(-context, 0)), window(rows.first, np.arange(-context, 0))
    version = np.zeros((n, len(row)), np.int32)
    return Trajectory(timesteps, window(actions, np.arange(n)), {}, (), version, lane), before  # type: ignore[arg-type]


def batch_of(agent: Agent) -> Batch:
    """Sequences as the agent's replay gives them, with importance weights."""
    spec: Any = agent.replay
    trajectory, before = sequences(spec.length - 1, spec.context)
    N = trajectory.lane.shape[0]
    kept = spec.keep(agent.start(jnp.zeros(N, jnp.int32), N))
    assert jax.tree.leaves(kept) == []
    weight = np.random.default_rng(1).random(N).astype(np.float32)
    state = jax.jit(spec.restore)(kept, *before)
    return jax.tree.map(jnp.asarray, Batch(trajectory._replace(actor_state=state), weight, trajectory.lane))  # type: ignore[arg-type]


def learner_of(agent: Agent) -> Any:
    """A learner whose target network is another one, 3 updates after it was copied."""
    init = jax.jit(agent.init)
    learner, other = (init(jax.random.key(seed), harness.hyper(agent)) for seed in (0, 9))
    return learner._replace(aux=jax.tree.map(lambda x: 2.0 * x, other.params), num_updates=jnp.int32(3))


def learn(agent: Agent, learner: Any, batch: Batch, key: int = 0, progress: float = 0.0) -> Any:
    return harness.alone(agent.learn)(learner, batch, jnp.float32(progress), jax.random.key(key))


def act(agent: Agent, learner: Any, observation: Any, key: int = 0, evaluation: bool = False) -> np.ndarray:
    """The actions [B] on observations [B, ...] that each open an episode."""
    B = len(observation)
    row = jax.tree.map(lambda x: jnp.broadcast_to(x[0, :1], (B, *x.shape[2:])), harness.timesteps(0, 1, 1))
    row = row._replace(observation=jnp.asarray(observation), first=jnp.ones(B, bool))
    params = agent.actor_params(learner, jnp.float32(0))
    state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    action, _, _ = jax.jit(agent.act, static_argnums=4)(params, state, row, jax.random.key(key), evaluation)
    assert action.dtype == jnp.int32
    return np.asarray(action)
