"""An evaluation is watched as training is: what hangs is named, and signals are heard meanwhile."""

import signal
import threading
import time

import gymnasium
import numpy as np
import pytest

import podracer
from podracer.environments.gymnasium import GymnasiumEnvironments, GymnasiumOptions
from podracer.errors import ActorError, Closed
from podracer.evaluation import watchdog
from podracer.sebulba.actor_pool import ActorPool
from podracer.system import stopping
from tests.support import hosts


def test_what_hangs_is_named():
    released = threading.Event()

    def work(watch):
        with watch.waiting():
            pass
        time.sleep(0.3)  # what computes takes as long as it takes
        with watch.waiting():
            released.wait(20.0)

    with pytest.raises(ActorError, match=r"evaluation: steps has not answered for 0 s; .*env_timeout=0\.2"):
        watchdog.watched(work, "steps", timeout=0.2)
    released.set()


def test_who_watches_itself_is_woken():
    woken = threading.Event()

    def work(watch):
        watch.wake = woken.set
        with watch.waiting():
            assert woken.wait(20.0)
        raise Closed

    start = time.monotonic()
    with pytest.raises(Closed):
        watchdog.watched(work, "steps", lambda: time.monotonic() - start > 0.3, timeout=0.1)
    assert time.monotonic() - start < 1.0


def test_a_long_program_is_left_behind_for_a_signal():
    released, start = threading.Event(), time.monotonic()
    with pytest.raises(Closed):
        watchdog.watched(lambda watch: released.wait(20.0), "catch", lambda: True)
    assert time.monotonic() - start < 1.0
    released.set()


def test_results_and_errors_come_through(monkeypatch):
    monkeypatch.setattr(stopping, "SOON_SECONDS", 0.05)
    assert watchdog.watched(lambda watch: 3, "steps") == 3
    with pytest.raises(ZeroDivisionError):
        watchdog.watched(lambda watch: 1 / 0, "steps")


def fail(watch=None):
    raise ActorError("a process that steps lanes is gone")


def test_errors_that_come_of_a_signal_are_none():
    """A terminal, SLURM and `timeout` send it to all processes, those of environments first."""
    looks = iter(range(3))
    late = lambda: next(looks, None) is None  # noqa: E731
    with pytest.raises(Closed):
        watchdog.watched(fail, "steps", late)

    class Broken(ActorPool):
        def __init__(self):
            self.context, self.actors = None, []

        check = fail

    looks = iter(range(3))
    assert Broken().next_rollouts(0, late) is None


def test_processes_that_environments_start_do_not_hear_ctrl_c():
    blocked = lambda watch: signal.pthread_sigmask(signal.SIG_BLOCK, [])  # noqa: E731 - and so do theirs
    assert signal.SIGINT in watchdog.watched(blocked, "steps")
    assert signal.SIGINT not in blocked(None)


@pytest.mark.slow
def test_lanes_with_processes_do_not_hear_ctrl_c():
    running = GymnasiumEnvironments("CartPole-v1", GymnasiumOptions("async")).make(1, 0)
    try:
        (process,) = running._running._vector.processes
        with open(f"/proc/{process.pid}/status") as status:
            (mask,) = (line.split()[1] for line in status if line.startswith("SigBlk"))
        assert int(mask, 16) & 1 << signal.SIGINT - 1
    finally:
        running.close()


class Stuck(gymnasium.Env):
    """Hangs in the first evaluation, at its third step."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    hangs = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3 and Stuck.hangs and threading.current_thread().name == "evaluation":
            Stuck.hangs -= 1
            time.sleep(3.0)
        return np.zeros(1, np.float32), 1.0, self.steps >= 5, False, {}


@pytest.mark.slow
def test_a_run_goes_on_after_an_evaluation_that_hung(tmp_path, capfd):
    """From its checkpoint, with the evaluation; where it may, it begins the evaluation again by itself."""
    config = {"rollout_length": 5, "hidden_sizes": (4,)}
    settings = {"config": config, "num_envs": 2, "eval_every": 100, "eval_episodes": 2, "env_timeout": 1.0}
    settings |= {"total_steps": 200, "checkpoint_every": 100, "progress": False}
    Stuck.hangs = 1
    with pytest.raises(podracer.ActorError, match="evaluation: Stuck has not answered for 1 s"):
        podracer.train("vtrace", Stuck, run_dir=tmp_path / "run", **settings)
    (steps,) = (int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps < 200
    assert hosts.within(5.0, lambda: all(thread.name != "evaluation" for thread in threading.enumerate()))
    Stuck.hangs = 1
    again = podracer.train("vtrace", Stuck, run_dir=tmp_path / "run", resume=True, env_restarts=1, **settings)
    assert "Evaluating again (0 restart(s) left)." in capfd.readouterr().err
    assert next(row["env_steps"] for row in again.history if "eval/return_mean" in row) == steps
    assert again.summary["complete"]
