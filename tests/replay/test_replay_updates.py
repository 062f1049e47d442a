"""Updates from a replay: their number, the rollouts that they learn from, and their metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, replay, spaces
from podracer.learning import learner
from podracer.types import EnvSpec
from tests.support import harness, tiers
from tests.support.small_replay import GROUPS, SQUARE, B, Streams, T, spec_of


class Learns:
    """An agent that learns nothing and tells what it was given."""

    class config:  # noqa: N801
        rollout_length = T

    reanalyse = target_params = refresh = refresh_params = None

    def __init__(self, spec):
        self.replay, self.name = spec, "learns"

    def learn(self, state, batch, progress, key):
        seen = jnp.sum(batch.trajectory.timesteps.reward)
        return state + 1, {"seen": seen}, jnp.ones(batch.weight.shape)


@pytest.mark.parametrize(
    ("ratio", "batch"),
    [(0.75, 8), *tiers.slow((2.5, 2), (1.0, 6), (0.1, 8), (3.0, 1))],
)
def test_the_ratio_is_counted(ratio, batch):
    spec = spec_of(ratio=ratio, batch_size=batch, min_size=12, capacity=60)
    core = learner.make(Learns(spec), SQUARE, lanes=B, groups=GROUPS, num_shards=1)
    streams = Streams(0, spec.context)
    learn = harness.alone(core.learn)
    state, counts, ring = jnp.int32(0), core.counts(), None
    updates, added = [], 0
    for i in range(60):
        group = i % GROUPS
        trajectory = streams.rollout(group)
        ring = core.ring(trajectory) if ring is None else ring
        state, counts, ring, metrics = learn(
            state, counts, ring, trajectory, jnp.int32(group), jnp.float32(0), jax.random.key(i)
        )
        ready = int(metrics["replay/size"]) >= 12
        updates.append(int(metrics["replay/updates"]))
        assert float(metrics["replay/ratio"]) == pytest.approx(updates[-1] * batch / B)
        added += B * ready
        assert int(metrics["replay/size"]) == int(jnp.sum(ring.priority > 0))
        assert ready or updates[-1] == 0
        assert sum(updates) * batch <= ratio * added + 1e-6 < (sum(updates) + 1) * batch
    assert int(state) == sum(updates) > 0
    np.testing.assert_array_equal(counts.rollouts, streams.counts)
    assert int(counts.batches) == 60


def test_a_ratio_that_never_learns_is_refused():
    """Also one of an agent's own, and R2D2's, which is made of sequences and rounded."""
    for config in (
        *(agents.DQNConfig, agents.R2D2Config, agents.AlphaZeroConfig),
        *(agents.EfficientZeroConfig, agents.MuZeroConfig),
    ):
        with pytest.raises(ValueError, match=f"{config.__name__}.replay_ratio=0.0: must be at least 0.0001"):
            config(replay_ratio=0.0)
    for ratio in (0.0, 32 / 1e6):
        with pytest.raises(
            ValueError,
            match=r"^ReplaySpec.ratio=.*: learns would never learn, with .* per sequence added; use 0.0001 or",
        ):
            learner.make(Learns(spec_of(ratio=ratio)), SQUARE, lanes=B, groups=GROUPS, num_shards=1)
    config = agents.R2D2Config(replay_ratio=4e-4, trace_length=80, rollout_length=8, burn_in=8, hidden_sizes=(4,))
    spec = EnvSpec("seen", spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))
    with pytest.raises(
        ValueError, match=r"^replay_ratio=0.0004: r2d2 would never learn, with 4e-05 sequences .*; use 0.001 or more"
    ):
        learner.make(agents.r2d2.make(spec, config), jnp.zeros(2), lanes=8, groups=1, num_shards=1)


def test_old_rollouts_join_new_ones():
    """Half of a batch is a rollout from before, or the newest one again while there is none."""
    spec = spec_of(length=T + 1, capacity=30, alpha=0.0, beta=0.0, fraction=0.5)
    agent = Learns(spec)
    seen = []
    agent.learn = lambda state, trajectory, progress, key: (state + 1, {"rows": trajectory.timesteps.observation})
    core = learner.make(agent, SQUARE, lanes=B, groups=GROUPS, num_shards=1)
    streams = Streams(0, spec.context)
    learn = harness.alone(core.learn)
    state, counts, ring = jnp.int32(0), core.counts(), None
    for i in range(40):
        trajectory = streams.rollout(i % GROUPS)
        ring = core.ring(trajectory) if ring is None else ring
        state, counts, ring, metrics = learn(
            state, counts, ring, trajectory, jnp.int32(i % GROUPS), jnp.float32(0), jax.random.key(i)
        )
        rows = np.asarray(metrics["rows"])[..., 0, 0]
        new = np.asarray(trajectory.timesteps.observation)[..., 0, 0]
        np.testing.assert_array_equal(rows[:, :B], new)
        if int(metrics["replay/size"]) == 0:
            assert i < 2 * GROUPS
            np.testing.assert_array_equal(rows[:, B:], new)
        else:
            # Stretches of streams that begin where rollouts do, older than the newest of that lane.
            np.testing.assert_array_equal(np.diff(rows[:, B:], axis=0), 1)
            lane, row = np.divmod(rows[0, B:].astype(int), 1000)
            np.testing.assert_array_equal(row % T, 0)
            assert np.all(row // T < streams.counts[lane // B] - 1)
            seen += list(zip(lane, row))
    assert int(state) == 40
    assert len(set(seen)) > 30
    with pytest.raises(ValueError, match=r"use 0.5, or n / \(n \+ 4\)"):
        learner.make(Learns(spec._replace(fraction=0.3)), SQUARE, lanes=4, groups=1, num_shards=1)


def test_a_rollout_must_fit_into_a_sequence():
    with pytest.raises(ValueError, match="lower rollout_length to 3 or less"):
        replay.make(spec_of(length=4), SQUARE, rollout_length=4, lanes=1, groups=1, num_shards=1)
    with pytest.raises(ValueError, match="batch_size=8 is not divisible by the 3 shards; use 9, or another multiple"):
        learner.make(Learns(spec_of()), SQUARE, lanes=1, groups=1, num_shards=3)


def test_means_are_of_updates():
    sums = {"loss/total": np.array([6.0]), "replay/updates": np.array([3.0]), "replay/size": np.array([40.0])}
    means = learner.means(sums, 4)
    assert {name: float(x[0]) for name, x in means.items()} == {
        "loss/total": 2.0, "replay/updates": 0.75, "replay/size": 10.0
    }  # fmt: skip
    nothing = {"loss/total": np.array([0.0]), "replay/updates": np.array([0.0])}
    assert np.isnan(learner.means(nothing, 4)["loss/total"][0])
    assert float(learner.means({"loss/total": np.array([6.0])}, 4)["loss/total"][0]) == 1.5
