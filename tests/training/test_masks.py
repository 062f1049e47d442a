"""Agents that do not look at masks say so, and others do not."""

import types
from typing import Any

import jax.numpy as jnp
import pytest

import podracer
from podracer import spaces
from podracer.training import masks
from podracer.types import EnvSpec, Transition

SEEN, FIVE = spaces.Box(-1, 1, (3,)), spaces.Discrete(5)


def said(agent, observations, actions=FIVE):
    named: Any = types.SimpleNamespace(name=agent)
    return " ".join(masks.ignored(named, EnvSpec("shop", spaces.Dict({"seen": SEEN, **observations}), actions)))


@pytest.mark.parametrize("agent", ["ppo", "vtrace", "dqn", "pqn", "r2d2"])
def test_an_agent_that_ignores_a_mask_says_so(agent):
    mask = spaces.Box(0, 1, (5,))
    words = f"{agent} takes action_mask in the observations of shop for numbers to see and plays illegal actions too; "
    assert said(agent, {"action_mask": mask}) == (
        words + "alphazero, efficientzero, muzero honour a mask that is called action_mask."
    )
    assert "takes legal in" in said(agent, {"inner": spaces.Dict({"legal": mask})})
    assert "takes avail_actions in" in said(agent, {"avail_actions": mask}, spaces.MultiDiscrete((2, 3)))


def test_others_say_nothing():
    mask = spaces.Box(0, 1, (5,))
    assert said("muzero", {"action_mask": mask}) == ""
    assert "efficientzero takes legal in the observations of shop for numbers to see: a mask of legal actions" in (
        said("efficientzero", {"legal": mask})
    )
    assert said("one's own", {"action_mask": mask}) == ""
    assert said("ppo", {"validity": SEEN, "health": mask}) == ""
    assert said("ppo", {"action_mask": mask}, spaces.Box(-1, 1, (5,))) == ""
    named: Any = types.SimpleNamespace(name="ppo")
    assert masks.ignored(named, EnvSpec("shop", SEEN, spaces.Discrete(3))) == []


def test_train_says_so_at_the_start(capsys):
    class Shop:
        spec = EnvSpec("shop", spaces.Dict({"action_mask": spaces.Box(0, 1, (5,))}), FIVE)

        def reset(self, key):
            return jnp.int32(0)

        def step(self, state, action, key):
            return state, Transition(jnp.float32(0), jnp.float32(1), jnp.bool_(False))

        def observe(self, state):
            return {"action_mask": jnp.ones(5)}

    with pytest.raises(ValueError, match="num_minibatches=4 does not divide"):  # what only tracing finds
        podracer.train("ppo", Shop(), config={"rollout_length": 5}, num_envs=3, check=False, progress=False)
    assert capsys.readouterr().err.startswith("podracer: note: ppo takes action_mask in the observations of shop for ")
