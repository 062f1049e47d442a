"""Settings of networks: they reach every agent's network, and what a torso does not have is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from podracer import nets, spaces
from podracer.agents import registry
from podracer.types import EnvSpec
from tests.support import harness

SPEC = EnvSpec("images", spaces.Box(0, 255, (5, 5, 2), np.uint8), spaces.Discrete(3))
NAMES = [name for name, (config, _) in registry.AGENTS.items() if issubclass(config, nets.NetworkConfig)]


def torso_of(name: str, **settings: Any) -> dict[str, Any]:
    """The shapes of the parameters of an agent's torso."""
    cls, make = registry.AGENTS[name]
    agent = make(SPEC, cls(**settings))
    return jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent)).params["params"]["torso"]


@pytest.mark.parametrize("name", NAMES)
def test_torsos_have_the_layers_of_the_settings(name: str) -> None:
    for torso, num_layers in (("mlp", 1), ("small", 3)):
        for layer_norm in (False, True):
            layers = torso_of(name, torso=torso, hidden_sizes=(4,), layer_norm=layer_norm)
            norms = [layer for layer in layers if layer.startswith("LayerNorm")]
            assert (len(layers) - len(norms), len(norms)) == (num_layers, num_layers * layer_norm)
    assert ("LayerNorm_0" in torso_of(name)) == (name == "pqn")
    deep = str(jax.tree_util.tree_structure(torso_of(name, torso="resnet", layer_norm=True)))
    assert deep.count("LayerNorm") == 16, "15 convolutions and the dense layer"
    assert torso_of(name, torso="resnet", width=3, depth=1)["Conv_0"]["kernel"].shape == (3, 3, 2, 48)


def test_agents_with_networks_are_found() -> None:
    assert {"ppo", "vtrace", "dqn", "r2d2", "pqn"} == set(NAMES)


@pytest.mark.parametrize("setting", [{"width": 2}, {"depth": 1}])
def test_other_torsos_have_no_width_and_no_depth(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="torso='shallow' has neither; use torso='resnet', or width=1 and depth=2"):
        nets.NetworkConfig(torso="shallow", **setting)  # type: ignore[arg-type]
