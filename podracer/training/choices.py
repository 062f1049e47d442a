"""Choices that a run made for settings that say "auto", for the line at its start and its files."""

from __future__ import annotations

import math
from typing import Any

from podracer import nets, spaces
from podracer.environments.gate import MOST_CHANNELS
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
    stacked = getattr(config, "frame_stack", 1)
    stacked_spec = nets.stacked_spec(spec, stacked)
    if isinstance(config, world_models.Sizes):
        torso, core = "convolutions" if world_models.takes_convolutions(stacked_spec, config.torso) else "mlp", ""
    else:
        torso = nets.choose_torso(stacked_spec, config.torso)
        core = getattr(config, "core_settings", nets.NO_CORE).describe()  # an agent of one's own may have none
    memory = ([core] if core else []) + ([f"{stacked} frames"] if stacked > 1 else [])
    return chosen | {"torso": torso, "memory": " and ".join(memory) or "none"}


def line(chosen: dict[str, str]) -> str:
    """The choices in a line, for the start of a run; "" where there are none."""
    return ", ".join(f"{name}: {value}" for name, value in chosen.items() if name != "arch")


def flat_images(agent: Agent, spec: EnvSpec, chosen: dict[str, str]) -> list[str]:
    """A line for each image that "auto" takes for flat numbers, with what to do."""
    if chosen.get("torso") != "mlp" or agent.config.torso != "auto":
        return []
    space = spec.observation_space
    remedy = "they take one uint8 image [H, W] or [H, W, C] (frame_stack stacks several), or give your own network"
    if nets.is_image(space) and (*space.shape, 1)[2] <= MOST_CHANNELS:  # type: ignore[union-attr]
        remedy = "torso='resnet' takes images of any size"
    return [
        f"{name}, {space.dtype} {list(space.shape)}, goes into the network as {math.prod(space.shape):,} numbers, "
        f"without convolutions: {remedy}"
        for name, space in _images(space, "the observation")
    ]


def _images(space: spaces.Space, name: str) -> list[tuple[str, Any]]:
    if isinstance(space, spaces.Dict):
        return [found for key, item in space.items for found in _images(item, f"{name}[{key!r}]")]
    sides = sorted(space.shape)[-2:]
    return [(name, space)] if len(sides) == 2 and sides[0] >= IMAGE_SIDE else []
