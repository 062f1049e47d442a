"""`podracer bench replay`: times of adding, sampling and updating, and the memory of a transition."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, PartitionSpec

from podracer import configs, replay, spaces
from podracer.agents import R2D2Config, r2d2
from podracer.bench.measure import describe_machine, table, write
from podracer.topology import collectives
from podracer.types import Agent, EnvSpec, TimeStep, Trajectory
from podracer.version import __version__


@dataclasses.dataclass(frozen=True)
class ReplayArguments:
    """Measure replay with R2D2's sequences: 121 rows, one every 40 rows.

    Attributes:
      sequences: capacities.
      batch_size: sequences of a sample.
      lanes: lanes of a rollout that is added.
      frame: bytes of an observation; a large capacity of 84x84 frames needs more memory than most machines have.
      repeats: measurements of each thing; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    sequences: tuple[int, ...] = (3_000, 100_000, 1_000_000)
    batch_size: int = configs.field(64, low=1)
    lanes: int = configs.field(64, low=1)
    frame: int = configs.field(16, low=1)
    repeats: int = configs.field(5, low=1)
    seconds: float = configs.field(0.5, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)


def main(arguments: ReplayArguments) -> int:
    """Measures, prints a table, writes JSON."""
    results = []
    for sequences in arguments.sequences:
        print(f"measuring {sequences:,} sequences ...", file=sys.stderr, flush=True)
        results.append(measure(sequences, arguments))
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    lines = [["sequences", "MiB", "bytes/transition", "add", "sample", "gather", "update"]]
    for r in results:
        times = [f"{r[name]:.3f}" for name in ("add_ms", "sample_ms", "gather_ms", "update_ms")]
        lines.append([f"{r['sequences']:,}", f"{r['bytes'] / 2**20:,.0f}", f"{r['bytes_per_transition']:.1f}", *times])
    print(table(lines))
    print(f"ms a call, medians; {arguments.batch_size} sequences a sample, {arguments.lanes} lanes an add.")
    print(f"84x84 frames, 100,000 sequences: {full_size() / (100_000 * 40 * 84 * 84):.3f} bytes per byte of frames.")
    if arguments.json:
        write(arguments.json, "podracer bench replay", arguments, results)
    return 0


def _agent(shape: tuple[int, ...]) -> Agent:
    config = R2D2Config.atari(rollout_length=40, frame_stack=1, torso="mlp", hidden_sizes=(8,))
    spec = EnvSpec("frames", spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(18), None)
    return r2d2.make(spec, config)


def _trajectory(agent: Agent, shape: tuple[int, ...], lanes: int) -> Trajectory:
    """A rollout of zeros."""
    T = agent.config.rollout_length
    number = lambda n, dtype: jnp.zeros((n, lanes), dtype)  # noqa: E731
    steps = TimeStep(
        jnp.zeros((T + 1, lanes, *shape), jnp.uint8),
        *(number(T + 1, dtype) for dtype in (jnp.float32, jnp.float32, bool, bool)),
    )
    extras = {name: number(T, jnp.float32) for name in ("q_taken", "q_max", "discount")}
    lane = jnp.arange(lanes, dtype=jnp.int32)
    return Trajectory(steps, number(T, jnp.int32), extras, agent.start(lane, lanes), number(T, jnp.int32), lane)


def _buffer(agent: Agent, frame: tuple[int, ...], sequences: int, lanes: int, **changes: Any) -> replay.Buffer:
    assert agent.replay is not None
    spec = agent.replay._replace(capacity=sequences, **changes)
    observation = jax.ShapeDtypeStruct(frame, jnp.uint8)
    T = agent.config.rollout_length
    return replay.make(spec, observation, rollout_length=T, lanes=lanes, groups=1, num_shards=1)


def full_size() -> int:
    """Bytes of a replay of 100,000 sequences of 84x84 frames in 256 lanes, with an LSTM of 512, by shapes alone."""
    agent = _agent((84, 84))
    buffer = _buffer(agent, (84, 84), 100_000, 256)
    return _bytes(jax.eval_shape(lambda: buffer.init(_trajectory(agent, (84, 84), 256))))


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _milliseconds(call: Callable[[], Any], arguments: ReplayArguments) -> float:
    """Times a call; returns the median of repeats."""
    jax.block_until_ready(call())
    runs = []
    for _ in range(arguments.repeats):
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < arguments.seconds:
            jax.block_until_ready(call())
            calls += 1
        runs.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(runs)


def measure(sequences: int, arguments: ReplayArguments) -> dict[str, Any]:
    """Times of one capacity, full."""
    shape = (arguments.frame,)
    agent = _agent(shape)
    # Only the time is measured: the recurrent state would be 4 KiB a sequence.
    no_state: dict[str, Any] = {"keep": lambda memory: (), "restore": lambda state, observation, first: ()}
    buffer = _buffer(agent, shape, sequences, arguments.lanes, **no_state)
    trajectory = _trajectory(agent, shape, arguments.lanes)
    mesh = Mesh(np.asarray(jax.local_devices()[:1]).reshape(1, 1), collectives.DATA_AXES)

    def jitted(function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate)

    add = jitted(lambda ring, number: buffer.add(ring, trajectory, jnp.int32(0), number), (0,))
    n = arguments.batch_size
    sample = jitted(lambda ring, counts, key: buffer.sample(ring, counts, key, n, buffer.spec.importance_exponent))
    gather = jitted(buffer.gather)
    write = jitted(lambda ring, counts, at: buffer.write(ring, counts, at, jnp.ones(n))[0], (0,))

    ring = jax.jit(lambda: buffer.init(trajectory))()
    size = _bytes(ring)
    number = 0
    for _ in range(buffer.shape.slots + 1):
        ring = add(ring, jnp.int32(number))
        number += 1
    counts, key = jnp.array([number], jnp.int32), jax.random.key(0)
    at = sample(ring, counts, key)

    def add_one() -> Any:
        nonlocal ring, number
        ring, number = add(ring, jnp.int32(number)), number + 1
        return ring.priority

    def update_one() -> Any:
        nonlocal ring
        ring = write(ring, jnp.array([number], jnp.int32), at)
        return ring.priority

    result = {
        "sequences": sequences,
        "bytes": size,
        "bytes_per_transition": size / (buffer.shape.slots * buffer.shape.lanes * buffer.shape.rollout_length),
        "sample_ms": _milliseconds(lambda: sample(ring, counts, key), arguments),
        "gather_ms": _milliseconds(lambda: gather(ring, at), arguments),
        "update_ms": _milliseconds(update_one, arguments),
        "add_ms": _milliseconds(add_one, arguments),
    }
    return result
