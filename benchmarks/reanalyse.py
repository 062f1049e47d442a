"""`python benchmarks/reanalyse.py`: the cost of EfficientZero's updates with and without SpeedyZero's additions.

    learning            no sample is reanalysed reanalysing         all are, an update at a time groups              the
    same, with the searches of 8 updates in one large batch         the same number of samples in one update refreshing
    reanalysing, and all priorities are renewed every 10 updates sgd, clipped lars   learning, with one optimiser and
    the other layer norm, batch norm   learning, with one norm and the other product             a product of two
    matrices, which shows the machine's speed

Samples are from a full replay of random rows: the time does not depend on their content. The floor of an update is its
network's operations at the speed of the product.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import script
import tyro
from jax.sharding import Mesh, PartitionSpec

from podracer import configs, environments, spaces, trajectories
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.bench.measure import Measured, describe_machine, in_turns, table, write
from podracer.learning import gradients, learner
from podracer.topology import collectives
from podracer.training import presets
from podracer.types import ActorParams, Agent, Batch, EnvSpec, TimeStep, Trajectory
from podracer.version import __version__

GROUP = 8
"""The number of updates that are reanalysed together."""

INTERVAL = 10
"""The number of updates in a sweep (Mei et al. 2023)."""


SMALL = {"batch_size": 32, "simulations": 16, "channels": 16}
"""The agent's settings if no preset is given: as much as two cores can do."""

SIZE = 1024
"""The size of the matrices."""


@dataclasses.dataclass(frozen=True)
class ReanalyseArguments:
    """Measure updates of EfficientZero.

    Attributes:
      env: the environment of the observations.
      preset: settings of the agent, for games of Atari.
      batch_size: samples of an update; the preset's if None, or 32 without a preset.
      simulations: simulations of a search; the preset's if None, or 16 without a preset.
      channels: channels of convolutions; the preset's if None, or 16 without a preset.
      rows: rows of the replay.
      lanes: lanes of the replay.
      only: measurements beside learning; all if None.
      repeats: measurements of each thing; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    env: str = "pixel_catch"
    preset: str | None = None
    batch_size: int | None = configs.field(None, low=1)
    simulations: int | None = configs.field(None, low=1)
    channels: int | None = configs.field(None, low=1)
    rows: int = configs.field(10_000, low=1_000)
    lanes: int = configs.field(8, low=1)
    only: tuple[str, ...] | None = None
    repeats: int = configs.field(5, low=1)
    seconds: float = configs.field(2.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)
        unknown = set(self.only or ()) - set(variants(1))
        if unknown:
            raise ValueError(f"only={unknown.pop()!r}: unknown; there are {', '.join(variants(1))}.")


def variants(B: int) -> dict[str, dict[str, Any]]:
    """The settings of each measurement beside the common ones, for B samples of an update."""
    alone = {"reanalyse": 0.0}
    return {
        "learning": alone,
        "reanalysing": {},
        "groups": {"reanalyse_group": GROUP, "target_interval": 25 * GROUP},
        "large batch": {"batch_size": GROUP * B},
        "refreshing": {"refresh_interval": INTERVAL},
        "sgd": alone | {"optimizer": "sgd"},
        "clipped lars": alone | {"optimizer": "clipped_lars", "lars_start": 0, "l2_cost": 5e-5},
        "layer norm": alone | {"batch_size": 4 * B, "norm": "layer"},
        "batch norm": alone | {"batch_size": 4 * B, "norm": "batch"},
    }


RATIOS = (
    ("reanalysing", "learning"),
    ("groups", "large batch"),
    ("refreshing", "reanalysing"),
    ("clipped lars", "sgd"),
    ("batch norm", "layer norm"),
)
"""The pairs of measurements whose seconds a sample are compared."""


def main(arguments: ReanalyseArguments) -> int:
    """Measures, prints a table, writes JSON."""
    settings = presets.merge("efficientzero", arguments.env, arguments.preset, None, presets.Settings())
    spec = environments.make(arguments.env, **settings.env).spec
    overrides = {name: getattr(arguments, name) for name in SMALL if getattr(arguments, name)}
    common = {**settings.agent, **({} if arguments.preset else SMALL), **overrides, "rollout_length": 16}
    common |= {"replay_capacity": arguments.rows, "reanalyse_group": 1, "refresh_interval": 0}
    measured: dict[str, Updates] = {}
    for name, changed in variants(common["batch_size"]).items():
        if arguments.only is None or name in ("learning", *arguments.only):
            print(f"compiling {name} ...", file=sys.stderr, flush=True)
            config = configs.from_json(EfficientZeroConfig, common | changed)
            measured[name] = Updates(efficientzero.make(spec, config), spec, arguments)
    print("measuring ...", file=sys.stderr, flush=True)
    rates = in_turns({**measured, "product": _product()}, arguments.repeats, arguments.seconds)
    speed = float(np.median(rates.pop("product")))
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}; {arguments.env}")
    operations = {name: operations_of(updates, measured["learning"], spec) for name, updates in measured.items()}
    lines = [["", "samples an update", "samples/s", "ms an update", "floor", "times that"]]
    for name, updates in measured.items():
        rate, B = float(np.median(rates[name])), updates.agent.config.batch_size
        floor = operations[name] * B / speed
        cells = [f"{rate:,.1f}", f"{B / rate * 1e3:.1f}", f"{floor * 1e3:.1f}", f"{B / rate / floor:.1f}"]
        lines.append([name, str(B), *cells])
    print(table(lines))
    ratios = {}
    for ours, other in RATIOS:
        if {ours, other} <= measured.keys():
            low, median, high = np.percentile(np.divide(rates[other], rates[ours]), (25, 50, 75)).tolist()
            least = operations[ours] / operations[other]
            ratios[f"{ours} / {other}"] = low, median, high, least
            of_time = f"{ours} / {other}: {median:.2f} ({low:.2f} to {high:.2f}) seconds a sample"
            print(f"{of_time}, {least:.2f} operations")
    print("Medians of measurements in turns; ratios of neighbours, with their quartiles.")
    print(f"Floor: operations of the network at the {speed / 1e9:,.0f} GFLOP/s of a product of matrices.")
    if arguments.json:
        results = {"rates": rates, "ratios": ratios, "operations_a_sample": operations, "product": speed}
        write(arguments.json, "python benchmarks/reanalyse.py", arguments, results)
    return 0


def _product() -> Measured:
    """A measurement of matrix products, in operations."""
    matrix = jnp.ones((SIZE, SIZE), jnp.float32)
    multiply = jax.jit(lambda x: x @ matrix / SIZE)

    def run(n: int) -> int:
        x = matrix
        for _ in range(n):
            x = multiply(x)
        jax.block_until_ready(x)
        return n * 2 * SIZE**3

    return run


class Updates:
    """A measurement of an agent's updates from a full replay, on the first device (see `measure.Measured`)."""

    def __init__(self, agent: Agent, spec: EnvSpec, arguments: ReanalyseArguments):
        self.agent = agent
        observation = spaces.zeros(spec.observation_space)
        core = learner.make(agent, observation, lanes=arguments.lanes, groups=1, num_shards=1)
        assert core.steps is not None
        assert core.steps.run_pending_updates is not None
        drain, add_rollout = core.steps.run_pending_updates, core.steps.add
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
        self._samples = agent.config.batch_size * agent.config.reanalyse_group
        prepare = functools.partial(core.steps.prepare, core.steps.target_params(self._state, jnp.float32(0)))
        prepared = jax.eval_shape(jitted(prepare, ()), self._counts, self._ring, (), jnp.float32(0), jax.random.key(0))
        self._learning = jitted(agent.learn, ()), jax.eval_shape(lambda: self._state), prepared[2].batch

    @functools.cached_property
    def operations(self) -> float:
        """Floating-point operations of learning from a sample."""
        learn, state, batch = self._learning
        B = self.agent.config.batch_size

        def resized(axis: int, x: Any) -> Any:
            return jax.ShapeDtypeStruct((*x.shape[:axis], B, *x.shape[axis + 1 :]), x.dtype)

        of_update = Batch(trajectories.by_lane(resized, batch.trajectory), *(resized(0, x) for x in batch[1:]))
        # All samples at once: of a loop over some at a time, XLA counts one turn.
        with mock.patch.object(gradients, "at_a_time", lambda observation, rows, units, *others: units):
            lowered = learn.lower(state, of_update, jnp.float32(0), jax.random.key(0))
        costs: Any = lowered.compile().cost_analysis() or {}
        return costs.get("flops", float("nan")) / B

    def __call__(self, n: int) -> int:
        for _ in range(n):
            self._state, self._counts, self._ring = self._update(
                self._state, self._counts, self._ring, jax.random.key(1)
            )
        jax.block_until_ready(self._state)
        return n * self._samples


def operations_of(updates: Updates, learning: Updates, spec: EnvSpec, rows: int = 64) -> float:
    """Floating-point operations of the network for a sample: of learning, of reanalysis, and its part of a sweep."""
    agent, config = updates.agent, updates.agent.config
    if not config.reanalyse:
        return updates.operations
    plan = efficientzero.planner(spec, config)
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
    actor = agent.actor_params(jax.jit(agent.init)(jax.random.key(0), hyper), jnp.float32(0))
    variables = plan.variables(actor)
    observation = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), spaces.zeros(plan.space))
    root = jax.eval_shape(plan.model.root, variables, observation)

    def count(function: Any, *of: Any) -> float:
        costs: Any = jax.jit(function).lower(variables, *of).compile().cost_analysis() or {}
        return costs.get("flops", float("nan")) / rows

    of_root = count(plan.model.root, observation)
    of_step = count(plan.model.step, root.embedding, jnp.zeros(rows, jnp.int32))
    K, n = config.unroll_length, config.n_step
    reanalysis = (K + n + 1) * of_root + (K + 1) * config.simulations * of_step
    interval = config.refresh_interval
    refreshed = config.replay_capacity / (interval * config.batch_size) * of_root if interval else 0.0
    return learning.operations + reanalysis + refreshed


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


if __name__ == "__main__":
    sys.exit(script.run("reanalyse", ReanalyseArguments, main))
