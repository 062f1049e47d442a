"""Controls without which EfficientZero must not learn: dynamics that see actions, and a search that finds something.

Dynamics that get no gradient are no such control on catch (docs/adr/0026).
"""

import importlib

import pytest

import envs_jax
from podracer.agents import EfficientZeroConfig
from podracer.bench import measure
from podracer.search import prefix_models, search
from tests.support import harness

pytestmark = pytest.mark.learns


def trained(change=lambda model: model):
    """The return on catch after 10,000 of 20,000 steps, with the model changed."""
    network = change(prefix_models.make(envs_jax.make("catch").spec, EfficientZeroConfig()))
    return harness.return_on_catch("efficientzero", network, 20_000, after=10_000)


def test_it_learns():
    """Without which the controls below would say nothing."""
    assert trained() > 0.9


def test_dynamics_that_see_no_action_teach_nothing(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    assert trained(importlib.import_module("efficientzero_controls").blind) < 0.0


def test_a_search_that_guesses_teaches_nothing(monkeypatch):
    monkeypatch.setattr(search, "search", harness.guessing(search.search))
    assert trained() < 0.0
