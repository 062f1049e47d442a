"""Notes before a run: of masks that an agent does not follow, and of rows that it does not learn from."""

import types
from typing import Any

import jax.numpy as jnp
import pytest

import podracer
from podracer import agents, spaces
from podracer.training import notes
from podracer.types import EnvSpec, Transition

SEEN, FIVE, MASK = spaces.Box(-1, 1, (3,)), spaces.Discrete(5), spaces.Box(0, 1, (5,))


def said(agent, observations, actions=FIVE):
    named: Any = types.SimpleNamespace(name=agent)
    return " ".join(notes.ignored_masks(named, EnvSpec("shop", spaces.Dict({"seen": SEEN, **observations}), actions)))


@pytest.mark.parametrize("agent", ["ppo", "dqn", "muzero"])
def test_a_mask_of_another_name_or_place_is_named(agent):
    assert said(agent, {"legal": MASK}) == (
        f"{agent} takes legal in the observations of shop for numbers to see and plays illegal actions: a mask that "
        "agents follow is called action_mask and stands at the top of a Dict."
    )
    assert "takes action_mask in" in said(agent, {"inner": spaces.Dict({"action_mask": MASK})})
    assert "takes avail_actions in" in said(agent, {"avail_actions": MASK}, spaces.MultiDiscrete((2, 3)))


def test_rows_that_r2d2_never_learns_from_are_counted():
    spec = EnvSpec("shop", SEEN, FIVE)
    made = lambda trace: agents.r2d2.make(spec, agents.R2D2Config(rollout_length=80, trace_length=trace))  # noqa: E731
    assert notes.rows_between_traces(made(40)) == [
        "40 of every 80 rows are never learnt from: a sequence begins every rollout_length=80 rows and learns from "
        "trace_length=40; rollout_length=40 leaves none out."
    ]
    assert notes.rows_between_traces(made(80)) == notes.rows_between_traces(agents.ppo.make(spec)) == []


def test_others_say_nothing():
    assert said("ppo", {"action_mask": MASK}) == ""
    assert said("one's own", {"legal": MASK}) == ""
    assert said("ppo", {"validity": SEEN, "health": MASK}) == ""
    assert said("ppo", {"legal": MASK}, spaces.Box(-1, 1, (5,))) == ""
    named: Any = types.SimpleNamespace(name="ppo")
    assert notes.ignored_masks(named, EnvSpec("shop", SEEN, spaces.Discrete(3))) == []


def test_train_says_so_at_the_start(capsys):
    class Shop:
        spec = EnvSpec("shop", spaces.Dict({"legal": MASK}), FIVE)

        def reset(self, key):
            return jnp.int32(0)

        def step(self, state, action, key):
            return state, Transition(jnp.float32(0), jnp.float32(1), jnp.bool_(False))

        def observe(self, state):
            return {"legal": jnp.ones(5)}

    with pytest.raises(ValueError, match="num_minibatches=4 does not divide"):  # what only tracing finds
        podracer.train("ppo", Shop(), config={"rollout_length": 5}, num_envs=3, check=False, progress=False)
    assert capsys.readouterr().err.startswith("podracer: note: ppo takes legal in the observations of shop for ")
