"""Spaces of other libraries' environments, from what they declare and from what they show."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from envs_jax.adapters import convert
from podracer import spaces
from tests.support.foreign import NAME


class Fitted(NamedTuple):
    where: Any
    declared: Any
    space: Any


INT, FLOAT = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((2,), np.float32)
SPACES = {
    "unknown": Fitted(FLOAT, None, spaces.Box(-np.inf, np.inf, (2,))),
    "shared": Fitted(FLOAT, NAME(minimum=-1.0, maximum=1.0), spaces.Box(-1.0, 1.0, (2,))),
    "not shared": Fitted(FLOAT, NAME(low=np.array([-1.0, -2.0]), high=2.0), spaces.Box(-np.inf, np.inf, (2,))),
    "half": Fitted(jax.ShapeDtypeStruct((), np.float16), NAME(low=0.0, high=np.inf), spaces.Box(-np.inf, np.inf, ())),
    "integers": Fitted(INT, NAME(minimum=np.array([1, -2]), maximum=7), spaces.Box(-2, 7, (2,), np.int32)),
    "no bounds": Fitted(jax.ShapeDtypeStruct((3, 3), np.uint8), None, spaces.Box(0, 255, (3, 3), np.uint8)),
    "choice": Fitted(jax.ShapeDtypeStruct((), np.int32), NAME(n=5), spaces.Discrete(5)),
    "count": Fitted(
        jax.ShapeDtypeStruct((), np.int32),
        NAME(num_values=4000, minimum=0, maximum=3999),
        spaces.Box(0, 3999, (), np.int32),
    ),
    "nested": Fitted(
        {"a": {"b": jax.ShapeDtypeStruct((), np.bool_)}},
        NAME(a=None),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Box(0, 1, (), np.uint8)})}),
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_of_observations(name):
    where, declared, space = SPACES[name]
    assert convert.observation_space(where, declared) == space


def test_spaces_of_actions():
    assert convert.action_space(NAME(n=3), "it") == spaces.Discrete(3)
    assert convert.action_space(NAME(num_values=np.array([2, 3])), "it") == spaces.MultiDiscrete((2, 3))
    box = NAME(low=-1.0, high=np.array([1.0, 2.0]), shape=(2,), dtype=np.float32)
    assert convert.action_space(box, "it") == spaces.Box([-1.0, -1.0], [1.0, 2.0])
    for unsupported in (
        NAME(spaces=()),
        NAME(low=-np.inf, high=1.0, shape=(), dtype=np.float32),
        NAME(n=np.ones((2, 2), int)),
        NAME(n=3, start=1),
    ):
        with pytest.raises(ValueError, match=r"^it takes actions in .*not supported; discrete ones from 0, .* are\.$"):
            convert.action_space(unsupported, "it")
