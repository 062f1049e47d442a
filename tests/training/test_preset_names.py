"""The names of a run's settings, in its description and wherever it goes on."""

import itertools
import json
import re

import pytest

import podracer
from podracer import configs
from podracer.agents import AlphaZeroConfig
from podracer.agents.registry import AGENTS
from podracer.bench import measure
from podracer.run import rundir
from podracer.training import presets, robot_presets
from podracer.training.settings import merged
from tests.support import harness

SMALL = {
    "config": {"rollout_length": 4, "num_epochs": 1, "hidden_sizes": (8,)},
    **{"num_envs": 8, "total_steps": 64, "eval_episodes": 2, "eval_every": 100_000, "checkpoint_every": 64},
}


def read(path):
    return json.loads(path.read_text())


def named(description):
    return {name: description[name] for name in rundir.NAMES if name in description}


@pytest.mark.slow
def test_names_are_kept(tmp_path, capsys):
    asked = {"preset": "classic", "run_dir": tmp_path / "run"}
    with harness.shared_programs():
        podracer.train("ppo", "pendulum", **SMALL)
        assert "--preset classic" in capsys.readouterr().err, "what fits is suggested"
        begun = podracer.train("ppo", "pendulum", **asked, **SMALL)
        assert "--preset" not in capsys.readouterr().err
        assert begun.description["agent_config"]["discount"] == 0.9, "the preset's"
        assert begun.description["agent_config"]["rollout_length"] == 4, "not the preset's"
        longer = podracer.resume(asked["run_dir"], total_steps=128, progress=False)
        loaded = podracer.load(asked["run_dir"])
    assert longer.summary["env_steps"] >= 128
    written = read(asked["run_dir"] / "config.json")
    for description in (begun.description, longer.description, loaded.description, written):
        assert named(description) == {"preset": "classic"}
    assert named(rundir.stored_names(tmp_path)) == {}


def test_names_need_names():
    with pytest.raises(ValueError, match="preset='classic' needs an agent and an environment by name"):
        podracer.train("ppo", lambda: None, preset="classic")
    with pytest.raises(ValueError, match="protocol='nature' needs an agent and an environment by name"):
        podracer.train("ppo", "envpool:Pong-v5", protocol="nature", config=podracer.agents.PPOConfig())


def test_presets_of_board_games():
    found = presets.merge("alphazero", "connect_four", "board", None, presets.Settings({"blocks": 3}))
    config = configs.from_json(AlphaZeroConfig, found.agent)
    assert (config.blocks, config.channels, config.n_step) == (3, 16, 42), "what is given goes first"
    assert (found.env, found.names) == ({"opening_plies": 20}, {"preset": "board"})
    for (agent, task), settings in presets.BOARD.items():
        assert presets.merge(agent, task, "board", None, presets.Settings()).agent == settings.agent
        configs.from_json(AlphaZeroConfig, settings.agent)
    with pytest.raises(ValueError, match="there is none for alphazero on tic_tac_toe; there are alphazero on conn"):
        presets.merge("alphazero", "tic_tac_toe", "board", None, presets.Settings())
    with pytest.raises(ValueError, match="preset='board' is of alphazero; the presets of ppo: atari, classic"):
        presets.merge("ppo", "connect_four", "board", None, presets.Settings())


@pytest.mark.parametrize("task", ["envpool:Hopper-v4", "envpool:HalfCheetah-v5", "gymnasium:HumanoidStandup-v4"])
def test_the_preset_of_a_task_is_found_by_its_name(task):
    assert "--preset mujoco" in presets.suggestion("ppo", task)[0]
    found = presets.merge("ppo", task, "mujoco", None, presets.Settings())
    config = configs.from_json(podracer.agents.PPOConfig, found.agent)
    batch = found.run["num_envs"] * config.rollout_length
    assert (batch, batch // config.num_minibatches, config.num_epochs) == (2048, 64, 10), (
        "Schulman et al. 2017, table 3"
    )
    assert (config.discount, config.gae_lambda, config.clip_epsilon) == (0.99, 0.95, 0.2), "table 3"


ROBOTS = {
    "playground:CheetahRun": (2048, 480, 30_720, 16, 60_000_000),
    "playground:PendulumSwingup": (2048, 480, 30_720, 4, 60_000_000),
    "playground:WalkerRun": (2048, 480, 30_720, 16, 100_000_000),
    "playground:Op3Joystick": (8192, 20, 5_120, 4, 100_000_000),
    "playground:G1JoystickFlatTerrain": (8192, 20, 5_120, 4, 200_000_000),
    "brax:ant": (4096, 80, 10_240, 4, 50_000_000),
    "brax:halfcheetah": (2048, 160, 10_240, 8, 50_000_000),
    "brax:humanoid": (2048, 160, 10_240, 8, 50_000_000),
}
"""Lanes, rows of a lane, rows of a minibatch (brax's batch_size * unroll_length), epochs and steps."""


@pytest.mark.parametrize("task", ROBOTS)
def test_presets_of_robots_are_brax_s(task):
    name = task.partition(":")[0]
    assert f"--preset {name}" in presets.suggestion("ppo", task)[0]
    found = presets.merge("ppo", task, name, None, presets.Settings())
    config, lanes = configs.from_json(podracer.agents.PPOConfig, found.agent), found.run["num_envs"]
    minibatch = lanes * config.rollout_length // config.num_minibatches
    assert (lanes, config.rollout_length, minibatch, config.num_epochs, found.run["total_steps"]) == ROBOTS[task]
    assert (config.policy, config.activation, config.init, config.statistics_clip) == ("tanh", "swish", "lecun", None)
    assert config.policy_observations == (("state",) if "G1" in task else ())


def test_a_layer_of_a_preset_has_at_most_8_settings():
    every = {**robot_presets.PLAYGROUND_LAYERS, **robot_presets.BRAX_LAYERS}
    layers = {str(layer): layer for layers in every.values() for layer in layers}
    assert len(layers) > 10
    assert max(len(layer.agent) + len(layer.run) for layer in layers.values()) == 8
    for task, each in every.items():
        configs.from_json(podracer.agents.PPOConfig, merged(*each).agent)
        for below, layer in itertools.pairwise(each):
            assert not set(below.agent.items()) & set(layer.agent.items()), f"{task}: said twice"


def test_a_preset_is_suggested_where_there_is_one():
    assert presets.suggestion("ppo", "envpool:Pendulum-v1") == [
        "ppo has settings for envpool:Pendulum-v1: --preset classic, or preset='classic' in Python"
    ]
    assert "--preset classic" in presets.suggestion("pqn", "gymnasium:LunarLander-v3")[0]
    assert presets.suggestion("pqn", "envpool:MountainCar-v0") == [], "its defaults do"
    assert presets.suggestion("pqn", "envpool:LunarLanderContinuous-v3") == [], "it has no continuous actions"
    assert presets.suggestion("ppo", "catch") == presets.suggestion("vtrace", "pendulum") == []
    assert presets.suggestion(object(), "pendulum") == presets.suggestion("ppo", object()) == []


@pytest.mark.parametrize("kind", ["envpool", "gymnasium"])
@pytest.mark.parametrize("task", ["LunarLander-v3", "LunarLanderContinuous-v3"])
def test_both_kinds_of_lunar_lander_have_the_same_settings(kind, task):
    assert "--preset classic" in presets.suggestion("ppo", f"{kind}:{task}")[0]
    found = presets.merge("ppo", f"{kind}:{task}", "classic", None, presets.Settings())
    config = configs.from_json(podracer.agents.PPOConfig, found.agent)
    batch = found.run["num_envs"] * config.rollout_length
    assert (batch, batch // config.num_minibatches) == (16_384, 256)
    assert (config.discount, config.gae_lambda) == (0.999, 0.98)


@pytest.mark.parametrize(("agent", "task"), presets.CLASSIC)
def test_a_preset_of_classic_control_is_measured(agent, task):
    """A row of benchmarks/learn.py holds with three seeds, on the host or in JAX."""
    results = (measure.SOURCE / "benchmarks" / "results" / "learning").glob("*.json")
    native = re.sub(r"(?<!^)(?=[A-Z])", "_", task).lower()
    command = re.compile(rf"podracer train {agent} (envpool:{task}-v\d+|{native}) --preset classic")
    measured = [result for result in map(read, results) if command.fullmatch(result["command"])]
    assert measured
    assert all(result["holds"] and len(result["seeds"]) == 3 for result in measured)


@pytest.mark.parametrize("agent", presets.MINATAR)
def test_presets_of_minatar_fit_every_game(agent):
    for game in presets.MINATAR_GAMES:
        found = presets.merge(agent, game, "minatar", None, presets.Settings({"discount": 0.5}))
        config = configs.from_json(AGENTS[agent][0], found.agent)
        assert config.discount == 0.5, "what is given goes first"
        assert config.torso == "minatar"
        assert found.agent.items() >= presets.MINATAR[agent].agent.items() - {("discount", 0.99)}
        assert found.names == {"preset": "minatar"}
        assert found.run["total_steps"] == {"dqn": 5_000_000, "muzero": 1_000_000, "efficientzero": 1_000_000}.get(
            agent, 10_000_000
        )
    assert "--preset minatar" in presets.suggestion(agent, "minatar_seaquest")[0]
    with pytest.raises(ValueError, match=f"there is none for {agent} on catch"):
        presets.merge(agent, "catch", "minatar", None, presets.Settings())
