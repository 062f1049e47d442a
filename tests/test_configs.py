"""Configurations refuse what is wrong, say what and why, and survive JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

import numpy as np
import pytest

from podracer import RunConfig, configs
from podracer.agents import DQNConfig, PPOConfig, R2D2Config, SACConfig, VTraceConfig
from podracer.agents.registry import AGENTS


@dataclasses.dataclass(frozen=True)
class Example:
    number: float = configs.field(0.5, low=0.0, high=1.0, tunable=True)
    rate: float = configs.field(1.0, low=0.0, tunable=True)
    count: int = configs.field(3, low=1)
    flag: bool = False
    kind: Literal["red", "green"] = "red"
    sizes: tuple[int, ...] = configs.field((4, 2), low=1)
    maybe: float | None = configs.field(None, low=0.0)
    text: str = ""

    def __post_init__(self):
        configs.check(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": "a"}, r"Example\.number='a': expected a number"),
        ({"number": True}, r"number=True: expected a number"),
        ({"number": None}, r"number=None: expected a number"),
        ({"number": 1.5}, r"Example\.number=1.5: must be at most 1"),
        ({"number": -0.1}, r"number=-0.1: must be at least 0"),
        ({"number": math.nan}, r"number=nan: must be a number, not NaN"),
        ({"number": math.inf}, r"number=inf: must be at most 1"),
        ({"maybe": math.nan}, r"maybe=nan: must be a number, not NaN"),
        ({"maybe": -1.0}, r"maybe=-1.0: must be at least 0"),
        ({"maybe": "a"}, r"maybe='a': expected a number or None"),
        ({"count": 2.5}, r"count=2.5: expected an integer"),
        ({"count": 1e-3}, r"count=0.001: expected an integer"),
        ({"count": math.inf}, r"count=inf: expected an integer"),
        ({"count": "2"}, r"count='2': expected an integer"),
        ({"count": np.True_}, r"count=np.True_: expected an integer"),
        ({"count": True}, r"count=True: expected an integer"),
        ({"count": 0}, r"count=0: must be at least 1"),
        ({"flag": 1}, r"flag=1: expected True or False"),
        ({"kind": "blue"}, r"kind='blue': expected one of 'red', 'green'"),
        ({"sizes": [4, 2.5]}, r"sizes=\[4, 2.5\]: expected a tuple of an integer"),
        ({"sizes": 4}, r"sizes=4: expected a tuple of an integer"),
        ({"sizes": [4, 0]}, r"sizes=\[4, 0\]: must be at least 1"),
        ({"sizes": (4, 0)}, r"sizes=\(4, 0\): must be at least 1"),
        ({"text": 3}, r"text=3: expected a string"),
    ],
)
def test_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Example(**values)


def test_right_values() -> None:
    example = Example(number=1, rate=math.inf, maybe=0, sizes=(), kind="green")
    assert (example.number, example.rate, example.maybe) == (1.0, math.inf, 0)
    assert isinstance(example.number, float)  # so that equal configs compare and serialise alike
    assert configs.tunables(example) == {"number": 1.0, "rate": math.inf}


def test_what_is_exact_is_taken() -> None:
    found = Example(
        number=np.float32(0.25),  # type: ignore[arg-type]
        rate=np.int64(2),  # type: ignore[arg-type]
        count=1e5,  # type: ignore[arg-type]
        sizes=[4, np.int32(2), 3.0],  # type: ignore[arg-type]
        maybe=np.float64(1),
    )
    expected = Example(number=0.25, rate=2.0, count=100_000, sizes=(4, 2, 3), maybe=1.0)
    assert found == expected
    assert repr(found) == repr(expected), "Python's own types, which JSON has"
    assert hash(found) == hash(expected)
    assert RunConfig(total_steps=1e5).total_steps == 100_000  # type: ignore[arg-type]
    assert PPOConfig(hidden_sizes=[64, 64]) == PPOConfig(hidden_sizes=(64, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [VTraceConfig, PPOConfig])
def test_agents_check_their_configs(cls: type) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}.discount=1.1: must be at most 1"):
        cls(discount=1.1)
    with pytest.raises(ValueError, match=r"torso='cnn': expected one of 'auto'"):
        cls(torso="cnn")
    with pytest.raises(ValueError, match=r"hidden_sizes"):
        cls(hidden_sizes=(64, 0))
    assert {"learning_rate", "discount", "entropy_cost", "max_grad_norm"} <= set(configs.tunables(cls()))


def test_a_field_stays_below_another_one() -> None:
    """Every agent with a replay refuses one that never holds what learning begins with; exploration only falls."""
    orders = {}
    for name, (cls, _) in AGENTS.items():
        for item in dataclasses.fields(cls):
            if item.metadata.get("at_most"):
                other, why = item.metadata["at_most"]
                most = getattr(cls(), other)
                cls(**{item.name: most, other: most})
                smaller = int(most) - 1 if isinstance(most, int) else most / 2
                with pytest.raises(
                    ValueError, match=f"^{item.name}={most} must be at most {other}={smaller}{why}; use"
                ):
                    cls(**{item.name: most, other: smaller})
                orders.setdefault(item.name, set()).add(name)
    replays = {"alphazero", "dqn", "efficientzero", "muzero", "r2d2", "sac"}
    assert orders == {"replay_min_size": replays, "epsilon_final": {"dqn", "pqn"}, "min_std": {"sac"}}


def test_an_epsilon_of_zero_is_refused() -> None:
    """A step is 0 / 0, NaN, where a gradient is 0."""
    for cls, _ in AGENTS.values():
        with pytest.raises(ValueError, match=r"optimizer_eps=0: must be at least 1e-30"):
            cls(optimizer_eps=0)


# Populations.


def test_population_hyper() -> None:
    hyper = configs.population_hyper(Example(), 3, {"number": [0.0, 0.5, 1], "rate": 7})
    assert set(hyper) == {"number", "rate"}
    np.testing.assert_array_equal(hyper["number"], np.array([0.0, 0.5, 1.0]))
    np.testing.assert_array_equal(hyper["rate"], np.full(3, 7.0))
    assert all(value.dtype == np.float32 for value in hyper.values())
    np.testing.assert_array_equal(configs.population_hyper(Example(rate=2.0), 2, None)["rate"], [2.0, 2.0])
    used = configs.population_hyper(Example(), 2, {"rate": 7}, {"rate": 3.0, "mine": 0.25})
    assert {name: values.tolist() for name, values in used.items()} == {"rate": [7.0, 7.0], "mine": [0.25, 0.25]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"count": 3}, r"hyper\['count'\]: not a tunable number of Example; .*known: number, rate"),
        ({"nmber": 0.1}, r"did you mean 'number'\?"),
        ({"number": [0.1, 0.2]}, r"give one number, or 3 numbers \(one a member\); got \[0.1, 0.2\]"),
        ({"number": [[0.1, 0.2, 0.3]]}, r"give one number, or 3 numbers"),
        ({"number": "a"}, r"give one number, or 3 numbers"),
        ({"number": [True, False, True]}, r"give one number, or 3 numbers"),
        ({"number": [0.1, 0.2, 1.5]}, r"hyper\['number'\]=.*must be at most 1"),
        ({"rate": -1}, r"hyper\['rate'\]=-1: must be at least 0"),
        ({"rate": [1.0, math.nan, 1.0]}, r"must be a number, not NaN"),
        ({"rate": math.nan}, r"must be a number, not NaN"),
    ],
)
def test_population_hyper_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.population_hyper(Example(), 3, overrides)


def test_every_member_is_checked_like_a_config() -> None:
    config = PPOConfig(target_kl=0.01, learning_rate_schedule="constant")
    with pytest.raises(ValueError, match=r"^hyper, member 1: learning_rate=0.1 must be between 1e-05 and 0.01, where"):
        configs.population_hyper(config, 2, {"learning_rate": [1e-3, 0.1]})


def test_other_libraries_names_are_of_settings_there_are() -> None:
    there = {
        f.name
        for cls in (DQNConfig, PPOConfig, R2D2Config, SACConfig, VTraceConfig, RunConfig)
        for f in dataclasses.fields(cls)
    }
    for name, ours in configs.OTHER_NAMES.items():
        assert set(ours) <= there, name


def test_the_unit_of_an_old_name_goes_with_its_new_name_alone() -> None:
    assert "'learning_rate_schedule', 'linear' for True" in configs.suggest("anneal_lr", ["learning_rate_schedule"])
    assert "linear" not in configs.suggest("anneal_lr", ["channels", "annealing"])


# JSON.


@pytest.mark.parametrize(
    "example",
    [
        Example(),
        Example(number=0.25, rate=math.inf, count=9, flag=True, kind="green", sizes=(1,), maybe=2.5, text="a"),
        Example(sizes=()),
        Example(maybe=math.inf),
        VTraceConfig.atari(rho_bar=math.inf),
        PPOConfig(value_clip_epsilon=0.2, hidden_sizes=(8, 8)),
        PPOConfig(value_clip_epsilon=math.inf),
    ],
    ids=lambda example: type(example).__name__,
)
def test_json_round_trip(example: Any) -> None:
    text = json.dumps(configs.to_json(example), allow_nan=False)
    again = configs.from_json(type(example), json.loads(text))
    assert again == example
    assert hash(again) == hash(example)


def test_json_of_trees() -> None:
    values = {"a": np.array([1.0, np.inf], np.float32), "b": (1, [2.5, -math.inf]), "c": Example(), "d": {"e": None}}
    plain = configs.to_json(values)
    assert plain["a"] == [1.0, "inf"]
    assert plain["b"] == [1, [2.5, "-inf"]]
    assert plain["c"]["sizes"] == [4, 2]
    assert plain["d"] == {"e": None}
    json.dumps(plain, allow_nan=False)


def test_unknown_and_wrong_fields_in_json() -> None:
    with pytest.raises(ValueError, match=r"Example has no field 'numbr'; did you mean 'number'\? known: count, flag"):
        configs.from_json(Example, {"numbr": 0.1})
    for name, meant in (
        ("Count", "count"),
        ("gamma", "discount"),
        ("ent_coef", "entropy_cost"),
        ("vf_coef", "value_cost"),
    ):
        with pytest.raises(ValueError, match=f"no field '{name}'; did you mean '{meant}'"):
            configs.from_json(Example if name == "Count" else PPOConfig, {name: 1})
    with pytest.raises(ValueError, match="number='0.1': expected a number"):
        configs.from_json(Example, {"number": "0.1"})
    assert configs.from_json(Example, {}) == Example()


def test_differences() -> None:
    old = {"agent": {"rate": 0.1, "same": 1, "gone": 2}, "env": "a", "seed": 0}
    new = {"agent": {"rate": 0.2, "same": 1}, "env": "a", "seed": 1, "sizes": [1, 2]}
    assert configs.differences(old, new) == [
        "agent.gone: 2 -> absent",
        "agent.rate: 0.1 -> 0.2",
        "seed: 0 -> 1",
        "sizes: absent -> [1, 2]",
    ]
    assert configs.differences(old, old) == []
