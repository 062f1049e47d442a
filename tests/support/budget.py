"""Fails a run in which a test takes longer than it may: PODRACER_TEST_BUDGET, in seconds.

They are of real time or of processor time, whichever is less: neighbours on the machine make the one longer, threads the
other. A test is charged for its own set-up and tear-down. What a module or the session shares is charged to the fixture that
makes it, by name, and has the same limit. Slow tests are exempt; without the variable nothing is measured.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Generator
from typing import Any

import pytest

SHARED = "shared fixture"


def processor_time() -> float:
    """The processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


class Budget:
    """Seconds by test and by shared fixture, from the reports of this process or of its workers."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.spent: collections.Counter[str] = collections.Counter()
        self.item: pytest.Item | None = None
        self.processor = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.item, self.processor = item, processor_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        before, self.processor = self.processor, processor_time()
        report.charged = min(report.duration, self.processor - before)  # travels with a worker's report
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        begin, processor = time.perf_counter(), processor_time()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function" and self.item is not None:  # a property travels with a worker's report
                name = f"{SHARED} {fixturedef.argname} of {fixturedef.baseid or 'all'}"
                seconds = min(time.perf_counter() - begin, processor_time() - processor)
                self.item.user_properties.append((name, seconds))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "slow" in report.keywords:
            return
        self.spent[report.nodeid] += getattr(report, "charged", 0.0)  # none of a test that ended its process
        if report.when == "teardown":  # every phase repeats the properties
            for name, seconds in report.user_properties:
                if name.startswith(SHARED):
                    self.spent[report.nodeid] -= seconds
                    self.spent[name] = max(self.spent[name], seconds)  # each worker makes its own

    @property
    def exceeded(self) -> list[tuple[str, float]]:
        return [(name, seconds) for name, seconds in self.spent.most_common() if seconds > self.seconds]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, seconds in self.exceeded:
            terminalreporter.write_line(f"OVER BUDGET {name}: {seconds:.1f} s, of {self.seconds:g} s", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if seconds := os.environ.get("PODRACER_TEST_BUDGET"):
        config.pluginmanager.register(Budget(float(seconds)), "podracer-budget")
