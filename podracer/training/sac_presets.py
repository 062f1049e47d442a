"""Presets of `sac`, in layers: each says what differs from the one below it.

`td3` is Fujimoto et al. 2018 with SAC's learning rate (podracer/agents/sac.py has the other deviations). `MASSIVE` is
for thousands of lanes on one accelerator, and has no name of its own: `playground` is MuJoCo Playground's SAC by brax
(Zakka et al. 2025), `fast_td3` is Seo et al. 2025 (arXiv 2505.22642) and `fast_sac` its SAC (arXiv 2512.01996), all by
their code. `simba_v2` is Lee et al. 2025 (arXiv 2502.15280): its discount is 1 - 5 / steps of an episode, between 0.95
and 0.995, and that of 1,000 steps where the limit is not known here.

Deviations: `fast_td3` keeps 4.2 million rows and not 10.5, and AdamW leaves biases and scales alone. Categorical values
need `max_value`, the largest return of a task, which only Playground's tasks have here.
"""

from __future__ import annotations

from podracer.nets.policy_config import MEMBERS
from podracer.training import robot_presets
from podracer.training.settings import Settings, merged

TD3 = Settings(
    {
        "policy": "deterministic",
        "policy_interval": 2,
        "noise": (0.1, 0.1),
        "target_noise": 0.2,
        "target_policy": True,
        "replay_min_size": 25_000,
    },
)

MASSIVE = Settings(
    {
        "batch_size": 8_192,
        "replay_ratio": 16.0,
        "replay_capacity": 4_194_304,
        "replay_min_size": 40_960,
        "hidden_sizes": (512, 256, 128),
        "normalize_observations": True,
        "random_start": False,
    },
    {"num_envs": 4_096},
)

PLAYGROUND = Settings(
    {
        "batch_size": 512,
        "replay_ratio": 32.0,
        "replay_min_size": 8_192,
        "hidden_sizes": (256, 256),
        "learning_rate": 1e-3,
        "alpha_rate": 0.3,
        "layer_norm": True,
        "target_entropy": -0.5,
    },
    {"num_envs": 128, "total_steps": 5_000_000},
)

FAST = Settings(
    {
        "values": "categorical",
        "discount": 0.97,
        "tau": 0.1,
        "policy_interval": 4,
        "optimizer": "adamw",
        "weight_decay": 1e-3,
        "value_hidden_sizes": (768, 384, 192),
    },
)

FAST_SAC = Settings(
    {
        "target_entropy": 0.0,
        "alpha_init": 1e-3,
        "max_std": 1.0,
        "critics": "mean",
        "layer_norm": True,
        "activation": "swish",
        "optimizer_b2": 0.95,
        "tau": 0.125,
    },
)

FAST_TD3 = Settings(
    {
        "policy": "deterministic",
        "policy_interval": 2,
        "noise": (0.001, 0.4),
        "target_noise": 0.001,
        "weight_decay": 0.1,
        "batch_size": 32_768,
        "replay_ratio": 64.0,
        "value_hidden_sizes": (1024, 512, 256),
    },
    {"num_envs": 1_024},
)

BOUNDED = Settings(
    {
        "values": "categorical",
        "max_value": 5.0,
        "normalize_observations": True,
        "normalize_rewards": True,
        "alpha_init": 0.01,
        "learning_rate_schedule": "linear",
        "final_rate": 0.5,
    },
)

SIMBA_V2 = Settings(
    {
        "torso": "simba_v2",
        "hidden_sizes": (128,),
        "value_hidden_sizes": (512, 512),
        "min_std": 4.54e-5,  # exp(-10)
        "target_entropy": -0.5,
        "learning_rate": 1e-4,
        "discount": 0.995,
    },
)

LAYERS: dict[str, tuple[Settings, ...]] = {
    "td3": (TD3,),
    "playground": (MASSIVE, PLAYGROUND),
    "fast_sac": (MASSIVE, FAST, FAST_SAC),
    "fast_td3": (MASSIVE, FAST, FAST_TD3),
    "simba_v2": (BOUNDED, SIMBA_V2),
}
"""The layers of every preset, from the lowest one."""

LONG = (
    *("AcrobotSwingup", "AcrobotSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard"),
    *("HopperHop", "HopperStand", "HumanoidWalk", "SwimmerSwimmer6", "WalkerRun"),
)
"""Tasks of Playground that `playground` trains for twice as long."""

JOYSTICKS = (
    *("ApolloJoystickFlatTerrain", "BarkourJoystick", "BerkeleyHumanoidJoystickFlatTerrain"),
    *("BerkeleyHumanoidJoystickRoughTerrain", "G1JoystickFlatTerrain", "G1JoystickRoughTerrain"),
    *("Go1JoystickFlatTerrain", "Go1JoystickRoughTerrain", "H1JoystickGaitTracking", "Op3Joystick"),
    *("SpotFlatTerrainJoystick", "SpotJoystickGaitTracking", "T1JoystickFlatTerrain", "T1JoystickRoughTerrain"),
)
"""Tasks of Playground whose robots follow a commanded velocity."""

GO1 = ("Go1Footstand", "Go1Getup", "Go1Handstand", "Go1JoystickFlatTerrain", "Go1JoystickRoughTerrain")

EPISODE_LENGTHS = {"pendulum": 200, "pusher": 100, "reacher": 50}
"""Steps of an episode of tasks of classic control and of Gymnasium's MuJoCo; 1,000 or no limit in all others."""


def of_task(name: str, kind: str, task: str) -> list[Settings]:
    """Further layers of a preset for a task.

    Args:
      name: of the preset.
      kind: of the environment, such as "playground"; its name where it has none.
      task: without kind and version.
    """
    if name == "simba_v2" and kind in (task, "envpool", "gymnasium") and task.lower() in EPISODE_LENGTHS:
        return [Settings({"discount": discount(EPISODE_LENGTHS[task.lower()])})]
    return _of_playground(name, task) if kind == "playground" else []


def discount(episode_length: int) -> float:
    """SimbaV2's discount for episodes of so many steps (Lee et al. 2025)."""
    return min(max(1.0 - 5.0 / episode_length, 0.95), 0.995)


def _of_playground(name: str, task: str) -> list[Settings]:
    # A robot with a state that its sensors do not tell shows it to the critics alone, as with PPO.
    seen = merged(*robot_presets.PLAYGROUND_LAYERS.get(task, ())).agent
    layers = [Settings({member: seen[member] for member in MEMBERS if member in seen})]
    if name == "playground" and task in LONG:
        layers.append(Settings({}, {"total_steps": 10_000_000}))
    if name in ("fast_sac", "fast_td3"):
        layers.append(Settings({"max_value": 20.0 if name == "fast_sac" and task in JOYSTICKS else 10.0}))
    if name in ("fast_sac", "fast_td3") and task == "CheetahRun":
        layers.append(Settings({"max_value": 500.0, "n_step": 3}))
    if name == "fast_td3" and task == "CheetahRun":
        layers.append(Settings({"noise": (0.1, 0.4), "target_noise": 0.1}))
    if name == "fast_td3" and task in GO1:
        layers.append(Settings({"noise": (0.2, 0.8), "target_noise": 0.2, "replay_ratio": 256.0}))
    return layers
