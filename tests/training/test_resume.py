"""A run that was stopped, however rudely, and resumed ends as if nothing had happened: bit by bit."""

import functools
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

import podracer
from podracer import cli
from podracer.sebulba import learner_loop
from tests.support import tiers

pytestmark = pytest.mark.slow

TOTAL_STEPS = 6_000
PERIOD = 80
DQN = (
    f"train dqn memory_chain --env.length 3 --agent.batch-size 8 --agent.replay-ratio 2 --agent.target-interval {PERIOD // 4} "
    "--agent.replay-capacity 800 --agent.replay-min-size 160 --agent.reset-interval 50"
)
SAC = (
    "train sac pendulum --env.max-steps 9 --agent.policy-interval 2 --agent.target-policy --agent.n-step 2 "
    "--agent.batch-size 8 --agent.replay-ratio 2 --agent.replay-capacity 800 --agent.replay-min-size 160 "
    "--agent.normalize-observations --agent.normalize-rewards"
)
CASES = {
    # Everything that an agent can carry along: recurrent state and momentum; running moments and discounted returns.
    "vtrace": "train vtrace memory_chain --env.length 3 --agent.core lstm --agent.core-size 4 --agent.optimizer rmsprop "
    "--agent.momentum 0.9",
    "ppo": "train ppo memory_chain --env.length 3 --agent.normalize-observations --agent.normalize-rewards",
    # A replay with its priorities, a target network, and resets of it all but the replay.
    "r2d2": "train r2d2 memory_chain --env.length 3 --agent.core lstm --agent.core-size 4 --agent.burn-in 2 --agent.trace-length 12 "
    "--agent.batch-size 8 --agent.replay-ratio 9.6 --agent.replay-capacity 8000 --agent.replay-min-size 800 "
    "--agent.target-interval 7 --agent.reset-interval 10",
    # Updates that are due and not done: at checkpoints, and wherever in a period a signal comes.
    "dqn": f"{DQN} --mode lockstep",
    "dqn-sebulba": f"{DQN} --arch sebulba --mode lockstep --updates-per-call 1",
    "dqn-sebulba-2": f"{DQN} --agent.priority-exponent 0.5 --arch sebulba --mode lockstep --actor-threads 2",
    # Two targets, alpha, statistics, an optimiser's state for each tree, and updates in blocks of two.
    "sac": SAC,
    "sac-sebulba": f"{SAC} --arch sebulba --mode lockstep",
    # Both actors' environments, and the parameters that their next rollouts need.
    "sebulba": "train vtrace memory_chain --env.length 3 --agent.core lstm --agent.core-size 4 --arch sebulba --mode lockstep "
    "--actor-threads 2",
}
SEARCH_CASES = {
    # A tree of states is never kept from one action to the next; a replay is, two networks beside the newest, and a sweep
    # that is under way: all that MuZero has, and more.
    "efficientzero": "train efficientzero memory_chain --env.length 3 --arch sebulba --mode lockstep "
    "--agent.simulations 4 --agent.unroll-length 2 --agent.n-step 2 --agent.batch-size 8 --agent.replay-ratio 0.5 "
    "--agent.reanalyse-group 2 --agent.target-interval 4 --agent.refresh-interval 6 --agent.replay-capacity 400 "
    "--agent.replay-min-size 100",
}
# SIGTERM and SIGINT raise one flag, which is looked at between any two updates that are due as well.
INTERRUPTED = ("dqn-sebulba-2",)
TERMINATED = ("ppo", "sebulba")
SIGNALS = [(agent, signal.SIGKILL) for agent in ("vtrace", "r2d2", "dqn")]
SIGNALS += [(agent, signal.SIGINT) for agent in INTERRUPTED] + [(agent, signal.SIGTERM) for agent in TERMINATED]
SIGNALS += [
    pytest.param(agent, number, marks=pytest.mark.nightly)
    for agent, number in (
        ("dqn", signal.SIGINT),
        ("dqn-sebulba", signal.SIGINT),
        ("dqn-sebulba", signal.SIGKILL),
        ("dqn-sebulba-2", signal.SIGKILL),
        ("ppo", signal.SIGKILL),
        ("sac", signal.SIGKILL),
        ("sac-sebulba", signal.SIGKILL),
        ("sebulba", signal.SIGKILL),
        ("vtrace", signal.SIGINT),
    )
]
SETTINGS = "--num-envs 8 --num-shards 2 --eval-episodes 8 --agent.rollout-length 10 --agent.hidden-sizes 8"


def steps_of(agent):
    """Fewer where a step is a search."""
    return TOTAL_STEPS // 3 if agent in SEARCH_CASES else TOTAL_STEPS


def command(agent, run_dir, *more):
    steps = ("--total-steps", str(steps_of(agent)), "--eval-every", str(steps_of(agent)))
    return [*(CASES | SEARCH_CASES)[agent].split(), *SETTINGS.split(), *steps, "--run-dir", str(run_dir), *more]


def stored(run_dir):
    """Every array of the newest checkpoint by name, read with Orbax alone."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ocp.StandardCheckpointer().restore(run_dir / "checkpoints" / str(newest_of(run_dir)) / "state")


def newest_of(run_dir):
    """The steps of the newest checkpoint that is whole."""
    return max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the run directory of a run of an agent that nothing happened to."""

    @functools.cache
    def run(agent):
        run_dir = tmp_path_factory.mktemp(agent) / "run"
        assert cli.run(command(agent, run_dir, "--quiet")) == 0
        return run_dir

    return run


def inside(agent, number):
    """Returns True if a signal is to come inside of a period of 20 updates, which are done one at a time."""
    return agent == "dqn-sebulba" and number != signal.SIGKILL


def disturb(agent, run_dir, number):
    """Trains in a process of its own and sends it a signal after its third checkpoint; returns (code, stderr)."""
    # 40 checkpoints, so that there is time to hit it; so few that most of the time goes by between them.
    number_of = 10 if inside(agent, number) else 40
    every = str(steps_of(agent) // number_of)
    arguments = command(agent, run_dir, "--checkpoint-every", every, "--keep-checkpoints", "50")
    process = subprocess.Popen([sys.executable, "-m", "podracer", *arguments], stderr=subprocess.PIPE, text=True)
    checkpoints = run_dir / "checkpoints"
    deadline = time.monotonic() + 300

    def names():
        return [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []

    def wait_until(condition):
        while process.poll() is None and time.monotonic() < deadline and not condition():
            time.sleep(0.001)

    try:
        wait_until(lambda: sum(name.isdigit() for name in names()) >= 3)
        if number == signal.SIGKILL:  # in the middle of the next one, which has another name until it is whole
            wait_until(lambda: any(not name.isdigit() for name in names()))
        elif inside(agent, number):
            time.sleep(0.1)
        elif number == signal.SIGINT:  # wherever the run is by then
            time.sleep(0.02)
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, error


@pytest.mark.parametrize(("agent", "number"), SIGNALS, ids=lambda value: getattr(value, "name", value))
def test_stopped_and_resumed_is_the_same(agent, number, undisturbed, tmp_path):
    check_resumed(agent, undisturbed(agent), number, tmp_path)


@pytest.mark.nightly  # in the slow tier: replays, two networks and updates that are due (R2D2, DQN)
@pytest.mark.parametrize("agent", SEARCH_CASES)
def test_agents_that_search_resume_as_well(agent, tmp_path):
    reference = tmp_path / "undisturbed"
    assert cli.run(command(agent, reference, "--quiet")) == 0
    check_resumed(agent, reference, signal.SIGKILL, tmp_path)


def check_resumed(agent, reference, number, tmp_path):
    """A run that is stopped by a signal and resumed ends as the reference did, in every array."""
    for attempt in range(8):
        run_dir = tmp_path / f"run-{attempt}"
        code, error = disturb(agent, run_dir, number)
        if not inside(agent, number) or 0 < stored(run_dir)["replay_state.counts.pending_updates"] < PERIOD // 4:
            break
    else:
        pytest.fail("no signal came between the updates of a period")
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL, error
        assert not (run_dir / "summary.json").exists()
    else:
        assert code == -number, error
        assert "stopped by a signal at " in error
        assert f"continue with podracer resume {run_dir}" in error
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["complete"] is False
        assert 0 < summary["env_steps"] < steps_of(agent)
        assert (run_dir / "checkpoints" / str(summary["env_steps"])).is_dir(), "what was done is not lost"

    newest = newest_of(run_dir)
    if agent == "dqn" or (agent.startswith("dqn") and number == signal.SIGKILL):  # between calls, or at a milestone
        assert stored(run_dir)["replay_state.counts.pending_updates"] > 0
    kept = [row for row in rows_of(run_dir) if row["env_steps"] <= newest]
    # The first goes on writing checkpoints as often, which takes most of the time.
    by_name = agent == "ppo" and number == signal.SIGTERM
    again = ["resume", str(run_dir)] if by_name else command(agent, run_dir, "--resume")
    assert cli.run([*again, "--quiet"]) == 0
    assert rows_of(run_dir)[: len(kept)] == kept, "it did not go on, but began again"
    assert json.loads((run_dir / "summary.json").read_text())["complete"] is True
    before, after = stored(reference), stored(run_dir)
    assert set(before) == set(after)
    last = 1 if "--actor-threads 2" in (CASES | SEARCH_CASES)[agent] else 0
    acting = (
        ("actors.snapshots.environment", f"actors.published.{last}")
        if "--arch sebulba" in (CASES | SEARCH_CASES)[agent]
        else ("actors.lanes", "actors.key")
    )
    for part in ("learner.params", "learner.opt_state", "learner.hyper", "learner.num_updates", *acting):
        assert any(name.startswith(part) for name in before), part
    assert any(name.startswith("env_steps") for name in before)
    for name in before:
        np.testing.assert_array_equal(np.asarray(before[name]), np.asarray(after[name]), err_msg=name)
    same_rows(reference, run_dir)


def rows_of(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a process that is killed cuts its last line


def same_rows(reference: pathlib.Path, run_dir: pathlib.Path):
    """No update is missing from the metrics or counted twice, though calls were cut differently."""

    def episodes(directory):
        rows = rows_of(directory)
        updates = [row["updates"] for row in rows if "loss/total" in row]
        assert updates == sorted(set(updates))
        return updates[-1], sum(row.get("episode/count", 0) for row in rows)

    assert episodes(run_dir) == episodes(reference)


@pytest.mark.parametrize("arch", ["anakin", *tiers.nightly("sebulba")])
def test_a_replay_that_was_not_saved_is_filled_again(arch, tmp_path):
    settings = {
        "config": {
            "replay_capacity": 8_000,
            "replay_min_size": 2_000,
            "replay_ratio": 2.0,
            "core": "lstm",
            "core_size": 4,
        },
        "arch": arch,
        "num_envs": 8,
        "total_steps": 12_000,
        "eval_every": 12_000,  # each of which may write a checkpoint
        "checkpoint_every": 3_000,
        "checkpoint_replay": False,
        "keep_checkpoints": 10,
        "run_dir": tmp_path / "run",
        "progress": False,
    }
    podracer.train("r2d2", "catch", **settings)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for path in saved[2:]:
        shutil.rmtree(path)
    assert not [name for name in stored(tmp_path / "run") if "ring" in name]
    updates = podracer.load(tmp_path / "run").learner.num_updates[0]
    again = podracer.train("r2d2", "catch", **settings, resume=True)
    assert again.summary["complete"]
    assert again.summary["updates"] > int(updates) > 0
    steps = int(saved[1].name)
    sizes = [row["replay/size"] for row in again.history if "replay/size" in row and row["env_steps"] > steps]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < (12_000 - steps) / 18 + 8, "it began anew"


def test_updates_that_a_replay_owed_when_it_was_lost_behind_the_last_step_are_told(tmp_path, capsys, monkeypatch):
    drain = learner_loop.LearnerLoop.run_pending_updates

    def stopped_behind_the_last_step(self, should_stop, *rest):
        calls = iter(range(3))
        return drain(self, lambda: next(calls, None) is None if self.env_steps >= 800 else should_stop(), *rest)

    settings = {
        "config": {
            **{"replay_ratio": 2.0, "target_interval": 20, "batch_size": 8, "rollout_length": 10, "hidden_sizes": (8,)},
            **{"replay_capacity": 800, "replay_min_size": 160},
        },
        "arch": "sebulba",
        "mode": "lockstep",
        "num_envs": 8,
        "total_steps": 800,
        "updates_per_call": 1,
        "checkpoint_replay": False,
        "run_dir": tmp_path / "run",
        "resume": True,
    }
    with monkeypatch.context() as patched:
        patched.setattr(learner_loop.LearnerLoop, "run_pending_updates", stopped_behind_the_last_step)
        stopped = podracer.train("dqn", "catch", **settings)
    assert not stopped.summary["complete"]
    left = 20 - int(stopped.summary["updates"]) % 20  # of a period's 20
    assert left < 20
    capsys.readouterr()
    again = podracer.train("dqn", "catch", **settings)
    assert again.summary["complete"]
    assert again.summary["updates"] == stopped.summary["updates"]
    said = " ".join(capsys.readouterr().err.split())
    assert f"{left} updates were due when the run was stopped and are not done" in said
