"""The values that "auto" is resolved to are said and stored, and images that pass for flat numbers are named."""

import types

import numpy as np
import pytest

from podracer import agents, spaces
from podracer.training import choices
from podracer.types import EnvSpec

BYTES = spaces.Box(0, 255, (64, 64, 3), np.uint8)


def said(make, config, space):
    spec = EnvSpec("seen", space, spaces.Discrete(3))
    agent = make(spec, config)
    chosen = choices.of(agent, spec, "anakin", False)
    return chosen, [choices.line(chosen), *choices.flat_images(agent, spec, chosen)]


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Box(0, 255, (4, 64, 64, 3), np.uint8), r"the observation, uint8 [4, 64, 64, 3], goes into"),
        (spaces.Box(0.0, 1.0, (64, 64, 3)), r"the observation, float32 [64, 64, 3], goes into"),
        (spaces.Box(0, 255, (20, 20), np.uint8), r"the observation, uint8 [20, 20], goes into"),
        (spaces.Box(0, 255, (9, 64, 64), np.uint8), r"the observation, uint8 [9, 64, 64], goes into"),
        (
            spaces.Dict({"deep": spaces.Dict({"image": BYTES}), "state": spaces.Box(-1, 1, (3,))}),
            "the observation['deep']['image'], uint8 [64, 64, 3], goes into the network as 12,288 numbers, without con",
        ),
    ],
)
def test_images_that_pass_for_numbers_are_named(space, name):
    chosen, (first, line) = said(agents.ppo.make, agents.PPOConfig(), space)
    assert first == f"torso: {chosen['torso']}, memory: none"
    assert line.startswith(name)
    assert ("torso='resnet' takes images of any size" in line) == (getattr(space, "shape", ()) == (20, 20))
    assert said(agents.ppo.make, agents.PPOConfig(torso="mlp"), space)[1] == ["torso: mlp, memory: none"]


def test_images_beside_those_of_convolutions_are_named():
    members = {
        "camera": BYTES,
        "deep": spaces.Dict({"image": BYTES}),
        "_hidden": BYTES,
        "floats": spaces.Box(0, 1, (64, 64)),
    }
    for torso in ("auto", "nature"):
        _, (_, *lines) = said(agents.ppo.make, agents.PPOConfig(torso=torso), spaces.Dict(members))
        assert [line.split(",")[0] for line in lines] == [
            "the observation['deep']['image']",
            "the observation['floats']",
        ]
        assert "alone or at the top of a Dict" in lines[0]


def test_runs_that_are_too_short_for_a_reset_say_so():
    """20 updates, of which the first 10 are not done, for the replay is filled meanwhile."""
    spec = EnvSpec("seen", spaces.Box(-1, 1, (3,)), spaces.Discrete(3))
    fixed = {"replay_min_size": 1000, "batch_size": 100, "replay_ratio": 1.0}
    made = lambda interval: agents.dqn.make(spec, agents.DQNConfig(**fixed, reset_interval=interval))  # noqa: E731
    (line,) = choices.no_resets(made(6), 20.0)
    assert line.startswith("reset_interval=6: no reset is expected, for the run has about 10 updates")
    assert choices.no_resets(made(5), 20.0) == choices.no_resets(made(0), 20.0) == []
    assert choices.no_resets(agents.ppo.make(spec), 1.0) == []


def test_choices():
    arch = {"arch": "anakin"}
    assert said(agents.ppo.make, agents.PPOConfig(frame_stack=4, core="lstm", core_size=8), BYTES) == (
        arch | {"torso": "shallow", "memory": "lstm of 8 and 4 frames"},
        ["torso: shallow, memory: lstm of 8 and 4 frames"],
    )
    small = spaces.Box(0, 255, (20, 20), np.uint8)
    assert said(agents.muzero.make, agents.MuZeroConfig(), small)[0] == arch | {
        "torso": "convolutions",
        "memory": "none",
    }
    assert said(agents.r2d2.make, agents.R2D2Config(core="lstm", core_size=8), spaces.Box(0, 1, (15, 20)))[1] == [
        "torso: mlp, memory: lstm of 8"
    ]
    spec = EnvSpec("seen", BYTES, spaces.Discrete(3))
    own = choices.of(agents.ppo.make(spec), spec, "sebulba", True)
    assert choices.line(own) == "torso: your own network"
    assert not choices.flat_images(agents.ppo.make(spec), spec, own)
    assert own["arch"] == "sebulba"


def test_an_agent_of_ones_own_may_have_a_torso_and_no_core():
    spec = EnvSpec("seen", spaces.Box(-1, 1, (3,)), spaces.Discrete(3))
    agent = agents.ppo.make(spec)._replace(config=types.SimpleNamespace(torso="auto"))
    assert choices.line(choices.of(agent, spec, "anakin", False)) == "torso: mlp, memory: none"
