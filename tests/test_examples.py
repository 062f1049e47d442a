"""The examples do what they say, made small."""

import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import nets
from podracer.learning import optimizer
from tests.support import harness, tiers

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
@pytest.mark.parametrize("name", tiers.all_but(("nnx_mlp", "linen_gru"), NETWORKS))
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


class Trial:
    """A trial of Optuna as far as an example uses it: its numbers are low, high, and halfway between."""

    def __init__(self, number):
        self.number, self.params = number, {}

    def suggest_float(self, name, low, high, *, log=False):
        assert log
        self.params[name] = float(np.geomspace(low, high, 3)[self.number % 3])
        return self.params[name]


class Study:
    """A study of Optuna, likewise."""

    def __init__(self):
        self.trials, self.told = [], {}

    def ask(self):
        self.trials.append(Trial(len(self.trials)))
        return self.trials[-1]

    def tell(self, trial, value, state=None):
        assert trial.number not in self.told
        assert (value is None) == (state == "FAIL")
        self.told[trial.number] = value

    @property
    def best_value(self):
        return max(value for value in self.told.values() if value is not None)

    best_params = None


@pytest.mark.slow
def test_optuna_is_told_of_every_trial_what_became_of_it(monkeypatch):
    """Each is told its own member's return, and the members of a round are those that were asked for."""
    optuna = types.SimpleNamespace(
        create_study=lambda direction, sampler: Study(),
        samplers=types.SimpleNamespace(TPESampler=lambda constant_liar: None),
        trial=types.SimpleNamespace(TrialState=types.SimpleNamespace(FAIL="FAIL")),
    )
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    runs, train = [], podracer.train

    def recorded(*arguments, **settings):
        runs.append((settings, train(*arguments, **settings)))
        runs[-1][1].summary["members"][1]["diverged"] = True
        return runs[-1][1]

    monkeypatch.setattr(podracer, "train", recorded)
    settings = {"num_envs": 8, "eval_episodes": 4, "total_steps": 80, "config": {"rollout_length": 5}}
    study = example("optuna_sweep").main(rounds=2, trials=3, **settings)
    assert len({run["seed"] for run, _ in runs}) == 2
    asked = [trial.params for trial in study.trials]
    members = [member for _, result in runs for member in result.summary["members"]]
    told = [None if member["diverged"] else member["eval_return_mean"] for member in members]
    assert [study.told[i] for i in range(6)] == told
    for params, member in zip(asked, members):
        assert params == pytest.approx({name: member[name] for name in params})


def test_without_optuna_its_example_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit, match="needs Optuna: pip install optuna"):
        example("optuna_sweep").main()
