"""Runs with an optimiser of the user's: schedules, populations, and what a resumed run is told."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import optax
import pytest

import podracer
from podracer import environments
from podracer.agents import registry
from podracer.learning.optimizer import OptimizerError
from tests.support import harness

pytestmark = pytest.mark.slow

STEPS = 4_000
CONFIG = {
    "hidden_sizes": (8,),
    "rollout_length": 10,
    "num_epochs": 1,
    "learning_rate_schedule": "cosine",
    "learning_rate_warmup": 0.75,  # a run that was stopped at its half goes on within the warm-up
}


def factory(rate: jax.Array) -> optax.GradientTransformation:
    """Adam with a schedule of its own, whose count is part of the state."""
    own = optax.scale_by_schedule(optax.linear_schedule(1.0, 0.5, 20))
    return optax.chain(optax.scale_by_adam(), own, optax.scale_by_learning_rate(rate))


def train(steps: int = STEPS, **settings: Any) -> podracer.Result:
    defaults = {"config": CONFIG, "optimizer": factory, "num_envs": 8, "eval_every": 10**6, "eval_episodes": 8}
    with harness.shared_programs():
        return podracer.train("ppo", "catch", total_steps=steps, progress=False, **(defaults | settings))


def params(result: podracer.Result, member: int = 0) -> Any:
    return jax.tree.map(lambda x: np.asarray(x[member]), (result.learner.params, result.learner.opt_state))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> podracer.Result:
    return train(checkpoint_every=STEPS // 2, run_dir=tmp_path_factory.mktemp("whole") / "run")


def test_the_rate_is_the_schedules(whole: podracer.Result) -> None:
    """Over the warm-up it rises, and then falls by half a cosine."""
    rows = [row for row in whole.history if "grad/learning_rate" in row]
    progress = np.array([row["env_steps"] for row in rows]) / STEPS
    rates = np.array([row["grad/learning_rate"] for row in rows]) / 1e-3
    rising = progress <= 0.75
    expected = np.where(rising, progress / 0.75, 0.5 + 0.5 * np.cos(np.pi * np.clip((progress - 0.75) / 0.25, 0, 1)))
    assert rising.sum() > 3
    assert (~rising).sum() > 1
    np.testing.assert_allclose(rates, expected, atol=0.15)  # a row is a mean over updates
    assert abs(rates[-1]) < 0.3 < rates.max()


def test_a_run_that_was_stopped_goes_on_bit_for_bit(whole: podracer.Result, tmp_path: pathlib.Path) -> None:
    """By its name in `resume`, and refused without one or with another."""
    assert whole.run_dir
    directory = shutil.copytree(whole.run_dir, tmp_path / "run")
    *_, last = sorted((directory / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(last)
    with pytest.raises(ValueError, match="your own optimizer; in Python, give it as optimizer="):
        podracer.resume(directory, progress=False)
    with pytest.raises(
        ValueError, match=r"the state of optimizer=: 0.count was int32 \[\] and is absent.*optimizer=\.\.\."
    ):
        podracer.resume(directory, optimizer=optax.sgd, progress=False)
    resumed = podracer.resume(directory, optimizer=factory, progress=False)
    assert resumed.summary["env_steps"] == whole.summary["env_steps"]
    jax.tree.map(np.testing.assert_array_equal, params(resumed), params(whole))
    loaded = podracer.load(directory, optimizer=factory)
    jax.tree.map(np.testing.assert_array_equal, params(loaded), params(whole))
    stored = json.loads((directory / "config.json").read_text())
    assert stored["own"] == ["optimizer"]
    assert any(leaf.endswith("mu.params.policy.kernel") for leaf in stored["optimizer_state"])


def test_members_are_the_single_runs() -> None:
    rates = [1e-3, 1e-2]
    both = train(STEPS // 4, hyper={"learning_rate": rates})
    for member, rate in enumerate(rates):
        single = train(STEPS // 4, hyper={"learning_rate": rate}, seed=member)
        close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)  # noqa: E731
        jax.tree.map(close, params(both, member), params(single))


@pytest.mark.parametrize("agent", registry.AGENTS)
def test_every_agent_takes_one(agent: str) -> None:
    """A plain transformation too, where the agent's rate does not change."""
    environment = environments.make({"alphazero": "tic_tac_toe", "sac": "pendulum"}.get(agent, "catch"))
    own = registry.make_agent(agent, environment, optimizer=optax.adamw)
    assert {"learning_rate"} == set(own.hyper) & {"learning_rate", "optimizer_eps", "weight_decay"}
    constant = {} if agent == "efficientzero" else {"learning_rate_schedule": "constant"}
    plain = registry.make_agent(agent, environment, constant, optimizer=optax.adamw(1e-3))
    assert "learning_rate" not in plain.hyper
    scheduled = {"warmup_updates": 3} if agent == "efficientzero" else {"learning_rate_warmup": 0.1}
    with pytest.raises(OptimizerError, match="no schedule of the agent's reaches"):
        registry.make_agent(agent, environment, constant | scheduled, optimizer=optax.adamw(1e-3))


@pytest.mark.parametrize("agent", ["ppo", "vtrace"])
def test_a_plain_transformation_has_no_rate_to_report(agent: str) -> None:
    config = {"hidden_sizes": (8,), "rollout_length": 10, "learning_rate_schedule": "constant"}
    settings = {"total_steps": 1_000, "num_envs": 8, "eval_every": 10**6, "eval_episodes": 8, "progress": False}
    result = podracer.train(agent, "catch", config=config, optimizer=optax.adam(1e-3), **settings)
    rows = [row for row in result.history if "grad/norm" in row]
    assert rows
    assert not any("grad/learning_rate" in row for row in rows)
