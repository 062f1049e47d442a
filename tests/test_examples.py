"""The examples do what they say, made small."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import nets
from podracer.learning import optimizer
from tests.support import harness

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SMALL = {"num_envs": 8, "eval_episodes": 4, "progress": False}


def example(name):
    """An example as a module; what it does as a script is not done."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # others are quick: tests/agents/test_own_losses.py
def test_a_loss_of_ones_own():
    result = example("own_loss").main(total_steps=8 * 64 * 2, **SMALL)
    rows = [row for row in result.history if "loss/total" in row]
    assert len(rows) >= 2
    for row in rows:  # every name has its own number
        terms = row["loss/policy"] + row["loss/kl_penalty"] + 0.5 * row["loss/value"] - 0.01 * row["policy/entropy"]
        assert row["loss/total"] == pytest.approx(terms, rel=1e-4)
        assert row["loss/kl_penalty"] == pytest.approx(row["policy/kl"])
        assert row["policy/kl"] > 0


@pytest.mark.nightly
@pytest.mark.slow  # the notebook 6_meta_gradients has the same code
def test_a_discount_that_is_learnt(capsys):
    module = example("meta_gradient")
    with optimizer.lenient():  # as a user has it
        module.main(total_steps=2 * module.make()[-1])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "gamma 0.500" not in lines[-1]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rule_for_a_population(capsys):
    with optimizer.lenient():
        numbers = example("meta_gradient_population").main(members=2, outer_steps=2, inner_updates=2, num_envs=4)
    assert capsys.readouterr().out.startswith("   2   discount")
    assert all(np.isfinite(x) for x in numbers.values())
    assert numbers["learning_rate"] != pytest.approx(1e-3)


NETWORKS = ["linen_mlp", "nnx_mlp", "equinox_mlp", "haiku_mlp", "linen_gru"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_libraries_are_trained_saved_and_loaded(name, tmp_path):
    network = example(f"networks/{name}").network(envs_jax.make("catch").spec)
    settings = {"config": {"rollout_length": 5}, "total_steps": 80, "run_dir": tmp_path / "run", **SMALL}
    result = podracer.train("vtrace", "catch", network=network, **settings)
    before = jax.jit(network.init)(jax.random.key(0))
    after = jax.tree.map(lambda x: x[0], result.learner.params)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert result.summary["updates"] >= 2
    again = podracer.load(tmp_path / "run", network=network)
    jax.tree.map(np.testing.assert_array_equal, again.learner.params, result.learner.params)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_libraries_are_networks(name):
    """Agents check this when they are made."""
    spec = envs_jax.make("catch").spec
    podracer.agents.vtrace.make(spec, network=example(f"networks/{name}").network(spec))


@pytest.mark.parametrize("name", ["linen_gru", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS[1:4])])
def test_networks_of_other_libraries_learn(name):
    """A gradient step moves every parameter."""
    spec = envs_jax.make("catch").spec
    agent = podracer.agents.vtrace.make(spec, network=example(f"networks/{name}").network(spec))

    def updated(learner):
        rows = harness.timesteps(0, 3, 2, (10, 5))
        start = agent.start(jnp.arange(2, dtype=jnp.int32), 2)
        params = agent.actor_params(learner, jnp.float32(0))
        trajectory, _ = harness.record(agent, params, start, rows, jax.random.key(1))
        return agent.learn(learner, trajectory, jnp.float32(0), jax.random.key(2))[0]

    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    after = harness.alone(updated)(learner)
    for leaf, before in zip(jax.tree.leaves(after.params), jax.tree.leaves(learner.params)):
        assert np.all(np.isfinite(leaf))
        assert np.any(np.asarray(leaf) != np.asarray(before))


def test_a_recurrence_of_ones_own_forgets_on_first_rows():
    network = example("networks/linen_gru").network(envs_jax.make("catch").spec)
    params = jax.jit(network.init)(jax.random.key(0))
    T, B = 4, 2
    first = jnp.zeros((T, B), bool).at[2, 0].set(True)
    observation = jax.random.uniform(jax.random.key(1), (T, B, 10, 5))
    inputs = nets.Inputs(observation, jnp.zeros((T, B)), first, jnp.zeros((T, B), jnp.int32))
    apply = jax.jit(network.apply)
    fresh, other = (apply(params, inputs, state)[0] for state in (network.start(B), jnp.ones((B, 64))))
    differ = np.any(np.abs(np.asarray(fresh - other)) > 1e-5, axis=-1)
    np.testing.assert_array_equal(differ, [[True, True], [True, True], [False, True], [False, True]])
