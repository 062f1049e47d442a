"""The plan of a sweep: ranges, grids, seeds and waves."""

import collections

import numpy as np
import pytest

import podracer
from podracer.sweeps import plan, ranges

RANGE = {"learning_rate": podracer.log_uniform(1e-4, 1e-1)}


def test_lists_make_a_grid_with_the_same_seeds_everywhere():
    made = plan.make({"learning_rate": [1e-3, 1e-2], "entropy_cost": [0.0, 0.1, 0.2], "discount": 0.9}, None, 3, 5)
    found = [tuple(one.values()) for one in made.configurations]
    assert sorted(found) == [(rate, cost, 0.9) for rate in (1e-3, 1e-2) for cost in (0.0, 0.1, 0.2)]
    seeds = collections.defaultdict(list)
    for member in made.members:
        seeds[member.configuration].append(member.seed)
    assert dict(seeds) == {i: [5, 6, 7] for i in range(6)}
    assert [(m.configuration, m.seed) for m in made.fresh(4)] == [(4, 8), (4, 9), (4, 10)]


def test_every_point_of_the_grid_has_as_many_draws():
    made = plan.make(RANGE | {"entropy_cost": [0.0, 0.1]}, 10, 1, 0)
    assert collections.Counter(one["entropy_cost"] for one in made.configurations) == {0.0: 5, 0.1: 5}
    assert len({one["learning_rate"] for one in made.configurations}) == 10


def test_draws_are_the_seeds_and_more_of_them_begin_with_the_same():
    rates = lambda members, seed, **more: [  # noqa: E731
        one["learning_rate"] for one in plan.make(RANGE | more, members, 1, seed).configurations
    ]
    assert rates(8, 0) == rates(16, 0)[:8] == rates(8, 0, discount=podracer.uniform(0.9, 0.99))
    assert not set(rates(8, 0)) & set(rates(8, 1))
    two = plan.make({"a": podracer.uniform(0, 1), "b": podracer.uniform(0, 1)}, 8, 1, 0)
    assert not {one["a"] for one in two.configurations} & {one["b"] for one in two.configurations}


@pytest.mark.parametrize(
    ("range_", "transform"), [(podracer.log_uniform(1e-4, 1e-1), np.log10), (podracer.uniform(2, 5), lambda x: x - 6)]
)
def test_a_range_is_uniform_and_keeps_its_limits(range_, transform):
    """Both are uniform in [-4, -1]: the mean is -2.5, and the variance 9/12."""
    drawn = np.asarray(range_.draw(20_000, np.random.default_rng(0)))
    assert drawn.min() >= range_.low
    assert drawn.max() <= range_.high
    points = transform(drawn)
    assert points.mean() == pytest.approx(-2.5, abs=3 * np.sqrt(0.75 / 20_000))
    assert points.var() == pytest.approx(0.75, rel=0.03)
    assert all(float(f"{x:.5g}") == x for x in drawn), "a command says the very number"


def test_drawn_numbers_are_not_rounded_over_a_limit():
    assert set(podracer.uniform(0.123451, 0.123452).draw(50, np.random.default_rng(0))) == {0.123451}


def test_waves_are_equally_large_and_hold_everybody_once():
    for total, at_once in ((48, 48), (48, 20), (7, 3), (5, 1), (1, 64), (10, 4)):
        members = [plan.Member(i, 0) for i in range(total)]
        waves = plan.waves(members, at_once)
        (size,) = {len(wave) for wave in waves}
        assert size <= at_once
        assert len(waves) == -(-total // at_once)
        flat = [member for wave in waves for member in wave]
        assert flat[:total] == members
        assert set(flat[total:]) <= {members[-1]}


@pytest.mark.parametrize(
    ("hyper", "members", "message"),
    [
        ({}, None, "hyper is empty"),
        (RANGE, None, "members is missing: say how many configurations to draw of learning_rate"),
        (RANGE, 0, "members=0: must be at least 1"),
        ({"a": [1, 2]}, 3, "members=3: the lists make a grid of 2, each with one configuration; use 2."),
        (RANGE | {"a": [1, 2, 3]}, 4, "members=4: the lists make a grid of 3, each with equally many draws; use 3."),
        ({"a": [1, 1]}, None, r"hyper\['a'\]=\[1, 1\]: give each value once"),
        ({"a": "adam"}, None, r"hyper\['a'\]='adam': give numbers"),
        ({"a": None}, None, r"hyper\['a'\]=None: give numbers"),
        ({"a": []}, None, r"hyper\['a'\]=\[\]: give numbers"),
    ],
)
def test_what_makes_no_plan(hyper, members, message):
    with pytest.raises(ValueError, match=message):
        plan.make(hyper, members, 2, 0)


def test_seeds_and_limits_that_there_are_not():
    with pytest.raises(ValueError, match="seeds=0: must be at least 1"):
        plan.make(RANGE, 2, 0, 0)
    with pytest.raises(ValueError, match="seed=2147483647: must be 0 to 2147483642"):
        plan.make(RANGE, 2, 3, 2**31 - 1)
    with pytest.raises(ValueError, match=r"log_uniform\(0, 1\): a logarithm needs numbers above 0"):
        podracer.log_uniform(0, 1)
    with pytest.raises(ValueError, match=r"uniform\(2, 1\): the first number must be below the second"):
        podracer.uniform(2, 1)


def test_values_as_they_are_typed():
    assert ranges.parse("a", "0.001,0.01") == (0.001, 0.01)
    assert ranges.parse("a", "0.5") == (0.5,)
    assert ranges.parse("a", "log:1e-4:1e-2") == podracer.log_uniform(1e-4, 1e-2)
    assert ranges.parse("a", "uniform:0:1") == podracer.uniform(0, 1)
    for text in ("log:1e-4", "lin:0:1", "1,x", "log:1:2:3", ""):
        with pytest.raises(ValueError, match="write values with commas between them"):
            ranges.parse("a", text)
