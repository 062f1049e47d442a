"""Small drivers of Sebulba on the counting environment, which share their programs, and runs that are recorded."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp

from podracer import agents, topology
from podracer.agents import PPOConfig, VTraceConfig
from podracer.environments.from_jax import SteppedEnvironments
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba.driver import Sebulba
from tests.support import harness
from tests.support.small_anakin import COUNTING, B, T, small_network


@functools.cache
def agent_of(name, core_size=0, normalize=True):
    common = small_network(core_size)
    if name == "vtrace":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**common))
    if name == "vtrace with replay":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**common, replay_fraction=0.5, replay_capacity=40 * T))
    if name == "r2d2":
        replayed = {"batch_size": 4, "replay_capacity": 100 * T, "replay_min_size": 10 * T, "replay_ratio": 9 / T}
        config = agents.R2D2Config(**common, **replayed, burn_in=3, trace_length=9, head_size=8)
        return agents.r2d2.make(COUNTING.spec, config)
    if name == "dqn":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        config = agents.DQNConfig(
            rollout_length=T, hidden_sizes=(8,), **replayed, target_interval=3, n_step=3, frame_stack=2
        )
        return agents.dqn.make(COUNTING.spec, config)
    if name == "muzero":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        sizes = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11}
        config = agents.MuZeroConfig(
            rollout_length=T, **replayed, **sizes, simulations=2, unroll_length=2, n_step=2, frame_stack=2
        )
        return agents.muzero.make(COUNTING.spec, config)
    if name == "efficientzero":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        sizes = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "lstm_size": 4}
        groups = {"reanalyse_group": 2, "target_interval": 4, "refresh_interval": 4}
        config = agents.EfficientZeroConfig(
            **{"rollout_length": T, "simulations": 2, "unroll_length": 2, "n_step": 2, "frame_stack": 2},
            **replayed,
            **sizes,
            **groups,
        )
        return agents.efficientzero.make(COUNTING.spec, config)
    if name == "pqn":
        config = agents.PQNConfig(rollout_length=T, hidden_sizes=(8,), num_minibatches=2)
        return agents.pqn.make(COUNTING.spec, config)
    return agents.ppo.make(
        COUNTING.spec, PPOConfig(**common, num_epochs=1, num_minibatches=2, normalize_observations=normalize)
    )


_drivers = {}


def driver_of(
    agent,
    threads=1,
    mode="async",
    seed=0,
    hyper=None,
    num_shards=1,
    updates_per_batch=1,
    replay_memory="device",
    replicas=1,
):
    """A driver of its own. It shares its compiled programs, which neither order nor seed nor numbers are part of."""
    key = (id(agent), threads, num_shards, updates_per_batch, replay_memory, replicas)
    if key not in _drivers:
        layout = topology.make_host(
            num_envs=B * threads * replicas,
            envs_per_actor=B,
            actor_threads=threads,
            replicas=replicas,
            devices=jax.local_devices()[:1],
            num_shards=num_shards,
            updates_per_batch=updates_per_batch,
        )
        _drivers[key] = Sebulba(
            agent,
            SteppedEnvironments(COUNTING),
            layout,
            RunConfig(updates_per_batch=updates_per_batch, replay_memory=replay_memory),
            agent.hyper,
        )
    driver = copy.copy(_drivers[key])
    driver.actors = copy.copy(driver.actors)
    driver._run = driver.actors._run = dataclasses.replace(driver._run, mode=mode, seed=seed)
    driver._hyper = agent.hyper | (hyper or {})
    driver.shared = _drivers[key]
    return driver


def run(driver, total_steps=600, state=None, milestone=None):
    """Trains; returns the final state, what was passed to the learner by its first lane, progress, and milestones."""
    captured, progress, states = {}, [], []
    spread = driver.learning.spread

    def capture(trajectory, replica=0):
        numbers = harness.numbers_of(trajectory)
        captured.setdefault(int(numbers.lane[0]), []).append(numbers)
        return spread(trajectory, replica)

    driver.learning = driver.learning._replace(spread=capture)
    state = driver.init() if state is None else state
    if not driver.shared._actor_programs.act:
        driver.shared.compile(state)
    driver._actor_programs, driver._programs = driver.shared._actor_programs, driver.shared._programs
    final, complete = driver.run(
        state,
        RunHooks(
            next_milestone=lambda steps: total_steps if milestone is None or steps >= milestone else milestone,
            on_progress=progress.append,
            on_milestone=lambda state, steps: states.append(jax.tree.map(jnp.copy, state)),
            should_stop=lambda: False,
        ),
        total_steps=total_steps,
    )
    assert complete
    return final, captured, progress, states


def joining(join, joined):
    """`join`, keeping what it returns."""

    def kept(rollouts):
        trajectory = join(rollouts)
        joined.append(harness.numbers_of(trajectory))
        return trajectory

    return kept
