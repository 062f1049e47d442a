"""Presets for Atari against papers' tables, and what goes before what."""

import importlib
import math
import pathlib
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("envpool")

import podracer
from podracer import atari, spaces
from podracer.agents import DQNConfig, PPOConfig, PQNConfig, R2D2Config, VTraceConfig
from podracer.atari import presets as papers
from podracer.cli import train
from podracer.environments.envpool import AtariOptions
from podracer.returns import rescale
from podracer.run.config import RunConfig
from podracer.search import prefix_models
from podracer.training import presets
from podracer.types import EnvSpec

PONG = "envpool:Pong-v5"

NATURE = {
    "batch_size": 32,
    "replay_ratio": 8.0,
    "target_interval": 2_500,
    "replay_capacity": 1_000_000,
    "replay_min_size": 50_000,
    "discount": 0.99,
    "n_step": 1,
    "double": False,
    "dueling": False,
    "optimizer": "rmsprop",
    "learning_rate": 2.5e-4,
    "learning_rate_schedule": "constant",
    "optimizer_eps": 0.01 / 32**2,
    "max_grad_norm": math.inf,
    "values": "mean",
    "noise": 0.0,
    "priority_exponent": 0.0,
    "epsilon_start": 1.0,
    "epsilon_final": 0.1,
    "epsilon_decay": 1_000_000,
    "evaluation_epsilon": 0.05,
    "clip_rewards": True,
    "frame_stack": 4,
    "torso": "nature",
    "head_size": 0,
    "init": "uniform",
    "rollout_length": 4,
}
"""Mnih et al. 2015, extended data table 1."""

RAINBOW = NATURE | {
    "target_interval": 2_000,
    "replay_min_size": 20_000,
    "n_step": 3,
    "double": True,
    "dueling": True,
    "optimizer": "adam",
    "learning_rate": 6.25e-5,
    "optimizer_eps": 1.5e-4,
    "max_grad_norm": 10.0,
    "values": "categorical",
    "num_bins": 51,
    "max_value": 10.0,
    "noise": 0.1,
    "priority_exponent": 0.5,
    "importance_exponent": 0.4,
    "importance_exponent_final": 1.0,
    "epsilon_start": 0.0,
    "epsilon_final": 0.0,
    "evaluation_epsilon": 0.0,
    "torso": "nature_conv",
    "head_size": 512,
    "rollout_length": 1_000,
}
"""Hessel et al. 2018, table 1, with dqn_zoo's noise, on 8 lanes."""


EFFICIENTZERO = {
    "search": "puct",
    "simulations": 50,
    "dirichlet_alpha": 0.3,
    "dirichlet_fraction": 0.25,
    "least_range": 0.01,
    "embedding_dtype": "bfloat16",
    "unroll_length": 5,
    "n_step": 5,
    "horizon": 5,
    "num_bins": 601,
    "projection_size": 1024,
    "forecast_size": 512,
    "lstm_size": 512,
    "norm": "batch",
    "value_cost": 0.25,
    "consistency_cost": 2.0,
    "batch_size": 256,
    "replay_ratio": 256.0,
    "replay_min_size": 2_000,
    "replay_capacity": 100_000,
    "correction_interval": 30_000,
    "reanalyse": 1.0,
    "value_target": "network",
    "reanalyse_group": 8,
    "target_interval": 200,
    "priority_exponent": 0.6,
    "importance_exponent": 0.4,
    "refresh_interval": 0,
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "warmup_updates": 1_000,
    "final_scale": 0.1,
    "l2_cost": 1e-4 / 2,  # of a square, whose gradient is twice as large as PyTorch's decay
    "max_grad_norm": 5.0,
    "clip_rewards": True,
    "frame_stack": 4,
    "augment": True,
}
"""Ye et al. 2021 and the authors' code."""

SPEEDYZERO = EFFICIENTZERO | {
    "batch_size": 2048,
    "target_interval": 25,
    "reanalyse_group": 5,
    "refresh_interval": 10,
    "optimizer": "clipped_lars",
    "learning_rate": 0.5657,
    "lars_start": 600,
    "lars_eta": 0.005,  # on Pong
    "max_grad_norm": 10.0,
    "warmup_updates": 125,
    "final_scale": 1.0,
}
"""Mei et al. 2023, tables 7 and 8."""


def resolved(agent, preset=None, protocol=None, config=None, run=None, env=None):
    """The complete settings of a run."""
    given = presets.Settings(config or {}, run or {}, env or {})
    merged = presets.merge(agent, PONG, preset, protocol, given)
    cls = presets.AGENTS[agent][0]
    return cls(**merged.agent), RunConfig(**merged.run), AtariOptions(**merged.env), merged.names


@pytest.mark.parametrize(("name", "table"), [("nature", NATURE), ("rainbow", RAINBOW)])
def test_presets_are_the_papers(name, table):
    protocol = {"nature": "nature", "rainbow": "dqn_zoo"}[name]
    config, run, options, names = resolved("dqn", name)
    assert {field: getattr(config, field) for field in table} == table
    assert names == {"preset": name, "protocol": protocol}
    assert options == AtariOptions(**atari.protocol(protocol).env)
    lanes = {"nature": (1, "serial"), "rainbow": (8, "lockstep")}
    assert (run.num_envs, run.mode, run.checkpoint_replay) == (*lanes[name], False)
    assert (run.total_steps, run.eval_every, run.eval_episodes) == (50_000_000, 250_000, 30)


def test_presets_differ_as_papers_do():
    for name, preset in papers.DQN.items():
        if preset.base:
            assert len(preset.agent) + len(preset.run) + bool(preset.protocol) <= 9, name
    nature = vars(resolved("dqn", "nature")[0])
    changes = {
        name: {field: value for field, value in vars(resolved("dqn", name)[0]).items() if value != nature[field]}
        for name in ("fast_dqn", "double", "c51", "qr")
    }
    c51 = {"optimizer": "adam", "optimizer_eps": 0.01 / 32, "max_grad_norm": 10.0}
    c51 |= {"epsilon_final": 0.01, "evaluation_epsilon": 1e-3, "max_value": 10.0}
    assert changes == {
        "fast_dqn": {"rollout_length": 1_250},
        "double": {"double": True, "target_interval": 7_500, "epsilon_final": 0.01, "evaluation_epsilon": 0.01},
        "c51": c51 | {"values": "categorical"},
        "qr": c51 | {"values": "quantile", "num_bins": 201, "learning_rate": 5e-5},
    }
    protocols = {name: resolved("dqn", name)[3]["protocol"] for name in papers.DQN}
    assert protocols == {"nature": "nature", "fast_dqn": "fast_dqn", "double": "nature"} | dict.fromkeys(
        ("c51", "qr", "noisy", "rainbow"), "dqn_zoo"
    ), "whose numbers are compared with which"
    _, run, options, names = resolved("dqn", "fast_dqn")
    assert (run.num_envs, run.mode) == (8, "lockstep")
    assert (options.fire_reset, names["protocol"]) == (True, "fast_dqn")


def test_a_rollout_is_a_period():
    """T = C / W, by what the user says of either; T itself is the user's too."""
    length = lambda **given: resolved("dqn", "fast_dqn", **given)[0].rollout_length  # noqa: E731
    assert length(run={"num_envs": 40}) == 250
    assert length(config={"target_interval": 500}) == 250
    assert length(config={"rollout_length": 7}, run={"num_envs": 9}) == 7
    assert resolved("dqn", "fast_dqn", run={"num_envs": None})[1].num_envs == 8
    assert resolved("dqn", "rainbow", run={"num_envs": 16})[0].rollout_length == 500
    for lanes, fit in ((12, "10 or 16"), (30, "25 or 40"), (20_000, "10000")):
        with pytest.raises(
            ValueError,
            match=f"num_envs={lanes} must divide the 10000 rows of target_interval=2500 updates of 4 rows, .*; use {fit} ",
        ):
            length(run={"num_envs": lanes})


def test_what_goes_before_what():
    """Defaults, the preset's protocol, the preset, a protocol by name, what is given."""
    config, run, options, names = resolved("dqn", "double", "seed", {"epsilon_final": 0.2}, {"eval_episodes": 3})
    assert (config.evaluation_epsilon, config.epsilon_final, config.double) == (1e-3, 0.2, True)
    assert (run.eval_episodes, run.num_envs) == (3, 1)
    assert options == AtariOptions(**atari.protocol("seed").env)
    assert names == {"preset": "double", "protocol": "seed"}
    assert resolved("dqn", "double")[0].evaluation_epsilon == 0.01, "the preset's, not its protocol's"
    options = resolved("dqn", "double", env={"noop_max": 5})[2]
    assert (options.noop_max, options.episodic_life) == (5, True)
    assert resolved("dqn", "nature", "dopamine")[0].epsilon_final == 0.01
    assert resolved("dqn", "rainbow", "dopamine")[0].epsilon_final == 0.0, "no more than the preset's"
    assert resolved("dqn", None, "machado")[3] == {"protocol": "machado"}
    assert resolved("dqn") == (DQNConfig(), RunConfig(), AtariOptions(), {})


def test_other_agents_play_as_their_papers():
    for name, cls, protocol in (
        ("ppo", PPOConfig, "ppo"),
        ("pqn", PQNConfig, "ppo"),
        ("r2d2", R2D2Config, "seed"),
        ("vtrace", VTraceConfig, "impala"),
    ):
        config, run, options, names = resolved(name, "atari")
        assert config == cls.atari()
        assert options == AtariOptions(**atari.protocol(protocol).env)
        assert names == {"preset": "atari", "protocol": protocol}
        assert run.total_steps == {"ppo": 10_000_000, "r2d2": RunConfig().total_steps}.get(name, 50_000_000)
        assert run.eval_every == (10_000_000_000 if name == "r2d2" else run.total_steps), "once, at the end"
    assert resolved("pqn", "atari")[0].evaluation_epsilon == 0.0
    assert resolved("vtrace", "atari", run={"eval_every": 1_000})[1].eval_every == 1_000


def test_the_benchmark_says_how_its_games_are_played(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(podracer.__file__).parents[1] / "benchmarks")
    pong: Any = importlib.import_module("pong")
    by = {name: train.settings(["dqn", PONG, "--preset", name]) for name in ("fast_dqn", "rainbow")}
    games = "30 fresh games each, whole, behind {}, unclipped returns, a share of {} of actions random"
    assert pong.protocol(by["fast_dqn"]) == "fast_dqn: " + games.format("0 to 29 no-ops and FIRE", "0.05")
    assert pong.protocol(by["rainbow"]) == "dqn_zoo: " + games.format("1 to 30 no-ops", "0")


def test_muzero_searches_and_samples_as_its_paper_says():
    config, run, options, names = resolved("muzero", "atari")
    assert (config.unroll_length, config.n_step, config.discount, config.num_bins) == (5, 10, 0.997, 601)
    assert (config.search, config.simulations, config.dirichlet_alpha) == ("puct", 50, 0.25)
    assert config.embedding_dtype == "bfloat16"
    assert (config.batch_size, config.priority_exponent, config.importance_exponent) == (1024, 1.0, 1.0)
    assert options == AtariOptions(**atari.protocol("impala").env)
    assert names == {"preset": "atari", "protocol": "impala"}
    assert (run.num_envs, run.total_steps) == (512, 50_000_000)


def test_efficientzero_and_speedyzero_play_with_the_settings_of_their_papers():
    config, run, options, names = resolved("efficientzero", "atari")
    assert options == AtariOptions(**atari.protocol("atari100k").env, image_size=96, grayscale=False)
    assert names == {"preset": "atari", "protocol": "atari100k"}
    assert (run.num_envs, run.total_steps, run.eval_every, run.num_shards) == (8, 100_000, 100_000, None)
    assert {field: getattr(config, field) for field in EFFICIENTZERO} == EFFICIENTZERO
    assert float(rescale(jnp.float32(config.max_value))) == pytest.approx(300.0, rel=1e-6)
    assert config.discount == pytest.approx(0.98805, abs=1e-5)
    config_run = run
    large, run, same, names = resolved("efficientzero", "speedyzero")
    assert (same, names) == (options, {"preset": "speedyzero", "protocol": "atari100k"})
    assert {field: getattr(large, field) for field in SPEEDYZERO} == SPEEDYZERO
    # Updates, batches and intervals: table 8 of SpeedyZero.
    assert large.batch_size * large.target_interval == config.batch_size * config.target_interval
    assert large.learning_rate == pytest.approx(0.2 * (2048 / 256) ** 0.5, rel=1e-3)
    assert config.replay_ratio == large.replay_ratio == 256, "so one update for a row, and for eight"
    assert (run.num_shards, run.num_envs) == (8, 8)
    assert config.embedding_dtype == large.embedding_dtype == "bfloat16"
    # Acting makes 98,000 rows behind the first 2,000, and so updates; behind the last step follow as many as to 120,000.
    assert (config_run.eval_episodes, run.eval_episodes) == (32, 100)
    assert (config_run.final_updates, run.final_updates) == (22_000, 22_000 * config.batch_size // large.batch_size)
    for settings, final in ((config, config_run.final_updates), (large, run.final_updates)):
        acting = (100_000 - settings.replay_min_size) * settings.replay_ratio / settings.batch_size
        assert (acting, final) == {256: (98_000, 22_000), 2048: (12_250, 2_750)}[settings.batch_size]
        assert acting % settings.reanalyse_group == final % settings.reanalyse_group == 0
    spec = EnvSpec("", spaces.Box(0, 255, (96, 96, 12), np.uint8), spaces.Discrete(6))
    model = prefix_models.make(spec, config)
    params = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 96, 96, 12), jnp.uint8))[0], jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 8_348_264
    gumbel, *others = resolved("efficientzero", "gumbel")
    assert (gumbel.search, gumbel.simulations, others[0]) == ("gumbel", 16, config_run)


def test_efficientzero_is_fitted_to_the_length_of_a_run_and_the_game():
    """Typed settings go before the fitted ones."""
    for steps in (50_000, 100_000, 300_000, 1_000_000):
        for preset in papers.EFFICIENTZERO:
            config, run, *_ = resolved("efficientzero", preset, run={"total_steps": steps})
            assert (config.correction_interval, config.replay_capacity) == (0.3 * steps, steps)
            # As the replay counts them, in whole groups of updates.
            samples = (steps - config.replay_min_size) * Fraction(config.replay_ratio).limit_denominator(10_000)
            groups = samples // (config.batch_size * config.reanalyse_group)
            if preset == "speedyzero" and steps >= 100_000:
                assert groups * config.reanalyse_group + run.final_updates == 15_000, "Mei et al. 2023, section 5.1"
            else:
                assert config.replay_ratio == 256
    typed = {"replay_capacity": 50_000, "correction_interval": 0, "lars_eta": 0.02, "replay_ratio": 3.0}
    config = resolved("efficientzero", "speedyzero", config=typed, run={"total_steps": 300_000})[0]
    assert {name: getattr(config, name) for name in typed} == typed

    def eta(game, preset="speedyzero", config=None):
        given = presets.Settings(config or {})
        return presets.merge("efficientzero", f"envpool:{game}-v5", preset, None, given).agent.get("lars_eta", 0.03)

    table = {"Asterix": 0.01, "Gopher": 0.01, "KungFuMaster": 0.005, "Pong": 0.005, "RoadRunner": 0.005}
    table |= {"UpNDown": 0.005, "Alien": 0.03, "MsPacman": 0.03}
    assert {game: eta(game) for game in table} == table
    assert set(papers.LARS_ETA) < set(atari.games.GAMES26)
    assert eta("Pong", "atari") == 0.03, "which Clipped LARS alone has"
    assert eta("Pong", "atari", {"optimizer": "clipped_lars"}) == 0.005


@pytest.mark.parametrize(
    ("agent", "environment", "preset", "protocol", "message"),
    [
        ("dqn", PONG, "fast", None, "preset='fast': unknown; did you mean 'fast_dqn'?"),
        ("ppo", PONG, "fast_dqn", None, "preset='fast_dqn' is of dqn; the presets of ppo: atari, classic, mujoco."),
        (
            "dqn",
            PONG,
            "atari",
            None,
            "preset='atari' is of efficientzero, muzero, ppo, pqn, r2d2, vtrace; the presets of dqn: nature,",
        ),
        ("dqn", PONG, None, "machao", "protocol='machao': unknown; did you mean 'machado'?"),
        ("dqn", PONG, "nature", "machao", "protocol='machao': unknown; did you mean 'machado'?"),
        ("dqn", "catch", "nature", None, "preset='nature': catch is not a game of Atari, such as envpool:Pong-v5."),
        ("dqn", "catch", None, "nature", "protocol='nature': catch is not a game of Atari, such as envpool:Pong-v5."),
        ("dqn", "envpool:CartPole-v1", "nature", None, "preset='nature': envpool:CartPole-v1 is not a game of Atari"),
        ("dqn", "envpool:Pnog-v5", "nature", None, "EnvPool has no environment 'Pnog-v5'; did you mean 'Pong-v5'"),
        ("dqm", PONG, "nature", None, "unknown agent 'dqm'; did you mean 'dqn'"),
        ("dqm", PONG, None, "nature", "unknown agent 'dqm'; did you mean 'dqn'"),
    ],
)
def test_what_there_is_not(agent, environment, preset, protocol, message):
    with pytest.raises(ValueError, match=message):
        presets.merge(agent, environment, preset, protocol, presets.Settings())


def test_the_guide_has_all():
    guide = (pathlib.Path(podracer.__file__).parents[1] / "docs/atari.md").read_text()
    rows = {line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")}
    assert set(atari.PROTOCOLS) < rows
    table = guide.partition("## Presets")[2].partition("##")[0]
    cells = [[re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    cells = [row for row in cells if row and row[0]]
    said = {(agent, row[1][0]): protocol for row in cells for agent, protocol in zip(row[0], row[-1], strict=True)}
    of_atari = [
        (agent, name)
        for agent in presets.AGENTS
        for name in presets.names(agent)
        if name not in {**presets.TASKS, **presets.ANYWHERE}
    ]
    assert said == {(agent, name): resolved(agent, name)[3]["protocol"] for agent, name in of_atari}
