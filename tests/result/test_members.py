"""The lines of a learning curve: the rows that share one, its label, and its drawing."""

import copy

import numpy as np
import pytest

from podracer.result import members, plots

CONFIG = {"learning_rate": 1e-3, "discount": 0.99, "hidden_sizes": [8]}
RUN = {"total_steps": 100, "seed": 0, "num_envs": 8, "num_shards": 1, "population": 1, "eval_every": 10}


def description(agent="vtrace", env="catch", hyper=None, config=None, options=None, own=(), init_from=None, **run):
    parts = {
        "agent": agent,
        "env": env,
        "agent_config": CONFIG | (config or {}),
        "env_options": options or {"rows": 10},
    }
    parts |= {"init_from": init_from} if init_from else {}
    return copy.deepcopy(parts | {"own": list(own), "hyper": hyper or {}, "run": RUN | run})


def rows(count=1, offset=0.0):
    """Three training rows and one of evaluation of each member; member i's return is step + i."""
    named = lambda i: {"member": i} if count > 1 else {}  # noqa: E731
    for step in (10, 20, 30):
        for i in range(count):
            yield {"env_steps": step, "updates": step} | named(i) | {"episode/return": step + i + offset}
    for i in range(count):
        yield {"env_steps": 30, "updates": 30} | named(i) | {"eval/return_mean": 30 + i + offset}


def curves(*runs, **options):
    """Labels, and how many members share each line."""
    everyone = [
        m for i, (d, count) in enumerate(runs) for m in members.from_run(d, list(rows(count, 100 * i)), f"run-{i}")
    ]
    lines = members.curves(everyone, **options)
    return {label: len({row["member"] for row in history}) for label, history in lines.items()}


def test_a_sweep_has_a_line_for_each_setting():
    rates = [1e-3, 1e-4, 1e-3, 1e-4, 1e-3]
    swept = description(population=5, hyper={"learning_rate": rates, "discount": 0.5})
    assert curves((swept, 5)) == {"learning_rate=0.001": 3, "learning_rate=0.0001": 2}
    lines = members.curves(members.from_run(swept, list(rows(5))))
    returns = {
        r["episode/return"] for r in lines["learning_rate=0.0001"] if r["env_steps"] == 10 and "episode/return" in r
    }
    assert returns == {11.0, 13.0}, "members 1 and 3"
    two = description(population=2, hyper={"learning_rate": [1e-3, 1e-4], "discount": [0.5, 0.9]})
    assert set(curves((two, 2))) == {"learning_rate=0.001, discount=0.5", "learning_rate=0.0001, discount=0.9"}


def test_numbers_that_evolve_are_no_settings():
    rates = [1e-3, 1e-4]
    evolved = description(population=2, hyper={"learning_rate": rates}) | {"pbt": {"hyper": ["learning_rate"]}}
    assert curves((evolved, 2)) == {"vtrace on catch": 2}
    table = members.table(members.from_run(evolved, list(rows(2))), ["learning_rate", "discount"])
    assert all("learning_rate" not in row and row["discount"] == 0.99 for row in table)
    assert len(curves((evolved, 2), (description(population=2, hyper={"learning_rate": rates}), 2))) == 3


def test_seeds_of_one_setting_have_no_name_but_the_runs():
    assert curves((description(), 1)) == {"vtrace on catch": 1}
    assert curves((description(population=3), 3)) == {"vtrace on catch": 3}


def test_settings_that_look_alike_keep_their_lines():
    rates = [1e-3, 1.00001e-3, float(np.float32(1e-3))]
    assert len(curves((description(population=3, hyper={"learning_rate": rates}), 3))) == 3


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"config": {"discount": 0.5}}, "discount=0.5"),
        ({"config": {"hidden_sizes": [64, 64]}}, "hidden_sizes=[64, 64]"),
        ({"options": {"rows": 12}}, "rows=12"),
        ({"num_envs": 16}, "num_envs=16"),
        ({"init_from": "runs/other"}, "init_from=runs/other"),
        ({"own": ["network"]}, "own=['network']"),
        ({"agent": "ppo", "config": {"clip_epsilon": 0.2}}, "ppo on catch"),
        ({"env": "cartpole", "options": {"size": 3}}, "vtrace on cartpole"),
        ({"seed": 2, "num_shards": 2, "eval_every": 99}, None),
    ],
)
def test_runs_share_a_line_unless_settings_differ(change, label):
    """Seeds 0 and 1 of the same, and a third run that differs in something."""
    found = curves((description(), 1), (description(seed=1), 1), (description(**({"seed": 2} | change)), 1))
    if label is None:
        assert found == {"vtrace on catch": 3}
    else:
        first, second = found.items()
        assert (first[1], second) == (2, (label, 1))
        assert first[0] != label


def test_a_setting_of_a_sweep_and_a_run_of_its_own_are_the_same():
    swept = description(population=2, hyper={"learning_rate": [1e-3, 1e-4]})
    alone = description(seed=7, config={"learning_rate": 1e-4})
    assert curves((swept, 2), (alone, 1)) == {"learning_rate=0.001": 1, "learning_rate=0.0001": 2}


def test_runs_of_one_seed_are_no_seeds():
    """They are copies, or differ in what no file holds."""
    assert curves((description(), 1), (description(), 1)) == {"run-0": 1, "run-1": 1}
    assert curves((description(population=2), 2), (description(seed=1), 1)) == {"run-0": 2, "run-1": 1}


def test_without_groups_every_run_has_a_line():
    runs = [(description(seed=i), 1) for i in range(2)]
    assert curves(*runs, group=False) == {"run-0": 1, "run-1": 1}
    runs.append((description(seed=2, config={"discount": 0.5}), 1))
    assert set(curves(*runs, group=False)) == {f"run-{i}, discount={d}" for i, d in enumerate((0.99, 0.99, 0.5))}


def legend_of(figure):
    (legend,) = [*figure.legends, *(axes.legend_ for axes in figure.axes if axes.legend_)]
    return [text.get_text() for text in legend.get_texts()]


def test_what_is_drawn_of_a_line():
    figure = plots.figure({"one": list(rows()), "three": list(rows(3))})
    assert legend_of(figure) == ["one", "three, mean of 3 seeds", "evaluation", "band: min to max"]
    (axes,) = figure.axes
    single, _, mean, _ = axes.lines
    np.testing.assert_array_equal(single.get_xydata(), [[10, 10], [20, 20], [30, 30]])
    np.testing.assert_allclose(mean.get_ydata(), mean.get_xdata() + 1.0)
    band = axes.collections[0].get_paths()[0].vertices
    at_end = band[band[:, 0] == 30][:, 1]
    assert (at_end.min(), at_end.max()) == (30, 32)
    assert len({line.get_color() for line in axes.lines}) == 2, "a run and its evaluation have one colour"


def test_a_legend_names_a_dozen():
    figure = plots.figure({f"line {i}": list(rows()) for i in range(16)}, metric="episode/return")
    assert legend_of(figure) == [*(f"line {i}" for i in range(11)), "and 5 more"]
    assert len({str(line.get_color()) for line in figure.axes[0].lines}) == 16
    assert len(legend_of(plots.figure({f"line {i}": list(rows()) for i in range(12)}, metric="episode/return"))) == 12


def test_a_metric_that_is_not_there():
    with pytest.raises(ValueError, match=r"no rows of episode/retrun in one; did you mean 'episode/return'"):
        plots.figure({"one": list(rows())}, metric="episode/retrun")
