"""`podracer sweep` in a shell: what is passed on, what is printed, what is refused, and exit codes."""

import shlex
import types

import numpy as np
import pytest

import podracer
from podracer import cli
from podracer.cli import train
from podracer.sweeps import sweep as sweeps

SWEEP = "sweep vtrace catch --total-steps 400 --agent.entropy-cost 0.02 --quiet"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sweep vtrace", "sweep needs an agent and an environment: podracer sweep AGENT ENV --hyper NAME=VALUES."),
        ("sweep vtrce catch --hyper learning_rate=1", "unknown agent 'vtrce'; did you mean 'vtrace'?"),
        ("sweep vtrace catch", "name a tunable number and its values."),
        ("sweep vtrace catch --hyper learning_rate", "--hyper learning_rate: write NAME=VALUES; write values with"),
        ("sweep vtrace catch --hyper learning_rate=log:1", "--hyper learning_rate=log:1: write values with commas"),
        ("sweep vtrace catch --hyper optimizer=adam,sgd", "Start a sweep for each value of optimizer, or on games of"),
        ("sweep vtrace catch --hyper discount=1 --population 4", "--population is not for a sweep: --members is the"),
        ("sweep vtrace catch --hyper discount=1 --pod.address=x", "--pod.address is not for a sweep: a sweep runs on"),
        ("sweep vtrace catch --hyper discount=1 --hyper.discount 1", "--hyper discount is given twice."),
        ("sweep vtrace catch --hyper discount=1 --hyper.entropy-cost 1 2", "--hyper.entropy-cost is one number for"),
        ("sweep vtrace catch --hyper discount=1 --total-stps 3", "did you mean --total-steps?"),
    ],
)
def test_bad_input_gets_one_line(command, message, capsys):
    code = cli.run(shlex.split(command))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_help_is_there(capsys):
    for command in ("sweep", "sweep --help", "sweep vtrace catch --help"):
        assert cli.run(shlex.split(command)) == 0
    assert "--at-once" in capsys.readouterr().out


def test_options_reach_training_and_the_command_trains_the_best_one(monkeypatch, capsys):
    calls = []

    def stub(agent, environment, **settings):
        calls.append((agent, environment, settings))
        count = settings["population"]
        rates = np.broadcast_to(settings["hyper"]["learning_rate"], count)
        members = [{"eval_return_mean": float(rate), "diverged": False} for rate in rates]
        return types.SimpleNamespace(summary={"complete": True, "train_seconds": 1.0, "members": members})

    monkeypatch.setattr(sweeps, "train", stub)
    flags = "--total-steps 400 --agent.hidden-sizes 8 --hyper.entropy-cost 0.02 --wrap time_limit=5 --trust"
    typed = f"sweep vtrace catch --hyper learning-rate=log:1e-4:1e-2 discount=0.9,0.99 --members 4 --seeds 2 {flags}"
    assert cli.run(shlex.split(typed)) == 0
    (agent, environment, wave), (*_, again) = calls
    assert (agent, environment, wave["population"], again["population"]) == ("vtrace", "catch", 8, 2)
    assert (wave["total_steps"], wave["config"], wave["trust"]) == (400, {"hidden_sizes": (8,)}, True)
    assert wave["hyper"]["entropy_cost"] == [0.02] * 8
    assert wave["hyper"]["discount"] == [0.9, 0.9, 0.99, 0.99] * 2
    best = max(wave["hyper"]["learning_rate"])
    assert again["hyper"]["learning_rate"] == [best] * 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train it with: ")]
    program, command, *argv = shlex.split(line.partition(": ")[2])
    assert (program, command) == ("podracer", "train")
    settings, hyper, _ = train.parsed(argv)
    assert line.count("--hyper.entropy-cost") == 1
    assert hyper == {name: values[0] for name, values in again["hyper"].items()}
    assert settings == train.parsed(shlex.split(f"vtrace catch {flags}"))[0]


def test_a_signal_ends_the_command_as_in_shells(monkeypatch, capsys):
    def stopped(*_, **settings):
        raise podracer.Interrupted(types.SimpleNamespace(summary={"env_steps": 5}), "SIGTERM", "")

    monkeypatch.setattr(sweeps, "train", stopped)
    assert cli.run(shlex.split(f"{SWEEP} --hyper discount=0.9,0.99")) == 143
    out, err = capsys.readouterr()
    assert out == ""
    assert "stopped by SIGTERM at 5 steps; the same sweep goes on from there: podracer sweep vtrace catch" in err
