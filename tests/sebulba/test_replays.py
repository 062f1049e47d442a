"""Sebulba's replays: sequences of the counting environment keep the contract, and the host's memory is the device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import replay
from podracer.sebulba import learner_loop
from podracer.trajectories import by_lane
from tests.support import counting, harness, tiers
from tests.support.small_sebulba import B, T, agent_of, driver_of, run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_shards"), [("dqn", 2), ("r2d2", 1), *tiers.nightly(("muzero", 2), ("r2d2", 2))])
def test_replayed_sequences_keep_the_contract(name, num_shards):
    """Two actors fill a ring in whatever order they come: every sequence is a stretch of one lane's stream."""
    agent = agent_of(name, core_size=4)
    driver = driver_of(agent, threads=2, num_shards=num_shards)
    final, _, progress, _ = run(driver, total_steps=3000)
    counts, rings, _ = final.replay_state
    assert int(counts.batches) * T * B >= 3000
    assert np.min(counts.rollouts) > 3
    assert int(final.learner.num_updates[0]) == progress[-1].updates > 10
    lanes = B // num_shards
    spec = agent.replay._replace(observation_rows=None)  # whatever a window brings, all of its rows are stored
    observation = jnp.zeros(rings.rows.observation.shape[3:])
    buffer = replay.make(spec, observation, rollout_length=T, lanes=lanes, groups=2, num_shards=num_shards)
    seen = []
    for shard in range(num_shards):
        ring = jax.tree.map(lambda x, s=shard: x[s], rings)
        own = [actor * B + shard * lanes + i for actor in range(2) for i in range(lanes)]
        np.testing.assert_array_equal(ring.lane, own)
        index = jnp.flatnonzero(ring.priority > 0).astype(jnp.int32)
        generation, newest = buffer.generation_of(index, counts.rollouts)
        at = replay.Sample(index, generation, jnp.ones(index.shape), newest - generation)
        sequences = harness.numbers_of(buffer.gather(ring, at))
        seen.append(sequences.timesteps.observation[0, :, :2])
        memory = sequences.actor_state
        for i in range(len(index)):
            one = by_lane(lambda axis, x, i=i: np.take(x, [i], axis), sequences)
            counting.check_trajectory(one._replace(actor_state=(), extras=()))
        if name == "r2d2":
            assert np.any(np.abs(memory.core[0]) > 0)
        else:
            assert not np.any(sequences.timesteps.first[1]), "masked transitions are not there"
            before, after = memory.frames[:, 0], sequences.timesteps.observation[0]
            goes_on = after[:, 1] > 0
            np.testing.assert_array_equal(before[goes_on, :2], after[goes_on, :2] - [0, 1])
    rows = np.concatenate(seen)
    assert len(np.unique(rows, axis=0)) == len(rows) >= 100
    if name in ("dqn", "muzero"):  # an update for 20 rows since there are 100
        assert abs(progress[-1].updates - (int(counts.batches) * T * B - 100) / 20) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_shards"),
    [
        *[("r2d2", 2), ("dqn", 2), ("vtrace with replay", 2)],
        *tiers.nightly(("r2d2", 1), ("muzero", 2), ("vtrace with replay", 1)),
    ],
)
def test_a_replay_in_the_hosts_memory_is_one_on_the_device(name, num_shards, monkeypatch):
    monkeypatch.setattr(learner_loop, "SECONDS_PER_REPORT", 0.0)  # of every rollout, with updates and without
    ends, reports = [], []
    for memory in ("device", "host"):
        driver = driver_of(agent_of(name, core_size=4), 2, "lockstep", num_shards=num_shards, replay_memory=memory)
        final, _, progress, _ = run(driver, total_steps=2000)
        ends.append(harness.numbers_of((final.learner, final.replay_state)))
        reports.append([p.metrics for p in progress])
    device, host = ends
    assert device[0].num_updates > 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), device, host)
    assert len(reports[0]) == len(reports[1]) > 20
    for expected, found in zip(*reports):
        assert found.keys() == expected.keys()
        for key in found.keys() - {key for key in found if key.endswith(("_share", "_depth"))}:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, atol=1e-5, err_msg=key)
