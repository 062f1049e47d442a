"""What the settings of a run are called, in its description and wherever it goes on."""

import json

import harness
import pytest

import podracer
from podracer import config as configs
from podracer.agents import AlphaZeroConfig
from podracer.run import presets, rundir

SMALL = {
    "config": {"rollout_length": 4, "num_epochs": 1, "hidden_sizes": (8,)},
    **{"num_envs": 8, "total_steps": 64, "eval_episodes": 2, "eval_every": 100_000, "checkpoint_every": 64},
}


def named(description):
    return {name: description[name] for name in rundir.NAMES if name in description}


@pytest.mark.slow
def test_names_are_kept(tmp_path):
    asked = {"preset": "classic", "run_dir": tmp_path / "run", "progress": False}
    with harness.shared_programs():
        begun = podracer.train("ppo", "pendulum", **asked, **SMALL)
        assert begun.description["agent_config"]["discount"] == 0.9, "the preset's"
        assert begun.description["agent_config"]["rollout_length"] == 4, "not the preset's"
        longer = podracer.resume(asked["run_dir"], total_steps=128, progress=False)
        loaded = podracer.load(asked["run_dir"])
    assert longer.summary["env_steps"] >= 128
    written = json.loads((asked["run_dir"] / "config.json").read_text())
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
