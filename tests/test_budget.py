"""The budget of tests: who is charged for what, and that a run over it fails."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support import budget as plugin
from tests.support.budget import ALL, READINGS, SHARED, START, Budget, Tier


def report(when, seconds, properties=(), keywords=(), nodeid="tests/agents/test_a.py::test_a"):
    return SimpleNamespace(
        nodeid=nodeid,
        when=when,
        duration=seconds,
        cost=seconds,
        charged=seconds,
        user_properties=list(properties),
        keywords=set(keywords),
    )


def session(**config):
    options = SimpleNamespace(getoption=lambda name, default: 2, **config)
    return SimpleNamespace(exitstatus=pytest.ExitCode.OK, config=options)


def test_phases_add_up_and_fail_the_run():
    budget = Budget(Tier(1000.0, None, 15.0))
    for when, seconds in (("setup", 6.0), ("call", 8.0), ("teardown", 2.0)):
        assert budget.exceeded == []
        budget.pytest_runtest_logreport(report(when, seconds))
    assert budget.exceeded == [("tests/agents/test_a.py::test_a", 16.0, 15.0)]
    ended = session()
    budget.pytest_sessionfinish(ended)
    assert ended.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_a_shared_fixture_is_charged_by_its_own_name():
    budget, shared = Budget(Tier(1000.0, None, 15.0)), (f"{SHARED} trained", 20.0)
    for when, seconds in (("setup", 21.0), ("call", 1.0), ("teardown", 0.0)):
        budget.pytest_runtest_logreport(report(when, seconds, [shared]))
    assert budget.spent["tests/agents/test_a.py::test_a"] == 2.0
    assert budget.exceeded == [(*shared, 15.0)]
    assert budget.folders["agents"] == 22.0, "folders pay for all of it"


def test_slow_tests_have_no_limit_of_their_own():
    budget = Budget(Tier(1000.0, None, 15.0))
    budget.pytest_runtest_logreport(report("call", 60.0, keywords=["slow"]))
    ended = session()
    budget.pytest_sessionfinish(ended)
    assert ended.exitstatus == pytest.ExitCode.OK
    assert budget.folders["agents"] == 60.0


def test_a_run_may_take_a_fifth_more_and_large_folders_are_named():
    budget = Budget(Tier(30.0, {"agents": 20.0, "tests": 10.0}))
    for seconds, large in ((24.0, []), (1.0, [("agents", 25.0, 20.0)])):
        budget.pytest_runtest_logreport(report("call", seconds))
        assert budget.large_folders == large
        assert budget.exceeded == []
    budget.pytest_runtest_logreport(report("call", 12.0, nodeid="tests/test_b.py::test_b"))
    assert budget.exceeded == [(ALL, 37.0, 36.0)]
    budget.pytest_runtest_logreport(report("call", 0.1, nodeid="tests/new/test_c.py::test_c"))
    assert ("new", 0.1, 0.0) in budget.large_folders, "one without a share"


def test_seconds_are_those_of_quiet_cores():
    """A worker's readings count as the others' do; a machine that is faster than quiet cores may not spend more."""
    budget = Budget(Tier(30.0, {"agents": 20.0}, 15.0, yardstick=0.5))
    budget.pytest_runtest_logreport(report("call", 90.0))
    assert [name for name, *_ in budget.exceeded] == [ALL, "tests/agents/test_a.py::test_a"]
    for readings in ([1.0, 2.0], [1.5]):
        budget.pytest_testnodedown(SimpleNamespace(workeroutput={READINGS: readings}))
    assert budget.slowness == 3.0
    assert budget.exceeded == [("tests/agents/test_a.py::test_a", 30.0, 15.0)]
    assert budget.large_folders == [("agents", 30.0, 20.0)]
    budget.readings = [0.1]
    assert budget.slowness == 1.0


def test_the_yardstick_is_new_work_every_time(tmp_path):
    """Also where every program is written to a cache, however soon it was compiled."""
    code = """
import jax
from tests.support import budget

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
budget.yardstick()
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
assert budget.yardstick() > 0
print(sum("cache_hits" in event for event in seen), sum("cache_misses" in event for event in seen))
"""
    variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "2"], done.stderr


def test_without_a_tier_nothing_is_exceeded():
    budget = Budget()
    budget.pytest_runtest_logreport(report("call", 1e6))
    assert budget.exceeded == []


def test_what_workers_begin_with_is_added_up():
    budget = Budget(Tier(10.0))
    for seconds in (6.0, 7.0):
        budget.pytest_testnodedown(SimpleNamespace(workeroutput={START: seconds}))
    budget.pytest_testnodedown(SimpleNamespace())  # it was killed
    assert budget.folders[START] == 13.0
    assert [name for name, *_ in budget.exceeded] == [ALL]


def test_tiers_are_what_the_documentation_says():
    quick, slow = plugin.tier("quick"), plugin.tier("slow")
    page = (pathlib.Path(__file__).parents[1] / "docs" / "development" / "tests.md").read_text()
    assert f"The quick tier may take {quick.total:,} processor seconds and the slow one {slow.total:,}" in page
    assert sum(quick.folders.values()) <= quick.total
    with pytest.raises(pytest.UsageError, match="PODRACER_TEST_BUDGET is '15'; set it to one of quick, slow"):
        plugin.tier("15")


TESTS = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

def test_here():
    begin = time.process_time()
    while time.process_time() < begin + 0.5: pass

def test_in_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_that_waits():
    time.sleep(0.5)
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_is_measured_with_its_children(workers, tmp_path):
    folder = tmp_path / "tests" / "agents"
    folder.mkdir(parents=True)
    shutil.copy(plugin.__file__, folder.parent)
    busy = "import time\nwhile time.process_time() < 1.5: pass\n"  # so that a worker's part is seen beside the others'
    (folder.parent / "conftest.py").write_text(busy + 'pytest_plugins = ["budget"]')
    (folder.parent / "budget.toml").write_text("[quick]\ntotal = 1\nfolders = {agents = 0.5, start = 50}\n")
    (folder / "test_a.py").write_text(TESTS)
    variables = {"PYTHONPATH": str(folder.parent), "PODRACER_TEST_BUDGET": "quick", "PODRACER_TEST_COSTS": "costs.json"}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tmp_path, "-n", str(workers), "tests"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    named = [line for line in done.stdout.splitlines() if line.startswith(("OVER BUDGET", "Above"))]
    assert [line.partition(":")[0] for line in named] == ["Above its share agents", f"OVER BUDGET {ALL}"]
    assert named[0].startswith("Above its share agents: 1.")
    assert named[0].endswith(" s, of 0.5 s")
    costs = json.loads((tmp_path / "costs.json").read_text())
    here, child, waiting = (
        costs[f"tests/agents/test_a.py::test_{name}"] for name in ("here", "in_a_child", "that_waits")
    )
    assert 0.4 < here < 1.0  # in ticks of a hundredth
    assert 0.4 < child < 1.0
    assert waiting < 0.3
    assert costs[START] > 1.4 * (workers + 1)


def test_every_folder_has_a_budget():
    here = pathlib.Path(__file__).parent
    folders = {path.parent.name for path in here.rglob("test_*.py")}
    assert folders | {START} == set(plugin.tier("quick").folders)
