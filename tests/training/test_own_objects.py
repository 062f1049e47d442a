"""Environments, networks and agents of one's own instead of names."""

import shutil

import jax
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import nets
from podracer.agents import registry
from podracer.types import Caution
from tests.support.harness import assert_same
from tests.support.small_run import AGENT, RUN, Cliff, my_network, untrained


def test_objects_of_ones_own(tmp_path):
    """An environment and a network of one's own, which a file cannot hold and `load` must be given."""
    run_dir, env, network = tmp_path / "run", Cliff(), my_network()
    result = podracer.train(
        "vtrace", env, network=network, config={"rollout_length": 10, "learning_rate": 0.05}, run_dir=run_dir, **RUN
    )
    assert result.summary["env"] == "cliff"
    assert result.evaluate(16).mean == 2.0
    assert result.policy([0.5, 0.5]) == 1
    assert set(result.learner.params) == {"w"}
    with pytest.raises(ValueError, match="your own environment; in Python, give it as environment="):
        podracer.load(run_dir, network=network)
    with pytest.raises(ValueError, match="your own network; in Python, give it as network="):
        podracer.load(run_dir, environment=env)
    again = podracer.load(run_dir, environment=env, network=network)
    assert_same(again.learner, result.learner)
    with pytest.raises(
        podracer.CheckpointError, match=r"another layout: .* it needs the network, devices and actors that"
    ):
        podracer.load(run_dir, environment=env, network=nets.make(env.spec))
    shutil.rmtree(run_dir / "checkpoints" / str(result.summary["env_steps"]))
    with pytest.raises(ValueError, match="your own environment; in Python, give it as environment="):
        podracer.resume(run_dir, network=network)
    assert_same(podracer.resume(run_dir, environment=env, network=network, progress=False).learner, result.learner)


@pytest.mark.parametrize(
    "name",
    ["adam", "rmsprop", "sgd"],
)
def test_every_optimizer_makes_an_agent(name):
    agent = registry.make_agent("vtrace", Cliff(), {"optimizer": name})
    hyper = {name: jax.ShapeDtypeStruct((), np.float32) for name in agent.hyper}
    jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)), hyper)


@pytest.mark.slow
def test_an_agent_of_ones_own(tmp_path):
    env = envs_jax.make("catch")
    config = podracer.agents.VTraceConfig(**AGENT)
    made = podracer.agents.vtrace.make(env.spec, config)._replace(name="mine")
    made = made._replace(cautions=(Caution("loss/value", 0.0, "mind it"),))
    with pytest.warns(UserWarning, match=r"^loss/value is [0-9.]+: mind it$") as said:
        result = podracer.train(made, env, run_dir=tmp_path / "run", **RUN)
    assert len(said) == 1, "once"
    assert result.summary["agent"] == "mine"
    with pytest.raises(ValueError, match="your own agent"):
        podracer.load(tmp_path / "run")
    again = podracer.load(tmp_path / "run", agent=made, environment=env)
    assert_same(again.learner, result.learner)


def test_objects_and_names_give_the_same(finished):
    env = envs_jax.make("catch")
    agent = podracer.agents.vtrace.make(env.spec, podracer.agents.VTraceConfig(**AGENT))
    assert_same(podracer.train(agent, env, **RUN).learner, finished[0].learner)


def test_a_namesake_is_not_taken_for_the_original(tmp_path):
    """An environment of one's own that is called like one of the library's."""
    namesake = Cliff(name="catch")
    untrained("vtrace", namesake, tmp_path / "run")
    with pytest.raises(ValueError, match="your own environment"):
        podracer.load(tmp_path / "run")
    assert podracer.load(tmp_path / "run", environment=namesake).environment == namesake
