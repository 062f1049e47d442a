"""Settings as they are typed in the shell, and as training gets them."""

import pathlib
import types

import podracer
from tests.support.shell import TRAIN, run


def test_integers_may_be_written_as_people_do(asked):
    for command in (
        "--total-steps 1e5 --num-envs 1_000 --agent.hidden-sizes 32,16 --env.rows 1.2e1 --hyper.discount 0.5,1e-3",
        "--total-steps 100000 --num-envs 1000 --agent.hidden-sizes 32 16 --env.rows 12 --hyper.discount 0.5 0.001",
    ):
        assert run(f"train vtrace catch --run-dir nowhere {command}") == 2
    assert asked[0] == asked[1]
    assert (asked[0]["total_steps"], asked[0]["config"]) == (100_000, {"hidden_sizes": (32, 16)})
    assert type(asked[0]["num_envs"]) is int


def test_a_preset_is_passed_on_with_what_was_typed(asked, capsys):
    """Typed settings go before the preset, also where they equal the value that the help shows."""
    game = "envpool:Pong-v5"
    run(f"train r2d2 {game} --preset atari --agent.batch-size 8 --env.noop-max 5 --run-dir nowhere")
    run(
        f"train dqn {game} --preset=fast_dqn --protocol machado --num_envs=8 --agent.rollout-length 1250 --agent.double"
    )
    run(f"train dqn {game} --preset fast_dqn --agent.no-double --checkpoint-replay --env.no-episodic-life")
    asked = [{name: value for name, value in settings.items() if value is not None} for settings in asked]
    for settings in asked:
        for name in ("run_dir", "resume", "progress", "seed", "hyper", "topology", "wrap", "trust"):
            del settings[name]
    none = {"config": {}, "env_options": {}}
    assert asked == [
        {"preset": "atari", "config": {"batch_size": 8}, "env_options": {"noop_max": 5}},
        none
        | {"preset": "fast_dqn", "protocol": "machado", "num_envs": 8}
        | {"config": {"rollout_length": 1250, "double": True}},
        {"preset": "fast_dqn", "checkpoint_replay": True}
        | {"config": {"double": False}, "env_options": {"episodic_life": False}},
    ]
    capsys.readouterr()
    assert run(f"train dqn {game} --preset rainbow --help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("nature,fast_dqn,double,c51,qr,noisy,rainbow", "machado", "(default: 2000)"))


def test_several_seeds_are_several_runs(monkeypatch, tmp_path, capsys):
    asked = []

    def train(agent, environment, **settings):
        asked.append(settings)
        summary = {"complete": True, "eval_return_mean": float(settings["seed"])}
        return types.SimpleNamespace(summary=summary, run_dir=settings["run_dir"])

    monkeypatch.setattr(podracer, "train", train)
    assert run(f"{TRAIN} --seeds 4 7 5 --run-dir {tmp_path / 'run'}") == 0
    assert [settings["seed"] for settings in asked] == [4, 7, 5]
    assert [settings["run_dir"].name for settings in asked] == ["run-4", "run-7", "run-5"]
    assert "3 seeds: mean 5.333 (4.000 to 7.000)" in capsys.readouterr().out


def test_a_sweep_in_the_shell(asked):
    run(f"{TRAIN} --hyper.learning-rate 0 1e-2 --hyper.entropy-cost 0 --init-from other --quiet")
    (settings,) = asked
    assert settings["hyper"] == {"learning_rate": [0.0, 0.01], "entropy_cost": 0.0}
    assert settings["init_from"] == pathlib.Path("other")


def test_a_population_that_evolves_in_the_shell(asked, capsys):
    typed = "--population 4 --pbt.interval 1000 --pbt.hyper learning_rate entropy_cost --pbt.score 0 1"
    run(f"{TRAIN} {typed} --agent.learning-rate-schedule constant")
    assert asked[0]["pbt"] == {"interval": 1000, "hyper": ("learning_rate", "entropy_cost"), "score": (0.0, 1.0)}
    run(TRAIN)
    assert asked[1]["pbt"] is None
    capsys.readouterr()
    assert run("train vtrace catch --help") == 0
    assert "--pbt.min-episodes" in capsys.readouterr().out
