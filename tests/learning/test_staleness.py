"""The age of the samples that updates learn from: metrics against closed forms, and against the priorities
themselves."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from podracer import topology
from podracer.learning import learner
from podracer.learning.learner import ReplayState
from podracer.sebulba.replay_devices import SplitReplay
from podracer.topology import collectives
from podracer.types import ActorParams, LearnerState
from tests.support import harness
from tests.support.small_replay import GROUPS, SQUARE, B, Streams, T, rows_of

INTERVAL = 25
ZERO: Any = jnp.float32(0)
NAMES = (
    *("reanalyse/staleness", "reanalyse/staleness_max", "reanalyse/staleness_ratio"),
    *("replay/priority_staleness", "replay/priority_staleness_max"),
)


class Ages:
    """An agent that sums rewards of what it is given, and whose priorities say which update they are of.

    From update `hyper["frozen"]` on, nothing is copied to what sweeps.
    """

    class config:  # noqa: N801
        rollout_length = T

    name = "ages"

    def __init__(self, spec: Any):
        self.replay = spec
        self.refresh = self._refresh if spec.refresh_interval else None

    def init(self, frozen: int) -> LearnerState:
        hyper: dict[str, jax.Array] = {"frozen": jnp.int32(frozen)}
        return LearnerState(jnp.float32(0), (), hyper, jnp.int32(0), (jnp.int32(0), jnp.int32(0)))

    def learn(self, state: LearnerState, batch: Any, progress: Any, key: Any) -> Any:
        number = state.num_updates + 1
        target, sweep = state.aux
        target = jnp.where(number % INTERVAL == 0, number, target)
        if self.replay.refresh_interval:
            sweep = jnp.where(
                (number % self.replay.refresh_interval == 0) & (number < state.hyper["frozen"]), number, sweep
            )
        params = 0.9 * state.params + collectives.global_sum(jnp.sum(batch.trajectory.timesteps.reward))
        state = state._replace(params=params, num_updates=number, aux=(target, sweep))
        return state, {}, jnp.ones(batch.weight.shape)

    def target_params(self, state: LearnerState, progress: Any) -> ActorParams:
        return ActorParams((), state.aux[0])

    def refresh_params(self, state: LearnerState, progress: Any) -> ActorParams:
        return ActorParams((), state.aux[1])

    def reanalyse(self, actor: ActorParams, batch: Any, key: Any) -> Any:
        return batch

    def _refresh(self, actor: ActorParams, rows: Any, age: jax.Array) -> jax.Array:
        return jnp.broadcast_to(1.0 + actor.version.astype(jnp.float32), age.shape)


def spec_of(**settings: Any) -> Any:
    return rows_of(context=0, **({"capacity": 200, "target_interval": INTERVAL, "alpha": 1.0} | settings))


class Run:
    """Updates of an agent from a ring that rollouts are added to."""

    def __init__(self, spec: Any):
        self.agent = Ages(spec)
        core = learner.make(self.agent, SQUARE, lanes=B, groups=GROUPS, num_shards=1)
        assert core.steps is not None
        self.steps, self.streams = core.steps, Streams(0, 0)
        self.counts = core.counts()
        self._add = harness.alone(self.steps.add)
        self._run_pending = harness.alone(self.steps.run_pending_updates)  # type: ignore[arg-type]
        self.ring: Any = None
        for group in range(GROUPS):
            self.add(group, core.ring)
        for group in [0, 1] * 4:
            self.add(group)
        self._begin = self.counts, self.ring, copy.deepcopy(self.streams)
        self.again()

    def again(self, frozen: int = 1_000_000) -> None:
        """From before the first update."""
        self.state = self.agent.init(frozen)
        self.counts, self.ring, self.streams = *self._begin[:2], copy.deepcopy(self._begin[2])

    def add(self, group: int, ring_of: Any = None) -> None:
        trajectory = self.streams.rollout(group)
        if self.ring is None:
            self.ring = ring_of(trajectory)
        self.counts, self.ring, _ = self._add(self.counts, self.ring, trajectory, jnp.int32(group))

    def run_pending(self, draws: int, key: int = 0) -> dict[str, float]:
        self.state, self.counts, self.ring, sums = self._run_pending(
            self.state, self.counts, self.ring, jnp.int32(draws), ZERO, jax.random.key(key)
        )
        return {name: float(x) for name, x in sums.items()}


def ahead(run: Run, updates: int) -> dict[str, float]:
    """The same, with the next group prepared while this one is learnt from, behind a first interval."""
    device = jax.devices("cpu")[0]
    layout = topology.make_host(num_envs=1, envs_per_actor=1, devices=[device])
    mesh = Mesh(np.asarray([device]), (topology.DATA_AXIS,), axis_types=(AxisType.Auto,))
    place = SplitReplay(run.steps, layout, mesh, reanalyses=True, prefetch=True)
    ring = jax.tree.map(lambda x: x[None], run.ring)
    state = jax.tree.map(jnp.copy, run.state)  # which learning consumes
    replay_state = ReplayState(run.counts, ring, place.empty_prefetched(state, run.counts, ring))
    sums: Any = ()
    for number in (INTERVAL, updates):
        state, replay_state, sums = place._run_pending(
            place._jitted,
            state,
            replay_state,
            (dict.fromkeys(NAMES, ZERO), {}),
            number // run.agent.replay.updates_per_draw,
            ZERO,
            jax.random.key(0),
        )
    return {name: float(x) for name, x in sums[0].items()}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_targets_are_as_old_as_the_closed_forms_say(group: int) -> None:
    """(interval - 1) / 2 updates, and G more where a group is prepared ahead."""
    run, updates = Run(spec_of(updates_per_draw=group)), 4 * INTERVAL
    behind = ahead(run, updates)  # of the learner that is where it began
    for sums, more in ((run.run_pending(updates // group), 0), (behind, group)):
        mean = (INTERVAL - 1) / 2 + more
        assert sums["reanalyse/staleness"] / updates == mean
        assert sums["reanalyse/staleness_max"] == INTERVAL - 1 + more
        assert sums["reanalyse/staleness_ratio"] / updates == pytest.approx(mean / (INTERVAL / 2))
        assert sums["replay/priority_staleness"] / updates == (group - 1) / 2 + more
        assert sums["replay/priority_staleness_max"] == group - 1 + more
    averages = learner.means({name: np.float64(x) for name, x in behind.items()} | {"replay/updates": updates}, 7)
    assert averages["reanalyse/staleness_max"] == INTERVAL - 1 + group, "the largest is no sum"


def refreshed(run: Run) -> list[tuple[int, float, float]]:
    """By update drawn at: the age of priorities as a metric, and which update they say they are of."""
    rng, found = np.random.default_rng(1), []
    for number in range(0, 60, 2):
        for group in rng.integers(0, GROUPS, rng.integers(0, 3)):
            run.add(int(group))
        newest = float(jnp.max(run.ring.priority))  # those of what was added since are no larger
        sums = run.run_pending(1)
        assert sums["refresh/age_max"] == sums["refresh/age"] / 2
        found.append((number, sums["refresh/age_max"], newest - 1.0))
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_priorities_are_never_older_than_two_sweeps() -> None:
    """The bound holds whatever is added between the parts of a sweep."""
    run = Run(spec_of(updates_per_draw=2, refresh_interval=10))
    for number, age, version in refreshed(run)[10:]:
        assert age == number - version
        assert 10 <= age < 20
    run.again(frozen=31)
    assert refreshed(run)[-1][1] == 58 - 30, "what is not renewed shows"


@pytest.mark.slow
@pytest.mark.nightly
def test_what_a_sweep_makes_no_update_writes_over() -> None:
    """Priorities that learning finds (1 here) are told and not written, where sweeps renew them; else they are written."""
    for interval, written in ((0, True), (10, False)):
        run = Run(spec_of(updates_per_draw=2, refresh_interval=interval))
        run.ring = run.ring._replace(priority=jnp.where(run.ring.priority > 0, 7.0, 0.0))
        before = np.asarray(run.ring.priority)
        sums = run.run_pending(2)  # of the five parts of a sweep
        assert sums["replay/priority"] / sums["replay/updates"] == 1.0
        changed = np.asarray(run.ring.priority) != before
        assert changed.any() == written
        assert (np.asarray(run.ring.priority)[changed] == 1.0).all()


@pytest.mark.slow
def test_without_priorities_a_sweep_changes_nothing() -> None:
    learners = []
    for interval in (0, 10):
        run = Run(spec_of(updates_per_draw=2, refresh_interval=interval, alpha=0.0))
        run.run_pending(20)
        learners.append(float(run.state.params))
    assert learners[0] == learners[1] != 0.0
