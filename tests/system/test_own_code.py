"""Errors of the user's own code say where they were raised, whoever called it."""

import types
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import environments, spaces
from podracer.evaluation import evaluation
from podracer.system import own_code

PLACE = r", in price, .*test_own_code\.py, line \d+, `raise ValueError\(\"the price is wrong\"\)`"


def price():
    raise ValueError("the price is wrong")


class Shop(gymnasium.Env):
    """Its third step fails, once it was checked."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    checked = False

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if Shop.checked and self.t == 3:
            price()
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.fixture
def shop(monkeypatch):
    source = environments.adopt(Shop)
    monkeypatch.setattr(Shop, "checked", True)
    return source


def raised(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def test_the_line_is_the_innermost_of_ones_own():
    error = raised(price)
    assert own_code.line(error).startswith(", in price, ")
    assert own_code.is_fault(error)
    error = raised(gymnasium.spaces.Discrete, 0)
    assert own_code.line(error).startswith(", in raised, "), "not the library's, which it called"
    error = raised(spaces.Discrete, 0)
    assert not own_code.is_fault(error), "this library says what is wrong with what it was given"
    error.__traceback__ = error.__traceback__.tb_next
    assert own_code.line(error) == ""


def test_a_callback_of_jax_is_told_by_its_own_error():
    error = RuntimeError(
        "INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):\n"
        f'  File "{own_code.__file__}", line 1, in call\n  File "{__file__}", line 1, in reward\nKeyError: \'b\''
    )
    assert own_code.describe(error).startswith(f"KeyError: 'b', in reward, {__file__}, line 1, `")


def test_an_evaluation_that_fails_says_where(shop):
    """As in training it is an `ActorError`, of whatever kind the environment's own is."""
    agent: Any = types.SimpleNamespace(
        start=lambda lanes, count: (),
        act=lambda params, memory, row, key, greedy: (jnp.zeros(2, jnp.int32), {}, memory),
    )
    with pytest.raises(podracer.ActorError, match="^evaluation failed in Shop: ValueError: the price is wrong" + PLACE):
        evaluation.on_host(agent, shop, 2)(None, 0)
