"""What the benches measure, and what they do without."""

from podracer.bench import measure, sebulba
from podracer.bench.anakin import AnakinArguments
from podracer.bench.sebulba import SebulbaArguments


def test_anakin_on_any_environment():
    arguments = AnakinArguments(env="gridworld", env_options='{"task": "random_goals"}')
    assert arguments.environment("ppo").spec.name.startswith("gridworld")
    assert arguments.environment("ppo").spec != AnakinArguments(env="gridworld").environment("ppo").spec
    assert [AnakinArguments().environment(name).spec.name for name in ("ppo", "vtrace")] == ["cartpole", "catch"]


def test_presets_for_another_machine(monkeypatch):
    arguments = SebulbaArguments(presets=("pong",), num_envs=128, pool_threads=7, torso="resnet")
    pong = arguments.preset("pong")
    assert (pong.env, pong.num_envs, pong.num_threads, pong.config["torso"]) == ("envpool:Pong-v5", 128, 7, "resnet")
    assert SebulbaArguments().preset("pong") == sebulba.PRESETS["pong"]
    ran = []

    def run(command, **kwargs):
        ran.append(" ".join(command))
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(sebulba.subprocess, "run", run)
    sebulba._simulated(arguments)
    assert "--num-envs 128 --pool-threads 7 --torso resnet" in ran[0], "the simulated devices measure the same"


def test_a_yardstick_that_cannot_be_imported(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "plain.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(measure, "SOURCE", tmp_path)
    assert measure.yardstick("plain.py") is None
    assert measure.yardstick("missing.py") is None
    first, second = capsys.readouterr().err.splitlines()
    assert first == "no yardstick: plain.py cannot be used here (No module named 'nothing_of_this_name')."
    assert second.startswith("no yardstick: ")
