"""Evaluations of policies: the most likely actions, or samples."""

import jax
import numpy as np
import pytest

import envs_jax
from podracer.agents import PPOConfig, VTraceConfig, ppo, vtrace
from podracer.atari import PROTOCOLS
from podracer.training import presets
from podracer.types import TimeStep


@pytest.mark.parametrize("module", [ppo, vtrace])
def test_an_evaluation_may_sample(module):
    """Samples differ from lane to lane; the most likely action, and `best`, do not."""
    environment = envs_jax.make("catch")
    config = {ppo: PPOConfig, vtrace: VTraceConfig}[module]
    found = {}
    for policy in ("mode", "sample"):
        agent = module.make(environment.spec, config(evaluation_policy=policy, hidden_sizes=(4,)))
        learner = agent.init(jax.random.key(0), agent.hyper)
        params = agent.actor_params(learner, 0.5)
        rows = np.zeros(64, np.float32)
        observation = np.zeros((64, *environment.spec.observation_space.shape), np.float32)
        timestep = TimeStep(observation, rows, rows + 1.0, rows > 0, rows > 0)
        start = agent.start(np.arange(64, dtype=np.int32), 64)
        found[policy] = agent.act(params, start, timestep, jax.random.key(2), True)[0]
        sampled = agent.act(params, start, timestep, jax.random.key(2), False)[0]
        assert len(np.unique(sampled)) == 3
        if policy == "sample":
            np.testing.assert_array_equal(found["sample"], sampled)
            np.testing.assert_array_equal(agent.best(params, start, timestep)[0], found["mode"])
        else:
            assert agent.best is None
    assert len(np.unique(found["mode"])) == 1


def test_protocols_of_papers_whose_policies_sample():
    assert PROTOCOLS["impala"].agent({"evaluation_policy": "mode"}) == {"evaluation_policy": "sample"}
    assert PROTOCOLS["impala"].agent({"evaluation_epsilon": 0.1}) == {}, "an agent without such a setting"
    assert PROTOCOLS["ppo"].agent({"evaluation_policy": "mode"}) == {"evaluation_policy": "sample"}
    assert PROTOCOLS["nature"].agent({"evaluation_policy": "mode"}) == {}
    merged = presets.merge("ppo", "envpool:Pong-v5", "atari", "atari100k", presets.Settings())
    assert merged.agent["evaluation_policy"] == "mode", "a protocol goes before the preset"
