"""Small replays and the streams of rows that fill them: a plain record of everything that was ever added."""

import jax
import jax.numpy as jnp
import numpy as np

from podracer import nets, replay
from podracer.types import ReplaySpec, TimeStep, Trajectory
from tests.support import harness

T, B, GROUPS = 4, 3, 2


def rows_of(length=4, capacity=30, **more):
    """A replay whose sequences begin at every row."""
    return spec_of(length=length, capacity=capacity, starts="rows", **more)


def spec_of(length=11, context=3, capacity=18, alpha=0.9, beta=0.6, priority=None, **more):
    frames = context + 1
    settings = {"min_size": 1, "batch_size": 8, "ratio": 1.0} | more
    return ReplaySpec(
        capacity=capacity,
        length=length,
        context=context,
        priority_exponent=alpha,
        importance_exponent=beta,
        keep=nothing if more.get("starts") == "rows" else nets.without_frames,
        restore=lambda kept, observation, first: nets.with_frames(kept, observation, first, frames),
        priority=priority,
        **settings,
    )


SQUARE = np.array([[0.0, 0.25], [0.5, 0.75]], np.float32)
"""The offsets of an observation from its row's number: it has a shape, which the ring does not keep."""


class Streams:
    """Endless streams of rows, every number of which is another; a rollout of any group can be cut off next."""

    def __init__(self, seed, context, T=T):
        self.rng, self.context, self.T = np.random.default_rng(seed), context, T
        self.rows = [
            [] for _ in range(GROUPS * B)
        ]  # of each lane: (observation, reward, discount, first, last, action)
        self.counts = np.zeros(GROUPS, np.int32)

    def _row(self, lane, t):
        # A break here and there, without a last row before it.
        first = t == 0 or self.rng.random() < 0.15
        number = np.float32(1000 * lane + t)
        return (number + SQUARE, number + 0.25, 1.0, first, False, 10_000 * lane + t)

    def rollout(self, group):
        lanes, T = np.arange(group * B, (group + 1) * B), self.T
        begin = self.counts[group] * T
        for lane in lanes:
            while len(self.rows[lane]) < begin + T + 1:
                self.rows[lane].append(self._row(lane, len(self.rows[lane])))
        columns = [
            np.stack([np.stack([self.rows[l][begin + t][i] for l in lanes]) for t in range(T + 1)]) for i in range(6)
        ]
        observation, reward, discount, first, last = (np.asarray(c) for c in columns[:5])
        actions = columns[5][:T].astype(np.int32)
        self.counts[group] += 1
        frames = np.stack([self.frames(lane, begin) for lane in lanes])
        state = nets.ActorState((jnp.asarray(observation[0, :, 0, 0]) + 0.5,), (), jnp.asarray(frames))
        steps = TimeStep(*map(jnp.asarray, (
            observation.astype(np.float32), reward.astype(np.float32), discount.astype(np.float32), first, last
        )))  # fmt: skip
        version = jnp.broadcast_to(jnp.int32(self.counts[group]), (T, B))
        extras = {"double": jnp.asarray(2.0 * actions, jnp.float32)}
        return Trajectory(steps, jnp.asarray(actions), extras, state, version, jnp.asarray(lanes, jnp.int32))

    @property
    def observations(self):
        return jax.ShapeDtypeStruct((T + 1, B, *SQUARE.shape), jnp.float32)

    def frames(self, lane, row):
        """The `context` observations before a row in its episode, zeros where there are none."""
        out = []
        for back in range(self.context, 0, -1):
            # An observation counts if no episode opened between it and the row before.
            inside = row - back >= 0 and not any(self.rows[lane][r][3] for r in range(row - back + 1, row))
            out.append(self.rows[lane][row - back][0] if inside else np.zeros_like(SQUARE))
        return np.array(out, np.float32)


def nothing(state):
    return nets.ActorState((), ())


def filled(spec, order, seed=0, T=T):
    streams = Streams(seed, spec.context, T)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    add = jax.jit(lambda ring, trajectory, group, number: buffer.add(ring, trajectory, group, number))
    ring = None
    for group in order:
        number = int(streams.counts[group])
        trajectory = streams.rollout(group)
        ring = buffer.init(trajectory) if ring is None else ring
        ring = add(ring, trajectory, jnp.int32(group), jnp.int32(number))
    return buffer, ring, streams


def eligible(buffer, spec, streams):
    """(lane, row) of all sequences that are all there, by brute force."""
    found, T = set(), streams.T
    every_row = spec.starts == "rows"
    for lane in range(GROUPS * B):
        end = int(streams.counts[lane // B]) * T
        for start in range(0, end, 1 if every_row else T):
            rows = range(start - spec.context, start + spec.length)
            there = rows[0] >= 0 and rows[-1] < end and rows[0] // T > end // T - 1 - buffer.shape.slots
            if there and not (every_row and streams.rows[lane][start + 1][3]):
                found.add((lane, start))
    return found


def sampled(buffer, spec, ring, counts, n, times, num_shards=1):
    draw = lambda ring, key: buffer.sample(ring, counts, key, n, spec.importance_exponent)  # noqa: E731
    keys = jax.random.split(jax.random.key(1), (times, num_shards))
    rings = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_shards, *x.shape)), ring)
    run = jax.jit(
        lambda keys: jax.lax.map(lambda key: harness.over_shards(lambda _, r, k: draw(r, k), 0, rings, key), keys)
    )
    return run(keys)
