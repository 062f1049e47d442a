"""Settings to begin with, by name: what differs from the defaults of an agent for a kind of task.

`atari` is what the agent's paper says of Atari, and DQN has several such papers (podracer/atari/presets.py). `classic`
is for tasks of classic control that defaults do not solve, each with a measured row in docs/results, `mujoco` for the
locomotion tasks of Gymnasium, `playground` and `brax` for robots of these libraries
(podracer/training/robot_presets.py), `minatar` for MinAtar, and `board` for games that are larger than tic-tac-toe.
Those of `sac` are for any task (podracer/training/sac_presets.py). A protocol, of which a preset for Atari has one, is
how games are played and reported (podracer/atari/protocols.py).

What is given by a user goes before a protocol that is given by name, that before a preset, and that before defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import envs_jax
from podracer import atari, configs, environments
from podracer.agents import registry
from podracer.agents.registry import AGENTS
from podracer.atari import presets as papers
from podracer.run.config import RunConfig
from podracer.training import robot_presets, sac_presets
from podracer.training.settings import Settings, merged

LUNAR_LANDER = Settings(
    {"rollout_length": 1024, "num_minibatches": 64, "discount": 0.999, "gae_lambda": 0.98, "learning_rate": 3e-4},
    {"num_envs": 16, "total_steps": 1_000_000},
)

CLASSIC = {
    ("ppo", "Acrobot"): Settings(
        {
            "rollout_length": 256,
            "gae_lambda": 0.94,
            "learning_rate": 3e-4,
            "entropy_cost": 0.0,
            "normalize_observations": True,
        },
        {"num_envs": 16, "total_steps": 500_000},
    ),
    ("ppo", "MountainCar"): Settings(
        {"rollout_length": 128, "gae_lambda": 0.98, "entropy_cost": 0.0, "normalize_observations": True},
        {"num_envs": 16, "total_steps": 1_000_000},
    ),
    # With the defaults it learns to stand still.
    ("ppo", "MountainCarContinuous"): Settings(
        {"rollout_length": 256, "gae_lambda": 0.98, "entropy_cost": 0.0, "normalize_observations": True},
        {"num_envs": 16, "total_steps": 500_000},
    ),
    ("ppo", "LunarLander"): LUNAR_LANDER,
    ("ppo", "LunarLanderContinuous"): LUNAR_LANDER,
    ("ppo", "Pendulum"): Settings(
        {"rollout_length": 256, "num_epochs": 10, "discount": 0.9, "entropy_cost": 0.0},
        {"num_envs": 16, "total_steps": 500_000},
    ),
    # Networks of PPO's size are enough, and make an update ten times as fast on CPU.
    ("sac", "Pendulum"): Settings(
        {"learning_rate": 1e-3, "replay_min_size": 1_000, "hidden_sizes": (64, 64)},
        {"num_envs": 16, "total_steps": 20_000},
    ),
    ("pqn", "LunarLander"): Settings(
        {"discount": 0.99, "learning_rate": 5e-4, "epsilon_final": 0.05}, {"num_envs": 128, "total_steps": 1_000_000}
    ),
}

BOARD = {
    # What half an hour of two cores can learn (benchmarks/connect_four.py).
    ("alphazero", "connect_four"): Settings(
        {
            "considered": 7,
            "n_step": 42,
            "replay_ratio": 2.0,
            "blocks": 2,
            "channels": 16,
        },
        {},
        {"opening_plies": 20},
    ),
    # For an accelerator; no result of it is measured yet.
    ("alphazero", "go_9x9"): Settings(
        {
            "rollout_length": 32,
            "simulations": 32,
            "sampled_plies": 30,
            "n_step": 128,
            "batch_size": 4096,
            "replay_ratio": 2.0,
            "replay_capacity": 1_000_000,
            "replay_min_size": 65_536,
            "l2_cost": 1e-4,
            "blocks": 6,
            "channels": 128,
        },
        {"num_envs": 1024},
        {"opening_plies": 8},
    ),
}

MUJOCO_TASKS = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Pusher", "Reacher", "Swimmer", "Walker2d"),
)

# CleanRL's settings for continuous actions, with 16 lanes of 128 rows instead of one of 2,048.
MUJOCO = Settings(
    {
        "rollout_length": 128,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "value_clip_epsilon": 0.2,
        "entropy_cost": 0.0,
        "normalize_observations": True,
    },
    {"num_envs": 16, "total_steps": 1_000_000, "mode": "serial"},
)

MINATAR_GAMES = tuple(name for name in envs_jax.names() if name.startswith("minatar_"))
"""The names of the environments of MinAtar."""

# All see the planes through the papers' convolution and layer: with MLPs of two layers PPO, PQN and V-trace have 2 to 4
# points on asterix after two million steps, and with it 18 to 35. PPO's and PQN's are those of Gallici et al. 2024 for
# MinAtar, by their code (`ppo_minatar`, `pqn_minatar`). DQN's are those of Young and Tian 2019, whose one lane are
# eight here, and whose RMSProp has its 0.01 outside the root. V-trace's are our own, found on breakout: with the
# defaults' fewer and smaller updates it stays at 6 points there. So are those of MuZero and EfficientZero: at first
# values differ by less than they are wrong, and a search that scales them to [0, 1] all the same makes policies of
# noise; and a model that cannot tell which action ends the game dies of it (docs/adr/0050-models-that-end.md). Nothing
# reanalyses EfficientZero's values here, which costs too much time, so that they keep their ten rewards.
MINATAR: dict[str, Settings] = {
    "vtrace": Settings(
        {
            "rollout_length": 32,
            "learning_rate": 3e-3,
            "learning_rate_schedule": "constant",
            "entropy_cost": 0.02,
            "trace_lambda": 0.9,
            "torso": "minatar",
        },
        {"num_envs": 8, "total_steps": 10_000_000},
    ),
    "ppo": Settings(
        {
            "rollout_length": 128,
            "num_minibatches": 8,
            "learning_rate": 5e-3,
            "entropy_cost": 1e-4,
            "torso": "minatar",
            "separate": False,
            "normalize_rewards": False,
        },
        {"num_envs": 64, "total_steps": 10_000_000},
    ),
    "pqn": Settings(
        {
            "num_epochs": 2,
            "discount": 0.99,
            "trace_lambda": 0.65,
            "learning_rate": 5e-4,
            "epsilon_final": 0.05,
            "torso": "minatar",
        },
        {"num_envs": 128, "total_steps": 10_000_000},
    ),
    "dqn": Settings(
        {
            "replay_ratio": 32.0,
            "batch_size": 32,
            "target_interval": 1_000,
            "replay_capacity": 100_000,
            "replay_min_size": 5_000,
            "double": False,
            "optimizer": "rmsprop",
            "learning_rate": 2.5e-4,
            "learning_rate_schedule": "constant",
            "optimizer_eps": 0.01**2,
            "max_grad_norm": float("inf"),
            "max_error": 1.0,
            "epsilon_final": 0.1,
            "epsilon_decay": 100_000,
            "torso": "minatar",
        },
        {"num_envs": 8, "total_steps": 5_000_000},
    ),
    "muzero": Settings(
        {
            "search": "gumbel",
            "least_range": 0.3,
            "torso": "minatar",
            "state_size": 128,
            "unroll_length": 2,
            "termination_cost": 1.0,
            "replay_ratio": 4.0,
            "replay_capacity": 200_000,
        },
        {"num_envs": 32, "total_steps": 1_000_000},
    ),
    "efficientzero": Settings(
        {
            "search": "gumbel",
            "least_range": 0.3,
            "torso": "minatar",
            "state_size": 128,
            "unroll_length": 2,
            "horizon": 1,
            "n_step": 10,
            "termination_cost": 1.0,
            "reanalyse": 0.0,
            "priority_exponent": 0.0,
            "importance_exponent": 0.0,
            "correction_interval": 0,
            "replay_ratio": 4.0,
            "replay_capacity": 200_000,
        },
        {"num_envs": 32, "total_steps": 1_000_000},
    ),
}

TASKS: dict[str, dict[tuple[str, str], Settings]] = {
    "classic": CLASSIC,
    "mujoco": {("ppo", task): MUJOCO for task in MUJOCO_TASKS},
    **{
        name: {("ppo", task): merged(*layers) for task, layers in tasks.items()}
        for name, tasks in (("playground", robot_presets.PLAYGROUND_LAYERS), ("brax", robot_presets.BRAX_LAYERS))
    },
    "minatar": {(agent, game): found for agent, found in MINATAR.items() for game in MINATAR_GAMES},
    "board": BOARD,
}
"""By name, and then by agent and task, whose version and kind of environment (`envpool:`, `pgx:` or our own) do not
matter."""


ANYWHERE: dict[str, dict[str, Settings]] = {
    name: {"sac": merged(*layers)} for name, layers in sac_presets.LAYERS.items()
}
"""By name, and then by agent: presets for any task. What `classic` has for the task goes before `td3`."""


def names(agent: str) -> tuple[str, ...]:
    """The presets of an agent by name."""
    of_atari = tuple(papers.SEVERAL.get(agent, ("atari",) if agent in papers.PAPERS else ()))
    of_tasks = (name for name, tasks in TASKS.items() if any(owner == agent for owner, _ in tasks))
    return (*of_atari, *(name for name, owners in ANYWHERE.items() if agent in owners), *of_tasks)


def merge(agent: str, environment: str, preset: str | None, protocol: str | None, given: Settings) -> Settings:
    """Merges the settings of a preset, a protocol and a user.

    Args:
      agent: its name.
      environment: its name.
      preset: a name, or None.
      protocol: a name, or None for the preset's.
      given: what goes before both.

    Raises:
      ValueError: for an unknown name, a preset that another agent has or another environment needs, or a number of
        lanes that does not fit.
    """
    preset_settings = _find(preset, agent, environment) if preset else Settings()
    if protocol:
        layers = [preset_settings, _of_protocol(protocol, agent, environment, preset_settings)]
    elif "protocol" in preset_settings.names:  # what the preset says itself goes before its protocol
        layers = [_of_protocol(preset_settings.names["protocol"], agent, environment, preset_settings), preset_settings]
    else:
        layers = [preset_settings]
    found = merged(*layers, given)
    if preset_settings.run.get("mode") == "lockstep" and "rollout_length" not in given.agent:
        return _with_periods(agent, found, preset_settings)
    if agent == "efficientzero" and preset and preset not in TASKS:
        total_steps = configs.from_json(RunConfig, found.run).total_steps
        fitted = papers.by_run(preset, found.agent, _task(environment), total_steps)
        return found._replace(agent={**found.agent, **fitted, **given.agent})
    return found


def merge_given(
    agent: Any,
    environment: Any,
    preset: str | None,
    protocol: str | None,
    config: Any,
    run_settings: Mapping[str, Any],
    env_options: Mapping[str, Any] | None,
) -> Settings:
    """Merges a preset and a protocol with the arguments of `podracer.train`, which go before them.

    Raises:
      ValueError: where they do not fit the agent, the environment or the settings.
    """
    if not (isinstance(agent, str) and isinstance(environment, str) and isinstance(config or {}, Mapping)):
        asked = f"preset={preset!r}" if preset else f"protocol={protocol!r}"
        raise ValueError(f"{asked} needs an agent and an environment by name, and config as a mapping.")
    return merge(agent, environment, preset, protocol, Settings(config or {}, run_settings, env_options or {}))


def _find(name: str, agent: str, environment: str) -> Settings:
    """A preset by name for an agent by name and an environment by name.

    Raises:
      ValueError: where there is none.
    """
    if agent not in AGENTS:
        raise ValueError(registry.unknown(agent))
    if name not in names(agent):
        owners = [other for other in AGENTS if name in names(other)]
        if owners:
            has = ", ".join(names(agent)) or "none"
            raise ValueError(f"preset={name!r} is of {', '.join(owners)}; the presets of {agent}: {has}.")
        raise ValueError(f"preset={name!r}: unknown; {configs.suggest(name, names(agent))}")
    if agent in ANYWHERE.get(name, {}):
        # TD3's settings are those of the defaults' size, and go with `classic`'s.
        of_classic = _in_tasks("classic", agent, environment) if name == "td3" else None
        of_task = sac_presets.of_task(name, environment.partition(":")[0], _task(environment))
        found = merged(ANYWHERE[name][agent], of_classic or Settings(), *of_task)
    else:
        found = _of_task(name, agent, environment) if name in TASKS else _of_atari(name, agent, environment)
    return found._replace(names={"preset": name, **found.names})


def suggestion(agent: Any, environment: Any) -> list[str]:
    """A line on the preset that is made for an agent on a task; none where there is none, or they are objects."""
    if not (isinstance(agent, str) and isinstance(environment, str)):
        return []
    # Of tasks with one name, such as brax:halfcheetah and HalfCheetah-v4, the preset by the kind's name is meant.
    kind = environment.partition(":")[0]
    order = sorted(TASKS, key=lambda name: name != kind)
    name = next((name for name in order if _in_tasks(name, agent, environment)), None)
    return [f"{agent} has settings for {environment}: --preset {name}, or preset={name!r} in Python"] if name else []


def _of_task(name: str, agent: str, environment: str) -> Settings:
    if found := _in_tasks(name, agent, environment):
        return found
    available = ", ".join(f"{owner} on {known}" for owner, known in TASKS[name])
    raise ValueError(f"preset={name!r}: there is none for {agent} on {environment}; there are {available}.")


def _in_tasks(name: str, agent: str, environment: str) -> Settings | None:
    task = _task(environment).replace("_", "").lower()
    known = {(owner, known.replace("_", "").lower()): settings for (owner, known), settings in TASKS[name].items()}
    return known.get((agent, task))


def _task(environment: str) -> str:
    """A name without kind and version."""
    # Several tasks have no settings of their own.
    return environment if "," in environment else environment.rpartition(":")[2].partition("-v")[0]


def _of_atari(name: str, agent: str, environment: str) -> Settings:
    _check_game(f"preset={name!r}", environment)
    if agent in papers.SEVERAL:
        found = papers.resolve(agent, name)
        return Settings(found.agent, found.run, found.env, {"protocol": found.protocol})
    goes_with = papers.PAPERS[agent]
    changes = goes_with.agent or _changes(AGENTS[agent][0].atari())  # type: ignore[attr-defined]
    return Settings(changes, goes_with.run, {}, {"protocol": goes_with.protocol})


def _of_protocol(name: str, agent: str, environment: str, preset_settings: Settings) -> Settings:
    protocol = atari.protocol(name)
    _check_game(f"protocol={name!r}", environment)
    if agent not in AGENTS:
        raise ValueError(registry.unknown(agent))
    settings = vars(configs.from_json(AGENTS[agent][0], preset_settings.agent))
    return Settings(protocol.agent(settings), protocol.run, protocol.env, {"protocol": name})


def _check_game(what: str, environment: str) -> None:
    for name in environment.split(","):
        # By the name of the class, whose module needs Gymnasium.
        if not name.startswith("envpool:") or environments.options(name).__name__ != "AtariOptions":
            raise ValueError(f"{what}: {name} is not a game of Atari, such as envpool:Pong-v5.")


def _with_periods(agent: str, found: Settings, preset_settings: Settings) -> Settings:
    """With rollouts of one period (see `podracer.atari.presets.rollout_length`).

    Raises:
      ValueError: for several actors, of which each would hand over a part of a period and act between two copies.
    """
    for name in ("actor_threads", "actor_devices"):
        if (number := found.run.get(name) or 1) > 1:
            raise ValueError(
                f"{name}={number}: rollouts of this preset are one period between copies to the target network, which "
                "one actor acts; leave it out (or give rollout_length)."
            )
    num_envs = configs.from_json(RunConfig, found.run).num_envs or preset_settings.run["num_envs"]
    rollout_length = papers.rollout_length(configs.from_json(AGENTS[agent][0], found.agent), num_envs)
    return found._replace(
        agent={**found.agent, "rollout_length": rollout_length}, run={**found.run, "num_envs": num_envs}
    )


def _changes(config: Any) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    defaults = type(config)()
    return {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}
