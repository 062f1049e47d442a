"""The display of a run: a bar in a notebook and on a terminal, lines elsewhere."""

import contextlib
import io
import re
import time

import numpy as np
import pytest
from rich.console import Console

from podracer.run import metrics, status_line
from podracer.training.training_log import Cautions
from podracer.types import Caution


@pytest.fixture
def cell(monkeypatch):
    """A notebook's cell: its outputs, which updates replace by their id, as its browser shows them."""
    ipython = pytest.importorskip("IPython.display")
    outputs = []

    class Handle:
        def __init__(self, data, **options):
            assert options == {"raw": True, "display_id": True}
            outputs.append([data])

        def update(self, data, raw):
            outputs[-1].append(data)

    monkeypatch.setattr(ipython, "display", Handle)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return outputs


def progress_of(data):
    return float(re.search(r'<progress value="([\d.]+)" max="1"', data["text/html"])[1])


def test_a_bar_in_a_notebook_ends_at_the_end(cell, capsys):
    display = metrics.Display(2000, "vtrace <mine>", True)
    display.say("compiling ...")
    for steps in (500, 1000, 2016):
        display.update(steps, 12_345.6, 0.5, " lag 1.0")
    display.detail("for those who have no bar")
    display.close()
    ((first, *updates),) = cell
    assert len(updates) <= 2, "a message to the browser for every update slows a run down"
    assert (progress_of(first), progress_of(updates[-1])) == (0, 1)
    assert updates[-1]["text/plain"] == "vtrace <mine> 100%, 12,346 steps/s, return 0.50 lag 1.0"
    assert "vtrace &lt;mine&gt; 100%" in updates[-1]["text/html"]
    assert capsys.readouterr() == ("compiling ...\n", ""), "a notebook paints stderr red"


def test_a_bar_in_a_notebook_moves(cell, monkeypatch):
    monkeypatch.setattr(metrics._NotebookBar, "SECONDS", -1)
    display = metrics.Display(2000, "vtrace catch", True, env_steps=500)
    display.update(1990, 1.0, float("nan"))
    assert [progress_of(data) for data in cell[0]] == [0.25, 0.995]
    assert cell[0][-1]["text/plain"] == "vtrace catch 99%, 1 steps/s, return …"


def test_a_finished_run_is_at_the_end(cell):
    metrics.Display(2000, "vtrace catch", True, env_steps=2016).close()
    assert [progress_of(data) for data in cell[0]] == [1, 1]


def test_a_bar_on_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_jupyter=False, width=120)
    bar = metrics._TerminalBar(console, 2000, "vtrace catch[red]", 500)
    bar.update(2000, "12 steps/s", "return 0.50")
    path = "runs/[a]/gymnasium:robot:Reach/" + 120 * "x"
    bar.say(path)
    bar.close()
    text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", file.getvalue())
    assert " 25%" in text
    assert " 100% 12 steps/s return 0.50" in text
    assert f"{path}\n" in text, "brackets and colons are no markup, and a path stays in one piece"
    assert "catch[red]" in text


def test_a_run_that_says_nothing_is_heard_of(capsys, monkeypatch):
    """Also while it compiles, and not where somebody else said something."""
    monkeypatch.setattr(status_line, "SECONDS", 0.15)
    display = metrics.Display(2000, "vtrace catch", True)
    display.set_status("compiling")
    time.sleep(0.4)
    display.set_status("training")
    display.update(500, 12.0, 0.5)
    time.sleep(0.4)
    said = display._status_line._said
    display.say("a line")
    assert display._status_line._said > said, "and then it is silent for as long"
    display.close()
    time.sleep(0.2)
    *before, last = capsys.readouterr().err.splitlines()
    assert last == "a line"
    patterns = r"compiling for \d s", r"training for \d s; 500 of 2,000 steps, 12 steps/s, return 0\.50"
    assert {next(pattern for pattern in patterns if re.fullmatch(pattern, line)) for line in before} == {*patterns}
    display = metrics.Display(2000, "vtrace catch", False)
    display.set_status("compiling")
    assert display._status_line is None


def test_lines_where_there_is_neither(capsys):
    for enabled in (True, False):
        display = metrics.Display(2000, "vtrace catch", enabled)
        display.update(500, 1.0, 0.5)
        display.detail("half")
        display.say("all")
        display.close()
    assert capsys.readouterr() == ("", "half\nall\n")


def test_a_setting_that_does_not_fit_is_said_once(capsys):
    """By the first member that shows it; where nothing is shown, as a warning of Python's."""
    caution = Caution("value/outside", 0.01, "set max_value")
    for shown in (True, False):
        cautions = Cautions([caution], metrics.Display(2000, "dqn catch", shown))
        cautions.check({})
        cautions.check({"value/outside": np.array([np.nan, 0.01])})
        assert not capsys.readouterr().err
        with (
            contextlib.nullcontext()
            if shown
            else pytest.warns(UserWarning, match="^value/outside is 0.25: set max_value$")
        ):
            cautions.check({"value/outside": np.array([0.0, 0.25])})
        cautions.check({"value/outside": np.array([0.5, 0.5])})
        assert capsys.readouterr().err == ("warning: value/outside is 0.25: set max_value\n" if shown else "")
