"""Presets of `sac`, in layers: each says what differs from the one below it.

`td3` is Fujimoto et al. 2018 with SAC's learning rate (podracer/agents/sac.py has the other deviations). `massive` is
for thousands of lanes on one accelerator, and has no name of its own: `playground` is MuJoCo Playground's SAC by brax
(Zakka et al. 2025), `fast_td3` is Seo et al. 2025 (arXiv 2505.22642) and `fast_sac` its SAC (arXiv 2512.01996), all by
their code. `simba_v2` is Lee et al. 2025 (arXiv 2502.15280) for episodes of 1,000 steps: its discount is 1 - 5 / steps,
between 0.95 and 0.995.

Deviations: `fast_td3` keeps 4.2 million rows and not 10.5, and AdamW leaves biases and scales alone. Categorical values
need `max_value`, the largest return of a task, which few tasks have here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Layer(NamedTuple):
    """A preset, as differences.

    Attributes:
      below: the layer that it is added to, "" for the defaults.
      agent: fields of the agent's config, eight at most.
      run: fields of `RunConfig`.
    """

    below: str
    agent: Mapping[str, Any]
    run: Mapping[str, Any] = {}


LAYERS = {
    "td3": Layer(
        "",
        {
            "policy": "deterministic",
            "policy_interval": 2,
            "noise": (0.1, 0.1),
            "target_noise": 0.2,
            "target_policy": True,
            "replay_min_size": 25_000,
        },
    ),
    "massive": Layer(
        "",
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
    ),
    "playground": Layer(
        "massive",
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
    ),
    "fast": Layer(
        "massive",
        {
            "values": "categorical",
            "discount": 0.97,
            "tau": 0.1,
            "policy_interval": 4,
            "optimizer": "adamw",
            "weight_decay": 1e-3,
            "value_hidden_sizes": (768, 384, 192),
        },
    ),
    "fast_sac": Layer(
        "fast",
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
    ),
    "fast_td3": Layer(
        "fast",
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
    ),
    "bounded": Layer(
        "",
        {
            "values": "categorical",
            "max_value": 5.0,
            "normalize_observations": True,
            "normalize_rewards": True,
            "alpha_init": 0.01,
            "learning_rate_schedule": "linear",
            "final_rate": 0.5,
        },
    ),
    "simba_v2": Layer(
        "bounded",
        {
            "torso": "simba_v2",
            "hidden_sizes": (128,),
            "value_hidden_sizes": (512, 512),
            "min_std": 4.54e-5,  # exp(-10)
            "target_entropy": -0.5,
            "learning_rate": 1e-4,
            "discount": 0.995,
        },
    ),
}
"""All layers, also those without a name."""

NAMES = ("td3", "playground", "fast_sac", "fast_td3", "simba_v2")
"""The layers that a user can name."""

LONG = ("CheetahRun", "HumanoidWalk", "WalkerRun", "Hopper", "Finger", "Swimmer", "Acrobot")
"""Tasks of Playground, or beginnings of their names, that `playground` trains for twice as long."""


def settings(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the agent's config and of the run's that a layer and those below it give."""
    layer = LAYERS[name]
    agent, run = settings(layer.below) if layer.below else ({}, {})
    return agent | dict(layer.agent), run | dict(layer.run)


def of_task(name: str, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Further fields of the agent's config and of the run's for a preset on one of Playground's tasks."""
    agent, run = {}, {}
    if name == "playground" and task.startswith(LONG):
        run["total_steps"] = 10_000_000
    if name in ("fast_sac", "fast_td3") and "Joystick" in task:
        agent["max_value"] = 20.0 if name == "fast_sac" else 10.0
    if name in ("fast_sac", "fast_td3") and task == "CheetahRun":
        agent |= {"max_value": 500.0, "n_step": 3}
    if name == "fast_td3" and task == "CheetahRun":
        agent |= {"noise": (0.1, 0.4), "target_noise": 0.1}
    if name == "fast_td3" and task.startswith("Go1"):
        agent |= {"noise": (0.2, 0.8), "replay_ratio": 256.0}
    return agent, run
