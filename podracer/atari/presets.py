"""Agents' settings for Atari by name, as differences: the changes of one paper to another.

DQN's begin with `nature`: the changes of Mnih et al. 2015 to our defaults for small tasks. The numbers of `double`,
`c51`, `qr` and `rainbow` are dqn_zoo's, and so is the protocol of the last three.
"""

from __future__ import annotations

import fractions
from collections.abc import Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """The changes that a preset makes.

    Attributes:
      base: the preset that it changes; the agent's defaults if None.
      agent: fields of the agent's config.
      run: fields of `RunConfig`.
      env: fields of `AtariOptions`, which go before the protocol's.
      protocol: name of the protocol of games (`podracer.atari.PROTOCOLS`); the base's if empty.
    """

    base: str | None = None
    agent: Mapping[str, Any] = {}
    run: Mapping[str, Any] = {}
    protocol: str = ""
    env: Mapping[str, Any] = {}


DQN: dict[str, Difference] = {
    "nature": Difference(
        None,
        {
            "batch_size": 32,
            "replay_ratio": 8.0,
            "target_interval": 2_500,
            "replay_capacity": 1_000_000,
            "replay_min_size": 50_000,
            "double": False,
            "optimizer": "rmsprop",
            "learning_rate": 2.5e-4,
            "learning_rate_schedule": "constant",
            "optimizer_eps": 0.01 / 32**2,  # the paper's gradients are sums over a batch, and this one is squared
            "max_grad_norm": float("inf"),
            "max_error": 1.0,
            "epsilon_final": 0.1,
            "epsilon_decay": 1_000_000,
            "evaluation_epsilon": 0.05,
            "clip_rewards": True,
            "frame_stack": 4,
            "torso": "nature",
            "init": "uniform",
        },
        {"num_envs": 1, "mode": "serial", "checkpoint_replay": False},
        "nature",
    ),
    "fast_dqn": Difference("nature", {}, {"num_envs": 8, "mode": "lockstep"}, "fast_dqn"),
    "double": Difference(
        "nature", {"double": True, "target_interval": 7_500, "epsilon_final": 0.01, "evaluation_epsilon": 0.01}
    ),
    "c51": Difference(
        "nature",
        {
            "values": "categorical",
            "max_value": 10.0,
            "optimizer": "adam",
            "learning_rate": 2.5e-4,
            "optimizer_eps": 0.01 / 32,
            "max_grad_norm": 10.0,
            "epsilon_final": 0.01,
            "evaluation_epsilon": 1e-3,
        },
        protocol="dqn_zoo",
    ),
    "qr": Difference("c51", {"values": "quantile", "num_bins": 201, "learning_rate": 5e-5}),
    "noisy": Difference(
        "c51",
        {
            "noise": 0.1,
            "torso": "nature_conv",
            "head_size": 512,
            "epsilon_start": 0.0,
            "epsilon_final": 0.0,
            "evaluation_epsilon": 0.0,
        },
        {"num_envs": 8, "mode": "lockstep"},
    ),
    "rainbow": Difference(
        "noisy",
        {
            "target_interval": 2_000,
            "replay_min_size": 20_000,
            "n_step": 3,
            "double": True,
            "dueling": True,
            "learning_rate": 6.25e-5,
            "optimizer_eps": 1.5e-4,
            "priority_exponent": 0.5,
        },
    ),
}
"""Presets of `dqn`. `noisy` is no paper's: C51 that explores by noise, on which Rainbow is built. If the mode is
lockstep, rollouts are one period long (`rollout_length`)."""

PAPERS: dict[str, Difference] = {
    "muzero": Difference(
        agent={
            "rollout_length": 20,
            "absorbing": True,
            "simulations": 50,
            "dirichlet_alpha": 0.25,
            "embedding_dtype": "bfloat16",
            "discount": 0.997,
            "num_bins": 601,
            "batch_size": 1024,
            "replay_ratio": 2.0,
            "replay_capacity": 1_000_000,
            "replay_min_size": 20_000,
            "priority_exponent": 1.0,
            "importance_exponent": 1.0,
            "clip_rewards": True,
            "frame_stack": 4,
            "torso": "convolutions",
        },
        run={"num_envs": 512, "checkpoint_replay": False},
        protocol="impala",
    ),
    "ppo": Difference(protocol="ppo"),
    "pqn": Difference(protocol="ppo", run={"total_steps": 50_000_000, "eval_every": 50_000_000}),
    "r2d2": Difference(protocol="seed"),
    "vtrace": Difference(protocol="impala"),
}
"""Presets from papers, by agent: added to the agent's `CONFIG.atari()`, or all there is where an agent has none. PQN's
authors play as PPO's do, for 200M frames. From MuZero's paper are search, targets, batches, priorities and discount;
`replay_ratio` is from Schrittwieser et al. 2021. The rest differs: a network of 64 channels, fewer blocks and
LayerNorm; 4 grey frames of 84x84, not 32 in colour of 96x96; Adam, clipped gradients and no weight decay; a replay of
1M rows, not 25M; 200M frames, not 20G."""


EFFICIENTZERO: dict[str, Difference] = {
    "atari": Difference(
        None,
        {
            "simulations": 50,
            "embedding_dtype": "bfloat16",
            "discount": 0.997**4,
            "max_value": 58_705.584,  # which `returns.rescale` makes 300 of, so that bins are 1 apart
            "num_bins": 601,
            "batch_size": 256,
            "replay_ratio": 256.0,
            "replay_min_size": 2_000,
            "reanalyse_group": 8,
            "target_interval": 200,
            "optimizer": "sgd",
            "learning_rate": 0.2,
            "warmup_updates": 1_000,
            "final_scale": 0.1,
            "l2_cost": 5e-5,
            "clip_rewards": True,
            "frame_stack": 4,
            "torso": "convolutions",
            "norm": "batch",
            "head_size": 32,
            "lstm_size": 512,
            "projection_size": 1024,
            "forecast_size": 512,
        },
        {"num_envs": 8, "final_updates": 22_000, "eval_episodes": 32},
        "atari100k",
        {"image_size": 96, "grayscale": False},
    ),
    "speedyzero": Difference(
        "atari",
        {
            "batch_size": 2048,
            "reanalyse_group": 5,
            "target_interval": 25,
            "refresh_interval": 10,
            "optimizer": "clipped_lars",
            "learning_rate": 0.5657,
            "warmup_updates": 125,
            "final_scale": 1.0,
            "max_grad_norm": 10.0,
            "augment": True,
        },
        {"num_shards": 8, "final_updates": 2_750, "eval_episodes": 100},
    ),
    "gumbel": Difference("atari", {"search": "gumbel", "simulations": 16, "considered": 8}),
}
"""Presets of `efficientzero`: Ye et al. 2021 by their code, for as many steps as a run has (`by_run`); Mei et al. 2023
(SpeedyZero), whose batches have eight shards, also on one device, because statistics are of a shard; and the first with
the search of Wang et al. 2024 (EfficientZero V2), which takes a third of the simulations."""

SEVERAL: dict[str, dict[str, Difference]] = {"dqn": DQN, "efficientzero": EFFICIENTZERO}
"""Agents that have several presets for Atari."""


def resolve(agent: str, name: str) -> Difference:
    """The preset as a difference to the agent's defaults: without a base, its own entries before its base's."""
    found = SEVERAL[agent][name]
    if found.base is None:
        return found
    base = resolve(agent, found.base)
    merged = {part: {**getattr(base, part), **getattr(found, part)} for part in ("agent", "run", "env")}
    return Difference(None, **merged, protocol=found.protocol or base.protocol)


LARS_ETA = dict.fromkeys(("Asterix", "Gopher"), 0.01) | dict.fromkeys(
    ("KungFuMaster", "Pong", "RoadRunner", "UpNDown"), 0.005
)
"""The eta of Clipped LARS by game, if not the default, 0.03 (Mei et al. 2023, table 7)."""


def by_run(name: str, config: Mapping[str, Any], game: str, total_steps: int) -> dict[str, Any]:
    """Fields of a preset of `efficientzero` that depend on the game and on the length of a run.

    Args:
      name: the preset's name.
      config: fields of the agent's config.
      game: the game's name without version.
      total_steps: the run's steps. The replay holds all of them, and 0.3 of them are the interval of off-policy
        corrections. SpeedyZero makes 15,000 updates also in more than 100,000 steps (Mei et al. 2023, section 5.1).
    """
    found: dict[str, Any] = {"correction_interval": max(1, round(0.3 * total_steps)), "replay_capacity": total_steps}
    if config.get("optimizer") == "clipped_lars" and game in LARS_ETA:
        found["lars_eta"] = LARS_ETA[game]
    if name == "speedyzero" and total_steps > 100_000:
        opening = config["replay_min_size"]
        found["replay_ratio"] = config["replay_ratio"] * (100_000 - opening) / (total_steps - opening)
    return found


def rollout_length(config: Any, num_envs: int) -> int:
    """T, the rollout length of W lanes in one period between copies to the target network: C / W rows each.

    Args:
      config: DQN's, whose `target_interval` updates of batch_size / replay_ratio rows each are C rows.
      num_envs: W.

    Raises:
      ValueError: if C is not whole, or W does not divide it, with the nearest numbers that do.
    """
    per_update = config.batch_size / fractions.Fraction(config.replay_ratio).limit_denominator(10_000)
    C, W = config.target_interval * per_update, num_envs
    where = f"target_interval={config.target_interval} updates of {float(per_update):g} rows"
    if C.denominator > 1:
        raise ValueError(
            f"{where} are no whole number of rows, of which rollouts could be made; use a replay_ratio that divides "
            f"target_interval * batch_size={config.target_interval * config.batch_size} (or give rollout_length)."
        )
    C = int(C)
    if C % W:
        fit = [n for n in range(1, C + 1) if C % n == 0]
        nearest = [*[n for n in fit if n < W][-1:], *[n for n in fit if n > W][:1]]
        raise ValueError(
            f"num_envs={W} must divide the {C} rows of {where}, for its rollouts together are one period; use "
            f"{' or '.join(map(str, nearest))} (or give rollout_length)."
        )
    return C // W
