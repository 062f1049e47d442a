"""`podracer bench reanalyse`: what EfficientZero's updates cost with and without what SpeedyZero adds to them.

    learning            no sample is reanalysed
    reanalysing         all are, an update at a time
    groups              the same, with the searches of 8 updates in one
    large batch         the same number of samples in one update
    refreshing          reanalysing, and all priorities are renewed every 10 updates
    sgd, clipped lars   learning, with one optimiser and the other
    layer norm, batch norm   learning, with one norm and the other

Samples are of a full replay, whose rows are random: how long it takes does not depend on what is in them.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, PartitionSpec

from podracer import config as configs
from podracer import environments, spaces
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.bench.measure import describe_machine, in_turns, table, write
from podracer.learning import collectives, learner
from podracer.types import ActorParams, Agent, EnvSpec, TimeStep, Trajectory
from podracer.version import __version__

GROUP = 8
"""Updates that are reanalysed together."""

INTERVAL = 10
"""Updates of a sweep (Mei et al. 2023)."""


@dataclasses.dataclass(frozen=True)
class ReanalyseArguments:
    """Measure updates of EfficientZero.

    Attributes:
      env: whose observations are seen.
      batch_size: samples of an update.
      simulations: of a search.
      channels: of convolutions.
      rows: of the replay.
      lanes: of the replay.
      repeats: measurements of each thing; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    env: str = "pixel_catch"
    batch_size: int = configs.field(32, low=1)
    simulations: int = configs.field(16, low=1)
    channels: int = configs.field(16, low=1)
    rows: int = configs.field(10_000, low=1_000)
    lanes: int = configs.field(8, low=1)
    repeats: int = configs.field(5, low=1)
    seconds: float = configs.field(2.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)


def variants(arguments: ReanalyseArguments) -> dict[str, dict[str, Any]]:
    """Settings that are measured, beside those of all."""
    B, alone = arguments.batch_size, {"reanalyse": 0.0}
    return {
        "learning": alone,
        "reanalysing": {},
        "groups": {"reanalyse_group": GROUP, "target_interval": 25 * GROUP},
        "large batch": {"batch_size": GROUP * B},
        "refreshing": {"refresh_interval": INTERVAL},
        "sgd": alone | {"optimizer": "sgd"},
        "clipped lars": alone | {"optimizer": "clipped_lars", "lars_start": 0},
        "layer norm": alone | {"batch_size": 4 * B},
        "batch norm": alone | {"batch_size": 4 * B, "norm": "batch"},
    }


RATIOS = (
    ("reanalysing", "learning"),
    ("groups", "large batch"),
    ("refreshing", "reanalysing"),
    ("clipped lars", "sgd"),
    ("batch norm", "layer norm"),
)
"""Of seconds a sample."""


def main(arguments: ReanalyseArguments) -> int:
    """Measures, prints a table, writes JSON."""
    spec = environments.make(arguments.env).spec
    measured = {}
    for name, changed in variants(arguments).items():
        print(f"compiling {name} ...", file=sys.stderr, flush=True)
        common: dict[str, Any] = {"batch_size": arguments.batch_size, "simulations": arguments.simulations}
        common |= {"channels": arguments.channels, "replay_capacity": arguments.rows, "rollout_length": 16}
        measured[name] = Updates(efficientzero.make(spec, EfficientZeroConfig(**(common | changed))), spec, arguments)
    print("measuring ...", file=sys.stderr, flush=True)
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    agent = measured["reanalysing"].agent
    floor = 1.0 + reanalysis_operations(agent, spec) / measured["learning"].operations
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}; {arguments.env}")
    lines = [["", "samples an update", "samples/s", "ms an update"]]
    for name, updates in measured.items():
        rate, B = float(np.median(rates[name])), updates.agent.config.batch_size
        lines.append([name, str(B), f"{rate:,.0f}", f"{B / rate * 1e3:.2f}"])
    print(table(lines))
    ratios = {}
    for ours, other in RATIOS:
        low, median, high = np.percentile(np.divide(rates[other], rates[ours]), (25, 50, 75)).tolist()
        ratios[f"{ours} / {other}"] = low, median, high
        beside = f"; its operations are {floor:.2f} of it" if ours == "reanalysing" else ""
        print(f"{ours} / {other}: {median:.2f} ({low:.2f} to {high:.2f}) seconds a sample{beside}")
    print("Medians of measurements in turns; ratios of neighbours, with their quartiles.")
    if arguments.json:
        results = {"rates": rates, "ratios": ratios, "operations": floor}
        write(arguments.json, "podracer bench reanalyse", arguments, results)
    return 0


class Updates:
    """Updates of an agent from a full replay, on the first device (see `measure.Measured`).

    Attributes:
      operations: floating-point operations of an update in a sample, of which XLA counts loops once.
    """

    def __init__(self, agent: Agent, spec: EnvSpec, arguments: ReanalyseArguments):
        self.agent = agent
        observation = spaces.zeros(spec.observation_space)
        core = learner.make(agent, observation, lanes=arguments.lanes, groups=1, num_shards=1)
        assert core.steps is not None
        assert core.steps.drain is not None
        drain, add_rollout = core.steps.drain, core.steps.add
        hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
        self._state = jax.jit(agent.init)(jax.random.key(0), hyper)
        trajectory = _random(agent, spec, arguments.lanes, self._state)
        self._counts, self._ring = core.counts(), core.ring(trajectory)
        mesh = Mesh(np.asarray(jax.local_devices()[:1]).reshape(1, 1), collectives.DATA_AXES)

        def jitted(function: Any, donate: tuple[int, ...]) -> Any:
            whole: Any = PartitionSpec()
            mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
            return jax.jit(mapped, donate_argnums=donate)

        add = jitted(lambda counts, ring, rows: add_rollout(counts, ring, rows, jnp.int32(0))[:2], (1,))
        for _ in range(arguments.rows // (arguments.lanes * agent.config.rollout_length) + 1):
            self._counts, self._ring = add(self._counts, self._ring, trajectory)

        def update(state: Any, counts: Any, ring: Any, key: Any) -> Any:
            return drain(state, counts, ring, 1, jnp.float32(0.5), key)[:3]

        arguments_of = (self._state, self._counts, self._ring, jax.random.key(1))
        self._update = jitted(update, (0, 2)).lower(*arguments_of).compile()
        costs: Any = self._update.cost_analysis() or {}
        self._samples = agent.config.batch_size * agent.config.reanalyse_group
        self.operations = costs.get("flops", float("nan")) / self._samples

    def __call__(self, n: int) -> int:
        for _ in range(n):
            self._state, self._counts, self._ring = self._update(
                self._state, self._counts, self._ring, jax.random.key(1)
            )
        jax.block_until_ready(self._state)
        return n * self._samples


def reanalysis_operations(agent: Agent, spec: EnvSpec, rows: int = 64) -> float:
    """Floating-point operations of a sample's reanalysis: of the model, without those of the tree."""
    plan = efficientzero.planner(spec, agent.config)
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
    actor = agent.actor_params(jax.jit(agent.init)(jax.random.key(0), hyper), jnp.float32(0))
    variables = plan.variables(actor)
    observation = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), spaces.zeros(plan.space))
    root = jax.jit(plan.model.root)(variables, observation)

    def operations(function: Any, *of: Any) -> float:
        costs: Any = jax.jit(function).lower(variables, *of).compile().cost_analysis() or {}
        return costs.get("flops", float("nan")) / rows

    of_root = operations(plan.model.root, observation)
    of_step = operations(plan.model.step, root.embedding, jnp.zeros(rows, jnp.int32))
    K, n = agent.config.unroll_length, agent.config.n_step
    return (K + n + 1) * of_root + (K + 1) * agent.config.simulations * of_step


def _random(agent: Agent, spec: EnvSpec, lanes: int, state: Any) -> Trajectory:
    """A rollout of random observations, in which nothing ends."""
    T, rng = agent.config.rollout_length, np.random.default_rng(0)

    def seen(x: jax.Array) -> jax.Array:
        shape = (T + 1, lanes, *x.shape)
        return jnp.asarray(rng.integers(0, 256, shape) if x.dtype == jnp.uint8 else rng.normal(size=shape), x.dtype)

    observation = jax.tree.map(seen, spaces.zeros(spec.observation_space))
    number = lambda value, dtype: jnp.full((T + 1, lanes), value, dtype)  # noqa: E731
    rows = TimeStep(
        observation, number(0.0, jnp.float32), number(1.0, jnp.float32), number(False, bool), number(False, bool)
    )
    lane = jnp.arange(lanes, dtype=jnp.int32)
    memory, actor = agent.start(lane, lanes), agent.actor_params(state, jnp.float32(0))
    row = jax.tree.map(lambda x: x[0], rows)

    def act(actor: ActorParams, memory: Any, row: TimeStep) -> Any:
        return agent.act(actor, memory, row, jax.random.key(0), False)[:2]

    actions, extras = jax.jit(act)(actor, memory, row)
    by_row = lambda x: jnp.broadcast_to(x, (T, *x.shape))  # noqa: E731
    version = jnp.zeros((T, lanes), jnp.int32)
    return Trajectory(rows, jax.tree.map(by_row, actions), jax.tree.map(by_row, extras), memory, version, lane)
