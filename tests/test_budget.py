"""The budget of tests: who is charged for what, and that a run over it fails."""

from types import SimpleNamespace

import pytest

from tests.support.budget import SHARED, Budget


def report(when, seconds, properties=(), keywords=()):
    return SimpleNamespace(
        nodeid="test_a",
        when=when,
        duration=seconds,
        charged=seconds,
        user_properties=list(properties),
        keywords=set(keywords),
    )


def test_phases_add_up_and_fail_the_run():
    budget = Budget(15.0)
    for when, seconds in (("setup", 6.0), ("call", 8.0), ("teardown", 2.0)):
        assert budget.exceeded == []
        budget.pytest_runtest_logreport(report(when, seconds))
    assert budget.exceeded == [("test_a", 16.0)]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    budget.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED


def test_a_shared_fixture_is_charged_by_its_own_name():
    budget, shared = Budget(15.0), (f"{SHARED} trained", 20.0)
    for when, seconds in (("setup", 21.0), ("call", 1.0), ("teardown", 0.0)):
        budget.pytest_runtest_logreport(report(when, seconds, [shared]))
    assert budget.spent["test_a"] == 2.0
    assert budget.exceeded == [shared]


def test_slow_tests_are_exempt():
    budget = Budget(15.0)
    budget.pytest_runtest_logreport(report("call", 60.0, keywords=["slow"]))
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    budget.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.OK
