"""An environment whose every row says which row it is, and the checks that a trajectory of it is complete.

The observation is float32 [3] = (tag, step, previous action). The tag is drawn at reset and holds the length and the
kind of end of its episode, so that a single row determines what its reward, discount, first and last must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, EpisodeStats, TimeStep, Trajectory, Transition

# A tag is (serial * _LENGTHS + length) * 2 + terminates, and must stay below 2^24: float32 holds it exactly.
_LENGTHS = 32
_SERIALS = 2**18
NO_ACTION = -1.0


class CountingState(NamedTuple):
    """Unbatched: `tag`, `step`, int32 []; `previous_action`, int32 [], -1 before the first."""

    tag: jax.Array
    step: jax.Array
    previous_action: jax.Array


@dataclasses.dataclass(frozen=True)
class CountingEnvironment:
    """Counts: row k of an episode has observation (tag, k, the action that led to it or -1) and reward k.

    Episodes have a uniformly random length in 1..max_length (at most 31), and terminate or are truncated with equal
    probability; both are drawn at reset. The return of an episode of length n is n (n + 1) / 2.
    """

    max_length: int = 6
    num_actions: int = 5

    def __post_init__(self):
        if not 1 <= self.max_length < _LENGTHS:
            raise ValueError(f"CountingEnvironment(max_length={self.max_length}): use 1 to {_LENGTHS - 1}.")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("counting", spaces.Box(-1.0, 2.0**24, (3,)), spaces.Discrete(self.num_actions), self.max_length)

    def reset(self, key: jax.Array) -> CountingState:
        serial_key, length_key, end_key = jax.random.split(key, 3)
        serial = jax.random.randint(serial_key, (), 0, _SERIALS)
        length = jax.random.randint(length_key, (), 1, self.max_length + 1)
        terminates = jax.random.bernoulli(end_key).astype(jnp.int32)
        return CountingState((serial * _LENGTHS + length) * 2 + terminates, jnp.int32(0), jnp.int32(-1))

    def step(self, state: CountingState, action: jax.Array, key: jax.Array) -> tuple[CountingState, Transition]:
        del key
        state = CountingState(state.tag, state.step + 1, action.astype(jnp.int32))
        last = state.step == state.tag // 2 % _LENGTHS
        terminated = last & (state.tag % 2 == 1)
        discount = jnp.where(terminated, jnp.float32(0), jnp.float32(1))
        return state, Transition(state.step.astype(jnp.float32), discount, last)

    def observe(self, state: CountingState) -> jax.Array:
        return jnp.stack([state.tag, state.step, state.previous_action]).astype(jnp.float32)


class _Rows(NamedTuple):
    """A trajectory taken apart as NumPy: what it says, [T+1, B], and what the tags say it must be."""

    tag: np.ndarray
    step: np.ndarray
    previous_action: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    first: np.ndarray
    last: np.ndarray
    length: np.ndarray
    terminates: np.ndarray


def _integers(tag: np.ndarray) -> np.ndarray:
    """Tags as int64; 0, which is no tag, where they are not finite."""
    return np.where(np.isfinite(tag), tag, 0).astype(np.int64)


def _rows(trajectory: Trajectory) -> _Rows:
    tag, step, previous_action = np.moveaxis(np.asarray(trajectory.timesteps.observation), -1, 0)
    observation, *others = (np.asarray(x) for x in trajectory.timesteps)
    del observation
    number = _integers(tag)
    return _Rows(tag, step, previous_action, *others, number // 2 % _LENGTHS, number % 2 == 1)


def _require(ok: np.ndarray, what: str, first_row: int = 0, **context: np.ndarray) -> None:
    """Raises AssertionError at the first False of `ok` [rows, B]; `context` arrays [rows, B] are quoted there."""
    ok = np.asarray(ok)
    if ok.all():
        return
    row, lane = (int(i) for i in np.argwhere(~ok)[0])
    quoted = "".join(f"; {name} = {np.asarray(array)[row, lane]}" for name, array in context.items())
    raise AssertionError(f"{what}: at row {first_row + row}, column {lane} ({int((~ok).sum())} in all){quoted}.")


def _require_layout(trajectory: Trajectory) -> None:
    """Shapes and dtypes: TimeStep [T+1, B], observation [T+1, B, 3], actions and versions [T, B], lane [B]."""
    timesteps = trajectory.timesteps
    shape = np.shape(timesteps.reward)
    if len(shape) != 2 or shape[0] < 2 or shape[1] < 1:
        raise AssertionError(f"reward must be [T+1, B] with T, B >= 1: it has shape {shape}.")
    rows, lanes = shape
    expected = {
        "observation": (timesteps.observation, (rows, lanes, 3), np.float32),
        "reward": (timesteps.reward, (rows, lanes), np.float32),
        "discount": (timesteps.discount, (rows, lanes), np.float32),
        "first": (timesteps.first, (rows, lanes), np.bool_),
        "last": (timesteps.last, (rows, lanes), np.bool_),
        "actions": (trajectory.actions, (rows - 1, lanes), np.int32),
        "policy_version": (trajectory.policy_version, (rows - 1, lanes), np.int32),
        "lane": (trajectory.lane, (lanes,), np.int32),
    }
    for name, (array, want_shape, want_dtype) in expected.items():
        array = np.asarray(array)
        if array.shape != want_shape or array.dtype != want_dtype:
            raise AssertionError(
                f"{name} must be {np.dtype(want_dtype)} {want_shape}: it is {array.dtype} {array.shape}."
            )


def _require_rows(rows: _Rows) -> None:
    """Checks each row by its own tag and step alone."""
    number, length = _integers(rows.tag), rows.length
    _require((rows.tag == number) & (number > 0) & (number < 2**24) & (length > 0), "not a tag", tag=rows.tag)
    _require(
        (rows.step == np.round(rows.step)) & (rows.step >= 0) & (rows.step <= length),
        "the step leaves its episode",
        step=rows.step,
        length=length,
    )
    opens, closes = rows.step == 0, rows.step == length
    _require(rows.first == opens, "`first` is not where the episode opens", step=rows.step, first=rows.first)
    _require(rows.last == closes, "`last` is not where the episode closes", step=rows.step, length=length)
    discount = np.where(closes & rows.terminates, 0.0, 1.0)
    _require(rows.discount == discount, "wrong discount", discount=rows.discount, expected=discount)
    _require(rows.reward == rows.step, "the reward of another row", reward=rows.reward, expected=rows.step)
    _require(
        (rows.previous_action == NO_ACTION) == opens,
        "a first row has no previous action, and every other row has one",
        previous_action=rows.previous_action,
        step=rows.step,
    )


def check_trajectory(trajectory: Trajectory, allow_breaks: bool = False) -> None:
    """Raises AssertionError, with what and where, unless a trajectory of `CountingEnvironment` obeys the contract.

    Checked: shapes and dtypes; every row's reward, discount, first and last against its own tag and step; that row
    t+1 continues the episode of row t with `actions[t]`, or opens a new one (another tag) right after a last row;
    that lanes are different streams, and policy versions never decrease.

    A break is a first row with no last row before it, as after a restarted pool. From the rows alone it cannot be
    told from an implementation that loses final rows, so breaks must be allowed explicitly.
    """
    _require_layout(trajectory)
    rows = _rows(trajectory)
    _require_rows(rows)
    now, then = _Rows(*(x[:-1] for x in rows)), _Rows(*(x[1:] for x in rows))
    actions = np.asarray(trajectory.actions)
    _require(actions >= 0, "an impossible action", action=actions)

    masked = then.first
    _require(masked | ~now.last, "a last row must be followed by a first row", 1, step=then.step)
    _require(~masked | now.last | allow_breaks, "a first row without a last row before it", 1, step_before=now.step)
    _require(~masked | (then.tag != now.tag), "the same episode was opened again", 1, tag=then.tag)
    _require(masked | (then.tag == now.tag), "another episode without a first row", 1, tag=then.tag, before=now.tag)
    _require(masked | (then.step == now.step + 1), "rows lost or repeated", 1, step=then.step, before=now.step)
    _require(
        masked | (then.previous_action == actions),
        "the recorded action is not the one that led here",
        1,
        action=actions,
        executed=then.previous_action,
    )

    version, lane = np.asarray(trajectory.policy_version), np.asarray(trajectory.lane)
    _require(np.diff(version, axis=0) >= 0, "the policy version decreased", 1, version=version[1:])
    if len(set(lane.tolist())) != len(lane):
        raise AssertionError(f"lanes must differ: {lane.tolist()}.")
    # Not all of them: two lanes may draw the same tag by chance.
    distinct = len({tuple(column) for column in rows.tag.T})
    if 2 * distinct <= len(lane) and len(lane) > 1:
        raise AssertionError(f"{len(lane)} lanes show only {distinct} different streams: do they share a key?")


def check_contiguous(previous: Trajectory, following: Trajectory, allow_breaks: bool = False) -> None:
    """Raises AssertionError unless `following` begins exactly where `previous` ended, in every lane.

    Same lanes in the same order; row T of `previous` equals row 0 of `following`; policy versions do not decrease.
    With `allow_breaks`, a lane whose row 0 is a first row may begin anew.
    """
    if not np.array_equal(previous.lane, following.lane):
        raise AssertionError(f"other lanes: {np.asarray(previous.lane)}, then {np.asarray(following.lane)}.")
    fresh = np.asarray(following.timesteps.first, bool)[0] & allow_breaks
    for name, old, new in zip(TimeStep._fields, previous.timesteps, following.timesteps, strict=True):
        old, new = np.asarray(old)[-1], np.asarray(new)[0]
        same = (old == new).reshape(len(fresh), -1).all(axis=1)
        for column in np.flatnonzero(~same & ~fresh):
            raise AssertionError(
                f"{name} of row 0 is not that of the row T before it: in column {column}, {old[column]} "
                f"became {new[column]}."
            )
    versions = np.asarray(previous.policy_version)[-1:], np.asarray(following.policy_version)[:1]
    _require(versions[1] >= versions[0], "the policy version decreased", version=versions[1], before=versions[0])


def episode_stats(trajectory: Trajectory) -> EpisodeStats:
    """The sums over episodes that ended in rows 1..T of a checked trajectory (row 0 is the previous one's row T)."""
    rows = _rows(trajectory)
    length = rows.length[1:][rows.last[1:]]
    sums = (length * (length + 1) / 2).sum(), length.sum(), length.size
    return EpisodeStats(*(np.float32(x) for x in sums))  # type: ignore[arg-type]


def collect(
    environment: CountingEnvironment, rollout_length: int, num_envs: int, seed: int = 0
) -> Iterator[Trajectory]:
    """Yields contiguous, correct NumPy trajectories [T+1, B] with random actions, from plain loops."""
    reset, step, observe = jax.jit(environment.reset), jax.jit(environment.step), jax.jit(environment.observe)
    rng = np.random.default_rng(seed)
    resets = 0

    def fresh() -> tuple[CountingState, TimeStep]:
        nonlocal resets
        resets += 1
        state = reset(jax.random.fold_in(jax.random.key(seed), resets))
        return state, TimeStep(np.asarray(observe(state)), np.float32(0), np.float32(1), np.True_, np.False_)

    def advance(state: CountingState, row: TimeStep, action: np.int32) -> tuple[CountingState, TimeStep]:
        if row.last:
            return fresh()
        state, transition = step(state, action, jax.random.key(0))
        reward, discount, last = (np.asarray(x) for x in transition[:3])
        return state, TimeStep(np.asarray(observe(state)), reward, discount, np.False_, last)

    lanes = [fresh() for _ in range(num_envs)]
    version = 0
    while True:
        rows, actions = [[row for _, row in lanes]], []
        for _ in range(rollout_length):
            actions.append(rng.integers(0, environment.num_actions, num_envs, np.int32))
            lanes = [advance(*lane, action) for lane, action in zip(lanes, actions[-1], strict=True)]
            rows.append([row for _, row in lanes])
        fields = [np.array([[row[i] for row in line] for line in rows]) for i in range(len(TimeStep._fields))]
        yield Trajectory(
            timesteps=TimeStep(*fields),  # type: ignore[arg-type]
            actions=np.array(actions),
            extras=(),
            actor_state=(),
            policy_version=np.full((rollout_length, num_envs), version, np.int32),  # type: ignore[arg-type]
            lane=np.arange(num_envs, dtype=np.int32),  # type: ignore[arg-type]
        )
        version += 1
