"""Several tasks on the host: rows, closing, waking, saving and metrics of lanes of all, and rows that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import make, wrappers
from podracer import spaces
from podracer.environments.from_jax import SteppedEnvironments
from podracer.environments.host_tasks import HostTasks
from podracer.environments.tasks import Tasks
from podracer.types import EnvSpec, HostStep
from tests.support import harness
from tests.support.told import TOLD, Host, HostRunning, Told

B = 6


def test_rows_of_the_host() -> None:
    log: list[Any] = []
    wide, narrow = Told(1.0, 3, size=4, choices=3), Told(20.0, 2)
    tasks = HostTasks({"wide": Host(wide, log), "narrow": Host(narrow, log, raw=True)}, union="pad", task_input=True)
    assert tasks.spec == EnvSpec(
        "wide,narrow",
        spaces.Dict({"observation": spaces.Box(0.0, 1000.0, (4,)), "task": spaces.Box(0.0, 1.0, (2,))}),
        spaces.Discrete(3),
        3,
        metrics=("codes",),
        raw_scores=True,
        tasks=("wide", "narrow"),
    )
    running = tasks.make(4, 100)
    lanes, before = running.recv()
    running.send(lanes, np.array([2, 2, 1, 1]))
    _, rows = running.recv()
    # Both are sent their actions before one is waited for; an action that a task does not have is its action 0.
    calls = [("recv", 1.0), ("recv", 20.0)]
    made = [("make", 2, 100, False), ("make", 2, 102, False)]
    assert log == [*made, *calls, ("send", 1.0, [2, 1]), ("send", 20.0, [0, 1]), *calls]
    np.testing.assert_array_equal(lanes, range(4))
    shown = np.array([[1.0, 1.0, 0.0, 0.0], [20.0, 1.0, 0.0, 0.0]] * 2)
    np.testing.assert_array_equal(rows.observation["observation"], shown)
    np.testing.assert_array_equal(rows.observation["task"], np.eye(2)[[0, 1, 0, 1]])
    # reward, discount, first, last, raw score, game over: a task without raw scores has its own.
    alike = [[1.0, 20.0] * 2, [1.0] * 4, [0.0] * 4, [0.0] * 4, [1.0, 7.0] * 2, [0.0] * 4]
    np.testing.assert_array_equal(rows.scalars, alike)
    np.testing.assert_array_equal(rows.metrics, [[1.0, 20.0] * 2])
    for _ in range(2):
        running.send(lanes, np.zeros(4, np.int32))
        _, later = running.recv()
    np.testing.assert_array_equal(later.scalars[[3, 5]], [[1.0, 0.0] * 2] * 2)
    np.testing.assert_array_equal(before.observation["observation"][:, 1], 0.0)  # rows are not written to again
    running.close()
    assert log[-2:] == [("close", 1.0), ("close", 20.0)]
    zeros = HostStep.zeros(tasks.spec, 4)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), zeros) == jax.tree.map(lambda x: (x.shape, x.dtype), rows)
    # A task by itself has the same spaces, and its own place.
    narrow_alone = tasks.alone()["narrow"]
    assert (narrow_alone.spec.max_episode_steps, narrow_alone.spec.tasks) == (2, ())
    _, alone = narrow_alone.make(2, 5, evaluation=True).recv()
    assert log[-2] == ("make", 2, 5, True)
    np.testing.assert_array_equal(alone.observation["task"], [[0.0, 1.0]] * 2)
    np.testing.assert_array_equal(alone.observation["observation"], [[20.0, 0.0, 0.0, 0.0]] * 2)


def test_pure_jax_is_as_the_host() -> None:
    """Padding, actions and the task as an input."""
    wide, narrow = Told(1.0, 3, size=4, choices=3), Told(20.0, 2)
    settings: dict[str, Any] = {"union": "pad", "task_input": True}
    tasks = Tasks({"wide": wide, "narrow": narrow}, **settings)
    assert tasks.spec == HostTasks({"wide": Host(wide, []), "narrow": Host(narrow, [])}, **settings).spec
    shown = tasks.alone()["narrow"].observe(jnp.int32(1))
    np.testing.assert_array_equal(shown["observation"], [20.0, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(shown["task"], [0.0, 1.0])
    assert tasks.spec.observation_space.contains(harness.numbers_of(shown))
    bandit = wrappers.flatten()(make("bandit"))
    bandits = Tasks({"bandit": bandit, "wide": Told(choices=50)}, union="pad", task_input=False).alone()["bandit"]
    assert bandits.spec.action_space.num_values == 50  # type: ignore[union-attr]
    state, key = bandit.reset(jax.random.key(0)), jax.random.key(1)
    for action, acts_as in ((49, 0), (2, 2)):
        harness.assert_same(
            bandits.step(state, jnp.int32(action), key)[0], bandit.step(state, jnp.int32(acts_as), key)[0]
        )


class FaultyRunning(HostRunning):
    """Rows that are not what the spec says, or not of all lanes."""

    def recv(self) -> tuple[np.ndarray, HostStep]:
        lanes, rows = super().recv()
        match self.parent.told.code:
            case 1.0:
                return lanes[::-1], rows
            case 2.0:
                return lanes[:1], jax.tree.map(lambda x: x[..., :1], rows)
            case 3.0:
                return lanes, rows._replace(observation=rows.observation[:, :1])
        return lanes, rows._replace(observation=rows.observation.astype(np.float64))


class Faulty(Host):
    running = FaultyRunning


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1.0, r"faulty returned lanes \[1 0\]; actors need all 2, in order"),
        (2.0, r"faulty returned lanes \[0\]; actors need all 2, in order"),
        (3.0, r"faulty's rows have float32\[2, 1\] in observation, where its spec says float32\[2, 2\]"),
        (4.0, r"faulty's rows have float64\[2, 2\] in observation, where its spec says float32\[2, 2\]"),
    ],
)
def test_rows_of_a_task_that_are_not_what_its_spec_says(code: float, message: str) -> None:
    running = HostTasks({"right": Host(Told(), []), "faulty": Faulty(Told(code), [])}).make(4, 0)
    with pytest.raises(ValueError, match=message):
        running.recv()


class ShutRunning(HostRunning):
    """Can be woken, and fails to close."""

    def wake(self) -> None:
        self.parent.log.append(("wake", self.parent.told.code))

    def close(self) -> None:
        super().close()
        raise OSError("closed badly")


class Shut(Host):
    """Has numbers to log, and no lanes where its code is 2."""

    running = ShutRunning

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> Any:
        if self.told.code == 2.0:
            raise ValueError("no lanes today")
        return super().make(num_lanes, seed, evaluation=evaluation)

    def metrics(self) -> dict[str, float]:
        return {"busy": self.told.code}


def test_tasks_are_logged_woken_and_closed() -> None:
    log: list[Any] = []
    one, other = Shut(Told(1.0), log), Shut(Told(3.0), log)
    tasks = HostTasks({"one": one, "other": other})
    assert tasks.metrics() == {"busy/one": 1.0, "busy/other": 3.0}
    assert HostTasks([Host(Told(), log)]).metrics() == {}
    running = tasks.make(2, 0)
    assert running.wake
    running.wake()
    assert log[-2:] == [("wake", 1.0), ("wake", 3.0)]
    assert HostTasks({"one": one, "host": Host(Told(), log)}).make(2, 0).wake is None
    with pytest.raises(OSError, match="closed badly"):
        running.close()
    assert log[-2:] == [("close", 1.0), ("close", 3.0)], "both"
    # One that cannot be made closes those that were.
    with pytest.raises(ValueError, match="no lanes today"):
        HostTasks({"host": Host(Told(5.0), log), "two": Shut(Told(2.0), log)}).make(2, 0)
    assert log[-1] == ("close", 5.0)


@pytest.mark.slow
def test_saved_tasks_go_on() -> None:
    tasks = HostTasks({name: SteppedEnvironments(told) for name, told in TOLD.items()})
    assert tasks.saved
    assert not HostTasks([Host(Told(), [])]).saved
    one, other, lanes = tasks.make(B, 3), tasks.make(B, 9), np.arange(B)
    for _ in range(3):
        one.recv()
        one.send(lanes, np.zeros(B, np.int32))
    other.load(one.save())
    harness.assert_same(one.recv(), other.recv())
