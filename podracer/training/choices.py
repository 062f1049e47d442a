"""Choices that a run made for settings that say "auto", for the line at its start and its files."""

from __future__ import annotations

import math
from typing import Any, get_args

from podracer import nets, spaces
from podracer.environments.gate import MOST_CHANNELS
from podracer.learning import resets
from podracer.nets.encoding import images, seen_spec, visible
from podracer.search import world_models
from podracer.types import Agent, EnvSpec

IMAGE_SIDE = 16
"""Arrays with two axes of at least this are taken for images."""


def of(agent: Agent, spec: EnvSpec, arch: str, own_network: bool) -> dict[str, str]:
    """`arch`, and of an agent whose config says so, `torso` and `memory`.

    Args:
      agent: the agent.
      spec: of its environment.
      arch: of the driver.
      own_network: whether the network is the user's own.
    """
    config, chosen = agent.config, {"arch": arch}
    if own_network:
        return chosen | {"torso": "your own network"}
    if not hasattr(config, "torso"):
        return chosen
    if isinstance(config, nets.CriticsConfig):
        return chosen | {"torso": config.torso}
    stacked = getattr(config, "frame_stack", 1)
    stacked_spec = seen_spec(nets.stacked_spec(spec, stacked), getattr(config, "policy_observations", ()))
    if isinstance(config, world_models.Sizes):
        torso, core = world_models.chosen_torso(stacked_spec, config.torso), ""
    else:
        torso = nets.choose_torso(stacked_spec, config.torso)
        core = getattr(config, "core_settings", nets.NO_CORE).describe()  # an agent of one's own may have none
    memory = ([core] if core else []) + ([f"{stacked} frames"] if stacked > 1 else [])
    return chosen | {"torso": torso, "memory": " and ".join(memory) or "none"}


def line(chosen: dict[str, str]) -> str:
    """The choices in a line, for the start of a run; "" where there are none."""
    return ", ".join(f"{name}: {value}" for name, value in chosen.items() if name != "arch")


def flat_images(agent: Agent, spec: EnvSpec, chosen: dict[str, str]) -> list[str]:
    """A line for each image that is taken for flat numbers unless "mlp" was asked for, with what to do."""
    space = spec.observation_space
    torso, found = chosen.get("torso"), _images(space, "the observation")
    if torso in get_args(nets.Torso) and torso != "mlp":
        # Convolutions have those at the top of a `Dict`.
        seen = [f"the observation[{member!r}]" if member else "the observation" for member in images(space)]
        found = [(name, item) for name, item in found if name not in seen]
    elif torso != "mlp" or agent.config.torso != "auto":
        return []
    remedy = (
        "they take uint8 images [H, W] or [H, W, C], alone or at the top of a Dict (frame_stack stacks several), or "
        "give your own network"
    )
    if nets.is_image(space) and (*space.shape, 1)[2] <= MOST_CHANNELS:  # type: ignore[union-attr]
        remedy = "torso='resnet' takes images of any size"
    return [
        f"{name}, {space.dtype} {list(space.shape)}, goes into the network as {math.prod(space.shape):,} numbers, "
        f"without convolutions: {remedy}"
        for name, space in found
    ]


def no_resets(agent: Agent, updates: float) -> list[str]:
    """A line where a run of so many updates, those before its replay is filled included, is too short for a reset."""
    interval = agent.config.reset_interval if isinstance(agent.config, resets.ResetConfig) else 0
    learnt = updates - resets.updates_while_filling(agent.replay)
    if not interval or learnt >= 2 * interval:
        return []
    return [
        f"reset_interval={interval:,}: no reset is expected, for the run has about {max(learnt, 0):,.0f} updates, and "
        "the last interval has none"
    ]


def _images(space: spaces.Space, name: str) -> list[tuple[str, Any]]:
    if isinstance(space, spaces.Dict):
        return [found for key, item in visible(space).items() for found in _images(item, f"{name}[{key!r}]")]
    sides = sorted(space.shape)[-2:]
    return [(name, space)] if len(sides) == 2 and sides[0] >= IMAGE_SIDE else []
