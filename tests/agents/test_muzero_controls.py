"""Controls without which MuZero must not learn: dynamics that are learnt, and a search that finds something."""

import jax
import pytest

import envs_jax
from podracer.agents import MuZeroConfig
from podracer.search import search, world_models
from tests.support import harness

pytestmark = pytest.mark.learns


def trained(change=lambda dynamics: dynamics):
    """The return on catch after 12,000 of 30,000 steps, with dynamics changed."""
    config, spec = MuZeroConfig(), envs_jax.make("catch").spec
    model = world_models.make(spec, config)
    network = model._replace(dynamics=change(model.dynamics))
    return harness.return_on_catch("muzero", network, 30_000, after=12_000)


def test_dynamics_as_they_are_teach():
    """Without which the control below would say nothing."""
    assert trained() > 0.9


def test_dynamics_that_stay_as_they_began_teach_nothing():
    frozen = lambda dynamics: lambda params, *rest: dynamics(jax.lax.stop_gradient(params), *rest)  # noqa: E731
    assert trained(frozen) < 0.0


def test_a_search_that_guesses_teaches_nothing(monkeypatch):
    monkeypatch.setattr(search, "search", harness.guessing(search.search))
    assert trained() < 0.0
