"""The memory of a ring: its bytes, rows that are written in place, and rings that do not fit into a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import agents, nets, replay
from podracer.learning import learner
from podracer.types import TimeStep, Trajectory
from tests.support import harness
from tests.support.small_replay import GROUPS, SQUARE, B, Streams, T, rows_of, spec_of


def test_the_ring_is_written_in_place():
    """Adding to a large ring allocates next to nothing: all of it is donated."""
    spec = spec_of(capacity=30_000)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    trajectory = Streams(0, spec.context).rollout(0)
    ring = jax.eval_shape(lambda: buffer.init(trajectory))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    add = jax.jit(buffer.add, donate_argnums=0)
    memory = add.lower(ring, trajectory, number, number).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 100


def test_shards_of_one_device_are_written_by_slices():
    """Mapped over shards that all write at one place, rows stay slice updates: a scatter of images is not in place."""
    spec = spec_of()
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=2)
    first, second = (Streams(seed, spec.context).rollout(1) for seed in (0, 1))
    rings = [buffer.init(trajectory) for trajectory in (first, second)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rings), jax.tree.map(lambda *x: jnp.stack(x), first, second)
    add = buffer.add
    mapped = jax.vmap(add, in_axes=(0, 0, None, None))
    at = jnp.int32(1), jnp.int32(2)
    written = [jax.tree.map(lambda x, i=i: x[i], jax.jit(mapped)(*stacked, *at)) for i in range(2)]
    for ring, trajectory, got in zip(rings, (first, second), written):
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(add)(ring, trajectory, *at))
    jaxpr = jax.make_jaxpr(mapped)(*stacked, *at)
    scattered = [
        e.invars[0].aval.shape for e in harness.equations(jaxpr.jaxpr) if e.primitive.name.startswith("scatter")
    ]
    assert set(scattered) == {stacked[0].priority.shape}


@pytest.mark.slow
def test_more_than_two_billion_numbers():
    """A replay of 310,000 rows of 84x84 frames: rows written after the 2^31st number are read there."""
    rows, frame = 500, (84, 84)
    spec = rows_of(length=2, context=0, capacity=310_000)
    buffer = replay.make(spec, np.zeros(frame, np.uint8), rollout_length=rows, lanes=1, groups=1, num_shards=1)
    assert buffer.shape.slots * rows * np.prod(frame) > 2**31
    pictures = np.random.default_rng(0).integers(0, 256, (rows + 1, 1, *frame), np.uint8)
    number = lambda dtype, n=rows: jnp.zeros((n, 1), dtype)  # noqa: E731
    steps = TimeStep(jnp.asarray(pictures), *(number(d, rows + 1) for d in (jnp.float32, jnp.float32, bool, bool)))
    state = nets.ActorState((), ())
    trajectory = Trajectory(steps, number(jnp.int32), (), state, number(jnp.int32), jnp.zeros(1, jnp.int32))
    ring = jax.jit(lambda: buffer.init(trajectory))()
    add = jax.jit(buffer.add, donate_argnums=0)
    ring = add(ring, trajectory, jnp.int32(0), jnp.int32(buffer.shape.slots - 1))
    within = np.array([0, 7, rows - 2], np.int32)
    index = jnp.asarray(buffer.shape.starts_per_lane - rows + within)
    assert np.all(np.asarray(ring.priority)[index] == 1)
    at = replay.Sample(index, jnp.full(3, buffer.shape.slots - 1, jnp.int32), None, None)
    found = jax.jit(lambda ring: buffer.gather(ring, at))(ring)
    for i, row in enumerate(within):
        np.testing.assert_array_equal(found.timesteps.observation[:, i], pictures[row : row + 2, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r2d2", "vtrace"])
def test_a_run_copies_no_ring(name):
    """Also where a call adds and samples: the program's scratch memory is a small part of the ring."""
    catch = envs_jax.make("catch")
    if name == "vtrace":
        config = agents.VTraceConfig(replay_fraction=0.5, replay_capacity=500_000, rollout_length=5)
        agent = agents.vtrace.make(catch.spec, config)
    else:
        config = agents.R2D2Config(replay_capacity=250_000, rollout_length=5, burn_in=2, trace_length=8)
        agent = agents.r2d2.make(catch.spec, config)
    prog = harness.make_program(agent, catch, num_envs=8)
    like = prog.like()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like.replay_state.ring))
    memory = prog.step.lower(like, prog.like_limits()).compile().memory_analysis()
    assert size > 5e7
    assert memory.temp_size_in_bytes < size / 5


def test_bytes_are_those_of_the_frames():
    """1e5 sequences of 84x84 frames, 40 new rows each, with an LSTM of 512: at most 1.1 times the bytes of the frames."""
    lanes, rows = 256, 40
    frame = jax.ShapeDtypeStruct((rows + 1, lanes, 84, 84), jnp.uint8)
    number = lambda dtype, n: jax.ShapeDtypeStruct((n, lanes), dtype)  # noqa: E731
    steps = TimeStep(frame, *(number(d, rows + 1) for d in (jnp.float32, jnp.float32, bool, bool)))
    core = jax.ShapeDtypeStruct((lanes, 512), jnp.float32)
    state = nets.ActorState(
        (core, core), jax.ShapeDtypeStruct((lanes,), jnp.int32), jax.ShapeDtypeStruct((lanes, 3, 84, 84), jnp.uint8)
    )
    extras = {name: number(jnp.float32, rows) for name in ("q_taken", "q_max", "discount")}
    lane = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    trajectory = Trajectory(steps, number(jnp.int32, rows), extras, state, number(jnp.int32, rows), lane)
    spec = spec_of(length=121, capacity=100_000)
    buffer = replay.make(spec, np.zeros((84, 84), np.uint8), rollout_length=rows, lanes=lanes, groups=1, num_shards=1)
    ring = jax.eval_shape(lambda t: buffer.init(t), trajectory)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring))
    assert buffer.shape.size * lanes >= 100_000
    assert size <= 1.1 * 100_000 * rows * 84 * 84


@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_a_replay_that_does_not_fit_is_refused(arch):
    """Before anything is made."""
    message = r"the replay needs [0-9.]+ GiB on each device, and \S+ has [0-9.]+ GiB; lower replay_capacity, use more devices\.$"
    large = {"config": {"replay_capacity": 10**8}, "progress": False}
    with pytest.raises(ValueError, match=message):
        podracer.train("r2d2", "pixel_catch", arch=arch, **large)
    with pytest.raises(ValueError, match=r"the replay needs [0-9.]+ GiB, and the host has [0-9.]+ GiB; lower"):
        podracer.train("r2d2", "pixel_catch", arch="sebulba", replay_memory="host", **large)


@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_a_window_that_does_not_fit_is_refused(arch):
    """The memory that an agent has of its lanes."""
    message = r"the agent's memory of its lanes needs [0-9.]+ GiB on each device, .*; lower num_envs, frame_stack or core_memory, or use"
    with pytest.raises(ValueError, match=message):
        podracer.train("ppo", "catch", arch=arch, config={"core": "gtrxl", "core_memory": 10**8}, progress=False)


def test_an_accelerator_offers_the_hosts_memory():
    """Not where there is too little of it."""

    class Accelerator:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 2**20}

        def __repr__(self):
            return "gpu:0"

    def of(n):
        return learner.ReplayState((), jax.ShapeDtypeStruct((n,), jnp.uint8))

    message = (
        r"the replay needs 0\.1 GiB on each device, and gpu:0 has 0\.0 GiB; lower replay_capacity, use more devices, or "
        r"keep it in the host's memory \([0-9.]+ GiB\) with arch='sebulba' and replay_memory='host'\."
    )
    with pytest.raises(ValueError, match=message):
        learner.require_room(of(2**27), [Accelerator()])
    with pytest.raises(ValueError, match=r"use more devices\.$"):
        learner.require_room(of(2**50), [Accelerator()])
    learner.require_room(of(2**21), [Accelerator()] * 2)
    with pytest.raises(ValueError, match="the replay needs"):  # with prefetched samples
        learner.require_room(of(2**21)._replace(prefetched=of(2**20).ring), [Accelerator()] * 2)


def test_replays_in_the_hosts_memory_are_sebulbas():
    with pytest.raises(ValueError, match=r"replay_memory='host' has no effect without arch='sebulba'"):
        podracer.train("r2d2", "catch", replay_memory="host", progress=False)
    with pytest.raises(ValueError, match=r"replay_memory='host': vtrace has no replay here; use 'device'"):
        podracer.train("vtrace", "catch", arch="sebulba", replay_memory="host", progress=False)
