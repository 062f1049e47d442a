"""`podracer suite` in a shell: what is printed, what is refused, and exit codes."""

import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from podracer import cli
from podracer.cli import suite, train
from podracer.run import metrics
from podracer.suite import jobs, result, runner
from tests.support import fakes

PPO = "suite atari57 ppo --preset atari"


def run(command):
    return cli.run(shlex.split(command) if isinstance(command, str) else command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("suite atari", "unknown suite 'atari'; did you mean 'atari57' or 'atari100k'?"),
        ("suite atari57", "suite needs an agent"),
        ("suite atari57 pppo", "unknown agent 'pppo'; did you mean 'ppo'"),
        (f"{PPO} --games pong", "unknown game 'pong'; did you mean 'Pong'"),
        (f"{PPO} --games nature48", "unknown game 'nature48'; did you mean 'nature49'"),
        ("suite minatar ppo --games brekout", "unknown game 'brekout'; did you mean 'minatar_breakout'"),
        ("suite minatar ppo --protocol nature", "protocol='nature': minatar_asterix is not a game of Atari"),
        (f"{PPO} --part 0/4", "part='0/4': write I/N, a share I from 1 to N; the nearest is 1/4."),
        (f"{PPO} --part 5/4", "part='5/4': write I/N, a share I from 1 to N; the nearest is 4/4."),
        ("suite atari57 ppo --preset atar", "preset='atar': unknown; did you mean 'atari' or 'minatar'?"),
        ("suite atari57 ppo --preset rainbow", "preset='rainbow' is of dqn"),
        (f"{PPO} --protocol sede", "protocol='sede': unknown; did you mean 'seed'?"),
        (f"{PPO} --seed 3", "--seed is not for a suite: use --seeds."),
        (
            f"{PPO} --population 4",
            "--population is not for a suite: use --seeds and --side-by-side, or podracer sweep for",
        ),
        (f"{PPO} --member-seeds 3", "--member-seeds is not for a suite: use --seeds and --side-by-side."),
        (f"{PPO} --side-by-side", "--side-by-side: games of EnvPool have no populations; the suite minatar has them."),
        ("suite minatar ppo --side-by-side", "--side-by-side: give --num-envs, or a preset that has it, such as"),
        ("suite minatar ppo --side-by-side --num-envs 8 --arch sebulba", "--side-by-side: only Anakin has populations"),
        (
            f"suite minatar ppo --preset minatar --side-by-side --seeds {' '.join(map(str, range(41)))}",
            "--side-by-side: 41 seeds are more than 40",
        ),
        (f"{PPO} --pbt.interval 100", "--pbt.interval is not for a suite: its seeds do not copy each other."),
        (f"{PPO} --hyper.learning-rate 1e-3 1e-4", "--hyper.learning-rate has one value in a suite; podracer sweep"),
        (f"{PPO} --run-dir=x", "--run-dir is not for a suite: use --out."),
        (f"{PPO} --seeds 1 1", "--seeds=1 1: give one or more, from 0, each once."),
        ("suite atari57 r2d2 --preset atari", "protocol='seed' does not say how long to train; give --total-steps."),
        (f"{PPO} --workers 0", "--workers=0: must be at least 1."),
        (f"{PPO} --total-stps 3", "did you mean --total-steps?"),
        (f"{PPO} --total-steps 0", "RunConfig.total_steps=0: must be at least 1."),
        ("suite report", "suite report needs one or more directories"),
        ("suite atari100k", "suite needs an agent: podracer suite atari100k AGENT"),
        ("suite report .", "holds no result of a suite: it is empty."),
    ],
)
def test_bad_input_gets_one_line(command, message, capsys):
    code = run(command)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_help_is_there(capsys):
    for command in ("suite", "suite --help", "suite atari57 ppo --help", "suite report --help"):
        assert run(command) == 0
    assert "--part" in capsys.readouterr().out


def test_dry_run_prints_commands_that_are_its_parts(capsys, tmp_path):
    command = f"{PPO} --games atari100k Pong --seeds 0 2 --out {tmp_path}/o --total-steps 1e3 --agent.learning-rate=0.1"
    assert run(f"{command} --dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 52
    for line in lines[::17]:
        program, *argv = shlex.split(line)
        assert program == "podracer"
        assert run([*argv, "--dry-run"]) == 0
        assert capsys.readouterr().out.splitlines() == [line]
    assert not (tmp_path / "o").exists()


def test_a_share_without_runs_says_so(fake, capsys):
    for more in ("", " --dry-run"):
        assert run(f"{PPO} --games Pong Boxing --out o --part 3/5{more}") == 0
        assert capsys.readouterr() == ("", "--part 3/5 has no runs: there are 2.\n")


def test_runs_are_as_long_as_somebody_says():
    """The user, where the protocol does not."""
    length = lambda *flags: suite._settings(*flags)["run"]["total_steps"]  # noqa: E731
    assert length("r2d2", ["--preset", "atari", "--total_steps=500000"]) == 500_000
    assert length("pqn", ["--preset", "atari", "--protocol", "seed"]) == 50_000_000, "the preset"
    assert length("r2d2", ["--preset", "atari", "--protocol", "impala"]) == 50_000_000


def test_settings_are_those_of_the_run(tmp_path):
    """Written in other ways they are the same, and what only says how a run is kept is none."""
    command = ["dqn", "envpool:Pong-v5", "--preset", "fast_dqn"]
    found = train.settings(command)
    assert (found["agent"], found["preset"], found["protocol"]) == ("dqn", "fast_dqn", "fast_dqn")
    assert (found["agent_config"]["rollout_length"], found["run"]["num_envs"]) == (1250, 8)
    assert found["run"]["eval_every"] == 250_000
    assert found["env_options"]["fire_reset"] is True
    assert train.settings([*command, "--num-envs=8", "--total-steps", "5e7"]) == found
    assert train.settings([*command, "--agent.n-step", "3"]) != found
    of_suite = suite._settings("dqn", ["--preset", "fast_dqn"])
    assert of_suite["table"] == "nature"
    assert of_suite == suite._settings(
        "dqn", ["--preset", "fast_dqn", "--keep-checkpoints", "9", "--checkpoint-every", "5"]
    )
    assert of_suite != suite._settings("dqn", ["--preset", "fast_dqn", "--eval-every", "1000"])
    of_all_games = suite._settings("efficientzero", ["--preset", "speedyzero"])["agent_config"]
    assert "lars_eta" not in of_all_games, "which goes by the game"
    assert of_all_games["correction_interval"] == 30_000


@pytest.fixture
def fake(monkeypatch):
    """Jobs that train nothing."""
    bodies = {}

    def command(whole, job):
        return fakes.FakeSuite(whole.directory, bodies=bodies).command(job)

    monkeypatch.setattr(jobs.Suite, "command", command)
    monkeypatch.setattr(
        result,
        "read",
        lambda whole, job: [one | {"evaluations": [], "training": []} for one in fakes.FakeSuite.result(whole, job)],
    )
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.005)
    return bodies


@pytest.mark.slow  # quick: what a report says of results (test_suite_results.py), and commands one by one
def test_from_runs_to_a_report(fake, capsys):
    fake["Boxing-0"] = "exit 1"
    command = f"{PPO} --games Pong Boxing --out o"
    assert run(command) == 1
    err = capsys.readouterr().err
    assert "Boxing-0 failed: exit code 1" in err
    assert f"1 of 2 runs are done, 1 failed; continue with podracer {command}" in err
    fake.clear()
    (pathlib.Path("o/runs/Boxing-0/alone")).rmdir()
    assert run(f"{command} --total-steps=1e7") == 0, "as long as the preset's runs: no other settings"
    assert capsys.readouterr().err.endswith("2 of 2 runs are done; podracer suite report o\n")
    assert run("suite report o -o o.json") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("o.json\n", "o: 0 of 49 games; --partial aggregates them\n")
    assert json.loads(pathlib.Path("o.json").read_text())["suites"][0]["games"]["Pong"]["mean"] == 1.0
    assert run("suite report o --against BFB") == 2
    assert "no scores of 'BFB' are known; did you mean 'BBF'?" in capsys.readouterr().err
    assert run("suite report o --against BBF EfficientZero -o o.md") == 0
    assert capsys.readouterr().out == "o.md\n"
    table = pathlib.Path("o.md").read_text()
    assert "| mean | - | 224.7% | 190.4% |" in table
    assert "o is better than BBF on 0 of 2 games" in table
    assert run("suite atari57 dqn --preset nature --games Pong --out n") == 0
    capsys.readouterr()
    assert run("suite report o n --partial -o on.md") == 0
    assert "Normalised by different tables (atari57, nature): " in capsys.readouterr().err
    assert run(f"{command} --dry-run") == 0
    assert capsys.readouterr().out == ""
    assert run("suite atari57 ppo --preset atari --games Pong --out o --agent.discount 0.9") == 2
    assert "o/suite.json is of other settings: agent_config.discount: 0.99 -> 0.9; give" in capsys.readouterr().err


def test_another_preset_in_the_same_folder_is_refused(fake, capsys):
    command = "suite atari57 dqn --games Pong --out o --preset"
    assert run(f"{command} fast_dqn") == 0
    capsys.readouterr()
    assert run(f"{command} nature") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "o/suite.json is of other settings: " in err
    assert "preset: fast_dqn -> nature" in err
    assert run(f"{command} fast_dqn") == 0, "what is there stays"


def test_atari_100k_is_a_suite(fake, capsys):
    """The suite has 26 games and the protocol of that name."""
    command = "suite atari100k dqn --dry-run --out o"
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26
    assert lines[1].startswith("podracer suite atari100k dqn --part 2/26 ")
    assert all("--protocol atari100k" in line for line in lines)


def test_minatar_is_a_suite(capsys):
    """Its five games are environments of ours, and scores are not normalised."""
    command = "suite minatar ppo --preset minatar --seeds 0 1"
    assert run(f"{command} --dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[2].startswith("podracer suite minatar ppo --part 3/10 ")
    assert all("--out suites/ppo-minatar --preset minatar" in line for line in lines)
    planned = jobs.Suite(pathlib.Path("o"), {}, ["minatar_asterix", "Pong"], [0], ("ppo",))
    assert [planned.command(job)[5] for job in planned.jobs] == ["minatar_asterix", "envpool:Pong-v5"]
    assert run(f"{command} --games breakout minatar_seaquest breakout --dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert run(f"{command} --games breakout --side-by-side --dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        "podracer suite minatar ppo --part 1/1 --games breakout --seeds 0 1 --out suites/ppo-minatar --side-by-side "
        "--preset minatar"
    ]


def test_parts_share_a_directory(fake, capsys):
    for part in ("1/2", "2/2"):
        assert run(f"{PPO} --games Pong Boxing Enduro --seeds 0 1 --out o --part {part}") == 0
        assert "3 of 3 runs are done" in capsys.readouterr().err
    assert len(list(pathlib.Path("o/results").iterdir())) == 6


@pytest.mark.slow
@pytest.mark.nightly
def test_pong_is_stopped_goes_on_and_is_reported(tmp_path, capsys):
    """Real runs: SIGTERM in the first one, and the same command again."""
    pytest.importorskip("envpool")
    command = (
        f"suite atari57 vtrace --protocol impala --games Pong --seeds 0 1 --out {tmp_path}/o --total-steps 1200 --num-envs 4 "
        "--eval-every 600 --eval-episodes 2 --checkpoint-every 100 --env.max-episode-steps 40 "
        "--env.evaluation-max-episode-steps 40 --agent.rollout-length 10 --agent.torso mlp --agent.hidden-sizes 8"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "podracer", *shlex.split(command)], stderr=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "o" / "runs" / "Pong-0" / "checkpoints"
    deadline = time.monotonic() + 300
    while not (checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"0 of 2 runs are done; continue with podracer {command}" in err
    assert not list((tmp_path / "o" / "results").iterdir())
    assert "stopped by a signal" in (tmp_path / "o" / "runs" / "Pong-0.log").read_text()
    assert run(command) == 0
    written = json.loads((tmp_path / "o" / "results" / "Pong-0.json").read_text())
    assert written["env_steps"] >= 1200
    assert len(written["evaluations"]) == 2
    assert written["hns"] == pytest.approx((written["final"] + 20.7) / (14.6 + 20.7))
    capsys.readouterr()
    assert run(f"suite report {tmp_path}/o --partial") == 0
    assert "| Pong |" in (tmp_path / "o" / "report" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_seed_beside_others_is_the_seed_alone(tmp_path):
    """Real runs: the first updates are equal, as far as the order of sums leaves them so."""
    command = (
        "suite minatar ppo --games breakout --seeds 3 5 --total-steps 2048 --num-envs 8 --eval-every 1024 "
        "--eval-episodes 2 --agent.hidden-sizes 8 --agent.rollout-length 32 --agent.num-minibatches 2"
    )
    assert run(f"{command} --out {tmp_path}/together --side-by-side") == 0
    assert run(f"{command} --out {tmp_path}/apart") == 0
    found = {}
    for name in (
        "together/runs/minatar_breakout-3-5",
        "apart/runs/minatar_breakout-3",
        "apart/runs/minatar_breakout-5",
    ):
        for row in metrics.read(tmp_path / name / "metrics.jsonl"):
            if row["updates"] == 1 and "grad/norm" in row:
                found[name, row.get("member")] = row["grad/norm"]
    together = [found["together/runs/minatar_breakout-3-5", member] for member in (0, 1)]
    apart = [found[f"apart/runs/minatar_breakout-{seed}", None] for seed in (3, 5)]
    np.testing.assert_allclose(together, apart, rtol=1e-3)
    assert together[0] != pytest.approx(together[1], rel=0.01)
    for seed in (3, 5):
        paths = [tmp_path / way / "results" / f"minatar_breakout-{seed}.json" for way in ("together", "apart")]
        results = [json.loads(path.read_text()) for path in paths]
        assert [one["side_by_side"] for one in results] == [2, 1]
        assert all(one["seed"] == seed and len(one["evaluations"]) >= 2 for one in results)
