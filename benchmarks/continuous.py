"""Updates of `sac` in a second beside those of sbx (Raffin et al.), and of a plain SAC as it and CleanRL write it.

python benchmarks/continuous.py          # two minutes on two quiet cores; writes benchmarks/results/continuous.json

Each draws its samples from its own full replay and makes the updates of a step of all lanes: HalfCheetah's sizes, 16
lanes, batches of 256, an update a row, two critics. They take turns, and each ratio is of a turn, so that what else a
machine does is in both. Environments are not part of it. "Products alone" is the floor: the products of matrices of the
same updates, and nothing else.

sbx takes part where it can be imported. It needs PyTorch, so a folder of its own keeps this installation as it is:

    pip install --target FOLDER --no-deps sbx-rl stable-baselines3 torch tqdm sympy mpmath filelock
    PYTHONPATH=FOLDER python benchmarks/continuous.py

Its two entries are its `train`: with as many gradient steps as lanes, in one compiled loop, and with one, its default.
CleanRL has no package to install and no SAC in JAX, so the plain SAC stands for it, and for sbx where that is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_sac

from podracer import agents, configs, replay, spaces
from podracer.agents import SACConfig
from podracer.bench import measure
from podracer.learning import update_from_replay
from podracer.learning.replay_steps import Counts
from podracer.topology import collectives
from podracer.types import EnvSpec, TimeStep, Trajectory

RESULTS = pathlib.Path(__file__).parent / "results" / "continuous.json"
INPUTS, ACTIONS, LANES, ROWS = 17, 6, 16, 100_000
BOUND = 1.3
"""The least ratio to either."""
PRODUCTS = "products alone"
"""The floor: its ratio is the part of an update's time that products take."""

Run = Callable[[], None]


def ours(config: SACConfig) -> Run:
    """A function that makes the updates of a step of all lanes."""
    spec = EnvSpec("sizes", spaces.Box(-9.0, 9.0, (INPUTS,)), spaces.Box(-1.0, 1.0, (ACTIONS,)))
    agent = agents.sac.make(spec, config)
    assert agent.replay is not None
    per_lane = ROWS // LANES
    buffer = replay.make(agent.replay, jnp.zeros(INPUTS), rollout_length=1, lanes=LANES, groups=1, num_shards=1)
    steps = update_from_replay.make(agent, buffer)
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
    zeros = lambda *shape: jnp.zeros((*shape, LANES))  # noqa: E731
    rows = TimeStep(jnp.zeros((2, LANES, INPUTS)), zeros(2), zeros(2), zeros(2) > 0, zeros(2) > 0)
    actions, lanes = jnp.zeros((1, LANES, ACTIONS)), jnp.arange(LANES, dtype=jnp.int32)
    state = agent.start(lanes, LANES)
    ring = buffer.init(Trajectory(rows, actions, {}, state, zeros(1).astype(jnp.int32), lanes))
    rng = np.random.default_rng(0)
    normal = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)  # noqa: E731
    full = ring.rows._replace(
        observation=normal(ring.rows.observation), reward=normal(ring.rows.reward), discount=ring.rows.discount + 1.0
    )
    ring = ring._replace(rows=full, actions=jnp.tanh(normal(ring.actions)), priority=ring.priority + 1.0)
    count = jnp.int32(0)
    counts = Counts(count + per_lane, jnp.full(1, per_lane, jnp.int32), count, count + LANES, count, count, count + 1)
    draws = LANES // agent.replay.updates_per_draw
    assert steps.run_pending_updates is not None

    def some(learner: Any, ring: Any, counts: Counts, key: jax.Array) -> Any:
        learner, counts, *_ = steps.run_pending_updates(learner, counts, ring, draws, jnp.float32(0), key)  # type: ignore[misc]
        return learner, counts

    for axis in reversed(collectives.DATA_AXES):
        some = jax.vmap(some, in_axes=(0, 0, None, None), out_axes=(0, None), axis_name=axis)
    lead = lambda tree: jax.tree.map(lambda x: x[None, None], tree)  # noqa: E731
    program, key = jax.jit(some, donate_argnums=0), jax.random.key(1)
    held = [lead(jax.jit(agent.init)(jax.random.key(0), hyper)), counts]
    ring = lead(ring)

    def run() -> None:
        held[:] = jax.block_until_ready(program(held[0], ring, held[1], key))

    return run


def theirs(sizes: tuple[int, ...], batch_size: int, per_call: int) -> Run:
    """The same by the plain SAC, with so many updates in a call."""
    sac, data = plain_sac.SAC(INPUTS, ACTIONS, sizes), plain_sac.Replay(ROWS, INPUTS, ACTIONS)
    held = [jax.jit(sac.init)(jax.random.key(0))]

    def run() -> None:
        for _ in range(LANES // per_call):
            held[0] = sac.updates(held[0], data.sample(per_call * batch_size), per_call)
        jax.block_until_ready(held[0])

    return run


def products(sizes: tuple[int, ...], batch_size: int) -> Run:
    """The products of matrices of these updates and nothing else: what no implementation in float32 can do without."""
    passes = [
        ((INPUTS, *sizes, 2 * ACTIONS), 1, 2, 1, 1),  # the policy: at the next row and at this, learnt at this
        ((INPUTS + ACTIONS, *sizes, 1), 2, 3, 1, 2),  # two critics: in the target, learnt, and climbed by the policy
    ]
    pairs = []
    for widths, networks, forward, of_weights, of_inputs in passes:
        for i, (a, b) in enumerate(itertools.pairwise(widths)):
            # The gradient of a network's own inputs is needed where the policy climbs the critics alone.
            below = of_inputs if i else of_inputs - 1
            pairs += [(networks, batch_size, a, b)] * forward + [(networks, a, batch_size, b)] * of_weights
            pairs += [(networks, batch_size, b, a)] * below
    operands = [(jnp.full((n, a, b), 0.01), jnp.full((n, b, c), 0.01)) for n, a, b, c in pairs]

    def update(operands: Any, _: Any) -> Any:
        # Each product has a part in the next update's, or the compiler would leave it out.
        sums = [jnp.sum(x @ y) for x, y in operands]
        return [(x.at[0, 0, 0].set(0.01 + 1e-20 * total), y) for (x, y), total in zip(operands, sums)], None

    program = jax.jit(lambda operands: jax.lax.scan(update, operands, length=LANES)[0], donate_argnums=0)
    held = [operands]

    def run() -> None:
        held[0] = jax.block_until_ready(program(held[0]))

    return run


def sbx(sizes: tuple[int, ...], batch_size: int, per_call: int) -> Run:
    """The same by sbx, with so many updates in a call."""
    import gymnasium
    from sbx import SAC  # pyright: ignore[reportMissingImports] - installed beside
    from stable_baselines3.common.logger import Logger  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.vec_env import DummyVecEnv  # pyright: ignore[reportMissingImports]

    class Env(gymnasium.Env):
        """Spaces alone, for it is never reset."""

        observation_space = gymnasium.spaces.Box(-9.0, 9.0, (INPUTS,))
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,))

    lanes, layers = DummyVecEnv([Env] * LANES), {"net_arch": list(sizes)}
    sac = SAC("MlpPolicy", lanes, buffer_size=ROWS, batch_size=batch_size, policy_kwargs=layers, seed=0)
    sac.set_logger(Logger(None, []))  # it keeps numbers and writes none
    data, rng = sac.replay_buffer, np.random.default_rng(0)
    assert data is not None
    for rows in (data.observations, data.next_observations, data.actions, data.rewards):
        rows[:] = rng.normal(size=rows.shape)
    data.actions, data.full = np.tanh(data.actions), True

    def run() -> None:
        for _ in range(LANES // per_call):
            sac.train(per_call, batch_size)
        jax.block_until_ready((sac.policy.qf_state.params, sac.policy.actor_state.params))

    return run


def rates_in_turns(runs: dict[str, Run], turns: int, steps: int) -> dict[str, list[float]]:
    """Updates in a second of each, in every turn."""
    for run in runs.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(steps):
                run()
            rates[name].append(steps * LANES / (time.perf_counter() - start))
    return rates


def versions() -> dict[str, str]:
    """The versions of what is measured, of packages that are installed."""
    found = {package.name.lower(): package.version for package in importlib.metadata.distributions()}
    return {name: found[name] for name in ("jax", "jaxlib", "flax", "optax", "sbx-rl", "torch") if name in found}


def main() -> int:
    """Measures; returns 1 where a ratio is below the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps of all lanes in a turn, of 16 updates each")
    parser.add_argument("--file", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", None)
    config = SACConfig(replay_capacity=ROWS)
    sizes, batch = config.hidden_sizes, config.batch_size
    runs = {
        "sac": ours(config),
        "plain, as sbx": theirs(sizes, batch, LANES),
        "plain, as CleanRL": theirs(sizes, batch, 1),
        PRODUCTS: products(sizes, batch),
    }
    if importlib.util.find_spec("sbx"):
        runs |= {"sbx": sbx(sizes, batch, LANES), "sbx, an update a call": sbx(sizes, batch, 1)}
    rates = rates_in_turns(runs, arguments.turns, arguments.steps)
    ratios = {name: [a / b for a, b in zip(rates["sac"], rates[name], strict=True)] for name in rates if name != "sac"}
    for name, found in rates.items():
        print(f"{name:22} {statistics.median(found):8.1f} updates/s")
    for name, found in ratios.items():
        low, high = sorted(found)[1], sorted(found)[-2]
        bound = "" if name == PRODUCTS else f", at least {BOUND} required"
        print(f"sac over {name}: {statistics.median(found):.2f} ({low:.2f} to {high:.2f}){bound}")
    results = {
        "packages": versions(),
        "processors": os.cpu_count(),
        "config": configs.to_json(config),
        "updates_per_second": rates,
        "ratios": ratios,
    }
    measure.write(arguments.file, "python benchmarks/continuous.py", {"turns": arguments.turns}, results)
    return int(any(statistics.median(found) < BOUND for name, found in ratios.items() if name != PRODUCTS))


if __name__ == "__main__":
    raise SystemExit(main())
