"""The counting environment's checks of trajectories: correct ones pass, and each fault of a driver has its sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.types import Environment, Trajectory
from tests.support import counting


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return list(itertools.islice(counting.collect(counting.CountingEnvironment(), 20, 4), 3))


def changed(trajectory: Trajectory, **rows: np.ndarray) -> Trajectory:
    """Replaces fields of a trajectory or of its time steps, by name."""
    steps = {name: array for name, array in rows.items() if name in trajectory.timesteps._fields}
    timesteps = trajectory.timesteps._replace(**steps)
    return trajectory._replace(timesteps=timesteps, **{name: rows[name] for name in rows if name not in steps})


def select_rows(trajectory: Trajectory, rows: list[int]) -> Trajectory:
    """Keeps these rows (the last one without its action), as a stream that lost the others would show."""
    return trajectory._replace(
        timesteps=jax.tree.map(lambda x: x[np.array(rows)], trajectory.timesteps),
        actions=trajectory.actions[np.array(rows[:-1])],
        policy_version=trajectory.policy_version[np.array(rows[:-1])],
    )


def one_lane(trajectory: Trajectory, lane: int = 0) -> Trajectory:
    """One lane, [T+1, 1]."""
    cut = jax.tree.map(lambda x: x[:, lane : lane + 1], trajectory._replace(lane=(), actor_state=()))
    return cut._replace(lane=trajectory.lane[lane : lane + 1])


def where(mask: np.ndarray) -> int:
    """The first row inside 1..T-1 of column 0 where `mask` holds."""
    return 1 + int(np.flatnonzero(np.asarray(mask)[1:-1, 0])[0])


def test_correct_trajectories_pass(trajectories: list[Trajectory]) -> None:
    assert isinstance(counting.CountingEnvironment(), Environment)
    for trajectory in trajectories:
        counting.check_trajectory(trajectory)
        counting.check_trajectory(jax.tree.map(jnp.asarray, trajectory))
    for previous, following in itertools.pairwise(trajectories):
        counting.check_contiguous(previous, following)
    # Both kinds of end occur, or the checks above say little.
    ends = np.concatenate([t.timesteps.discount[t.timesteps.last] for t in trajectories])
    assert {0.0, 1.0} <= set(ends.tolist())


def test_counting_observations_are_in_the_space(trajectories: list[Trajectory]) -> None:
    environment = counting.CountingEnvironment()
    observation = np.asarray(trajectories[0].timesteps.observation)
    assert all(environment.spec.observation_space.contains(x) for x in observation.reshape(-1, 3))
    with pytest.raises(ValueError, match="max_length"):
        counting.CountingEnvironment(max_length=32)


def test_episode_stats(trajectories: list[Trajectory]) -> None:
    """Summed over contiguous trajectories, they are what adding up the rewards in order gives."""
    count, length_sum, return_sum = 0, 0, 0.0
    rewards = np.concatenate([t.timesteps.reward[1:] for t in trajectories])
    lasts = np.concatenate([t.timesteps.last[1:] for t in trajectories])
    firsts = np.concatenate([t.timesteps.first[1:] for t in trajectories])
    for lane in range(rewards.shape[1]):
        total, length = 0.0, 0
        for reward, first, last in zip(rewards[:, lane], firsts[:, lane], lasts[:, lane], strict=True):
            total, length = total + reward, length + (not first)
            if last:
                count, length_sum, return_sum = count + 1, length_sum + length, return_sum + total
                total, length = 0.0, 0
    stats = [counting.episode_stats(trajectory)[:3] for trajectory in trajectories]
    np.testing.assert_allclose(np.sum(stats, axis=0), [return_sum, length_sum, count])


def corruptions() -> dict[str, tuple[str, Callable[[Trajectory], Trajectory]]]:
    """Name -> (what the error must say, how a buggy driver would spoil a one-lane trajectory)."""

    def roll(name: str) -> Callable[[Trajectory], Trajectory]:
        def spoil(t: Trajectory) -> Trajectory:
            array = t.actions if name == "actions" else getattr(t.timesteps, name)
            return changed(t, **{name: np.roll(array, 1, axis=0)})

        return spoil

    def drop(row_of: Callable[[Trajectory], int]) -> Callable[[Trajectory], Trajectory]:
        def spoil(t: Trajectory) -> Trajectory:
            gone = row_of(t)
            return select_rows(t, [row for row in range(len(t.timesteps.reward)) if row != gone])

        return spoil

    def middle(t: Trajectory) -> np.ndarray:
        return ~t.timesteps.first & ~t.timesteps.last

    def repeat(t: Trajectory) -> Trajectory:
        row = where(middle(t))
        return select_rows(t, [*range(row + 1), *range(row, len(t.timesteps.reward))])

    def add(row_of: Callable[[Trajectory], int], *amounts: float) -> Callable[[Trajectory], Trajectory]:
        """Adds to the tag, the step and the previous action of one row's observation."""

        def spoil(t: Trajectory) -> Trajectory:
            observation = np.array(t.timesteps.observation)
            observation[row_of(t)] += np.array(amounts, np.float32)
            return changed(t, observation=observation)

        return spoil

    def impossible_action(t: Trajectory) -> Trajectory:
        """An impossible action at a row where the environment ignores it, so that nothing else can tell."""
        actions = np.array(t.actions)
        actions[where(t.timesteps.last)] = -1
        return changed(t, actions=actions)

    def same_step(t: Trajectory) -> Trajectory:
        """SAME_STEP auto-reset: the final row is overwritten by the first row of the next episode."""
        t = drop(lambda t: where(t.timesteps.last))(t)
        rows = np.flatnonzero(t.timesteps.first[1:, 0] & ~t.timesteps.last[:-1, 0])
        last, reward = t.timesteps.last.copy(), t.timesteps.reward.copy()
        last[rows + 1], reward[rows + 1] = True, 3.0
        return changed(t, last=last, reward=reward)

    def same_key(t: Trajectory) -> Trajectory:
        """Every episode draws the same tag: only the first rows' tags tell, so lengths are made equal, too."""
        environment = counting.CountingEnvironment(max_length=1)
        t = one_lane(next(counting.collect(environment, 8, 1)))
        observation = t.timesteps.observation.copy()
        observation[..., 0] = observation[0, 0, 0]
        number = int(observation[0, 0, 0])
        discount = np.where(t.timesteps.last & (number % 2 == 1), np.float32(0), np.float32(1))
        return changed(t, observation=observation, discount=discount)

    return {
        "actions shifted": ("recorded action", roll("actions")),
        "rewards shifted": ("reward of another row", roll("reward")),
        "discounts shifted": ("wrong discount", roll("discount")),
        "firsts shifted": ("`first` is not", roll("first")),
        "lasts shifted": ("`last` is not", roll("last")),
        "observations shifted": ("`first` is not", roll("observation")),
        "reset row dropped": ("followed by a first row", drop(lambda t: where(t.timesteps.first))),
        "final row dropped": ("without a last row", drop(lambda t: where(t.timesteps.last))),
        "middle row dropped": ("rows lost", drop(lambda t: where(middle(t)))),
        "row repeated": ("rows lost", repeat),
        "same-step reset": ("`last` is not", same_step),
        "key reused": ("opened again", same_key),
        "truncation as termination": (
            "wrong discount",
            lambda t: changed(t, discount=np.where(t.timesteps.last, np.float32(0), t.timesteps.discount)),
        ),
        "reward on a first row": (
            "reward of another row",
            lambda t: changed(t, reward=t.timesteps.reward + t.timesteps.first),
        ),
        "clipped rewards": ("reward of another row", lambda t: changed(t, reward=np.clip(t.timesteps.reward, 0, 1))),
        "bootstrap row missing": ("actions must be", lambda t: t._replace(timesteps=select_rows(t, [0, 1]).timesteps)),
        "float actions": ("actions must be", lambda t: changed(t, actions=t.actions.astype(np.float32))),
        "integer flags": ("first must be", lambda t: changed(t, first=t.timesteps.first.astype(np.int32))),
        "observations lost": ("not a tag", lambda t: changed(t, observation=np.zeros_like(t.timesteps.observation))),
        "NaN": ("not a tag", lambda t: changed(t, observation=np.full_like(t.timesteps.observation, np.nan))),
        "another tag": ("another episode without", add(lambda t: where(middle(t)), 64, 0, 0)),
        "half a step": ("leaves its episode", add(lambda t: where(middle(t)), 0, 0.5, 0)),
        "episode too long": ("leaves its episode", add(lambda t: where(t.timesteps.last), 0, 1, 0)),
        "action before a first row": ("no previous action", add(lambda t: where(t.timesteps.first), 0, 0, 3)),
        "impossible action": ("impossible action", impossible_action),
        "older parameters": (
            "version decreased",
            lambda t: changed(t, policy_version=np.arange(len(t.actions), 0, -1, np.int32)[:, None]),
        ),
    }


@pytest.mark.parametrize("name", corruptions())
def test_corrupted_trajectories_fail(name: str, trajectories: list[Trajectory]) -> None:
    message, spoil = corruptions()[name]
    lane = one_lane(trajectories[0])
    counting.check_trajectory(lane)
    spoiled = spoil(lane)
    with pytest.raises(AssertionError, match=message):
        counting.check_trajectory(spoiled)


def test_batch_major_fails(trajectories: list[Trajectory]) -> None:
    t = trajectories[0]
    swapped = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), t._replace(lane=()))._replace(lane=t.lane)
    with pytest.raises(AssertionError, match="actions must be"):
        counting.check_trajectory(swapped)


def test_lanes_that_share_a_stream_fail(trajectories: list[Trajectory]) -> None:
    t = trajectories[0]
    copied = jax.tree.map(lambda x: np.repeat(x[:, :1], 4, axis=1), t._replace(lane=()))._replace(lane=t.lane)
    with pytest.raises(AssertionError, match="share a key"):
        counting.check_trajectory(copied)
    with pytest.raises(AssertionError, match="lanes must differ"):
        counting.check_trajectory(t._replace(lane=np.zeros_like(t.lane)))


def test_lanes_mixed_up_fail(trajectories: list[Trajectory]) -> None:
    """Actions sent back to the wrong lanes, and observations that change lanes half-way."""
    t = trajectories[0]
    with pytest.raises(AssertionError, match="recorded action"):
        counting.check_trajectory(t._replace(actions=t.actions[:, ::-1]))
    mixed = jax.tree.map(lambda x: np.concatenate([x[:10], x[10:, ::-1]]), t.timesteps)
    with pytest.raises(AssertionError, match="at row 10"):
        counting.check_trajectory(t._replace(timesteps=mixed))


def test_breaks(trajectories: list[Trajectory]) -> None:
    """A first row without a last row before it passes only where breaks are allowed; nothing else becomes allowed."""
    lane = one_lane(trajectories[0])
    broken = select_rows(lane, [r for r in range(21) if r != where(lane.timesteps.last)])
    counting.check_trajectory(broken, allow_breaks=True)
    with pytest.raises(AssertionError, match="without a last row"):
        counting.check_trajectory(broken)
    unsteady = select_rows(lane, [r for r in range(21) if r != where(~lane.timesteps.first & ~lane.timesteps.last)])
    with pytest.raises(AssertionError, match="rows lost"):
        counting.check_trajectory(unsteady, allow_breaks=True)


def test_not_contiguous(trajectories: list[Trajectory]) -> None:
    first, second, third = trajectories
    with pytest.raises(AssertionError, match="row T before it"):
        counting.check_contiguous(first, third)
    with pytest.raises(AssertionError, match="row T before it"):
        counting.check_contiguous(first, select_rows(second, list(range(1, 21))))
    with pytest.raises(AssertionError, match="other lanes"):
        counting.check_contiguous(first, second._replace(lane=second.lane[::-1]))
    with pytest.raises(AssertionError, match="version decreased"):
        counting.check_contiguous(first._replace(policy_version=first.policy_version + 5), second)
    for field in ("reward", "discount", "first", "last"):
        array = getattr(second.timesteps, field)
        opposite = (1 - array[:1].astype(np.float32)).astype(array.dtype)
        spoiled = changed(second, **{field: np.concatenate([opposite, array[1:]])})
        with pytest.raises(AssertionError, match=field):
            counting.check_contiguous(first, spoiled)


def test_contiguity_across_a_break(trajectories: list[Trajectory]) -> None:
    """A restart: every lane begins anew, which only `allow_breaks` accepts."""
    restarted = next(counting.collect(counting.CountingEnvironment(), 20, 4, seed=1))
    last = trajectories[-1]
    restarted = restarted._replace(policy_version=restarted.policy_version + 9)
    counting.check_contiguous(last, restarted, allow_breaks=True)
    with pytest.raises(AssertionError, match="observation of row 0"):
        counting.check_contiguous(last, restarted)
