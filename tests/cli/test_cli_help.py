"""Help and lists in the shell: all settings, environments and agents are shown."""

import pytest

import envs_jax
import podracer
from podracer.agents.registry import AGENTS
from tests.support.shell import run


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("", "podracer train AGENT ENV"),
        ("--help", "podracer train AGENT ENV"),
        ("help", "podracer train AGENT ENV"),
        ("help train", "environments: acrobot, bandit"),
        ("help eval", "--episodes"),
        ("-h", "podracer bench anakin|sebulba|replay|search"),
        ("--version", f"podracer {podracer.__version__}\n"),
        ("train", "environments: acrobot, bandit"),
        ("train --help", "environments: acrobot, bandit"),
        ("train ppo --help", "environments: acrobot, bandit"),
        ("train ppo catch --help", "--agent.clip-epsilon"),
        ("train vtrace gridworld --help", "--env.task"),
        ("eval --help", "--episodes"),
        ("plot --help", "--metric"),
        ("envs --help", "pixel_catch"),
        ("agents --help", "Proximal policy optimisation"),
        ("bench --help", "podracer bench anakin|sebulba|replay|search"),
        ("bench anakin --help", "--repeats"),
    ],
)
def test_help(command, shown, capsys):
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert shown in out
    assert err == ""


def test_every_setting_has_a_flag(capsys):
    for name, (config, _) in AGENTS.items():
        assert run(f"train {name} catch --arch sebulba --help") == 0
        text = capsys.readouterr().out
        for field in config.__dataclass_fields__:
            assert f"--agent.{field.strip('_').replace('_', '-')}" in text
        for field in podracer.RunConfig.__dataclass_fields__:
            assert f"--{field.replace('_', '-')}" in text


def test_sebulbas_settings_are_shown_where_it_runs(asked, capsys):
    for command in ("catch", "catch --arch=sebulba", "catch --arch sebulba", "envpool:CartPole-v1"):
        assert run(f"train vtrace {command} --help") == 0
        text = capsys.readouterr().out
        assert ("--actor-threads" in text) == ("sebulba options" in text) == (command != "catch"), command
        assert "--mode" in text
    assert run("train vtrace catch --run-dir nowhere --mode=lockstep --env_timeout 5") == 2
    settings = {name: asked[0][name] for name in podracer.RunConfig.__dataclass_fields__ if name in asked[0]}
    assert settings == {"mode": "lockstep", "env_timeout": 5.0, "seed": 0}


def test_envs_and_agents(capsys):
    assert run("envs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *envs_jax.names(),
        "pgx:GAME",
        "PREFIX:ID",
        "envpool:TASK",
        "gymnasium:ID",
    ]
    assert lines[envs_jax.names().index("catch")].split("  ")[-1].strip() == (
        "observation float32 [10, 5] in [0.0, 1.0]; action 1 of 3; options: rows=10, columns=5"
    )
    assert max(map(len, lines)) < 240
    assert run("envs pendulum") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[0] == "pendulum"
    assert {"envpool:Pendulum-v1", "gymnasium:Pendulum-v1", "gymnasium:InvertedPendulum-v5"} <= set(names)
    shown = "observation float32 [3] in [-8.0, 8.0]; action float32 [1] in [-2.0, 2.0]"
    assert shown in lines[names.index("gymnasium:Pendulum-v1")]
    assert "cannot be used here: Gymnasium cannot make" in lines[names.index("gymnasium:InvertedPendulum-v4")]
    assert run("envs v5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "envpool:Pong-v5" in lines, "too many to show what they are like"
    assert run("agents") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(AGENTS)
