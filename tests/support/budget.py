"""Measures the processor time of tests, and fails a run that takes more of it than its tier may.

Processor seconds are those of the process that runs a test and of its children that have ended. Every run ends with its
sum per folder; with workers, over all of them. PODRACER_TEST_COSTS names a file for the seconds of each test.

Other programs on the machine use its caches and its memory, and the same tests then take up to 2.7 times as many seconds.
So a fixed piece of work, the yardstick, is timed between tests. Budgets are in seconds of two quiet cores: the seconds that
were spent, divided by the slowness of the yardstick.

PODRACER_TEST_BUDGET names a tier of `budget.toml`. The run then fails if it takes a fifth more than the tier gives it, and
if a test takes longer than `test` seconds, where the tier has such a limit. A folder above its share is named, so that one
sees where to save; it fails no run, for machines differ in which work they are slow at. For that limit alone, the seconds are of
real time or of processor time, whichever is less: neighbours make the one longer, threads the other. A test is charged for its
own set-up and tear-down. What a module or the session shares is charged to the fixture that makes it, by name, and has the
same limit.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import statistics
import time
import tomllib
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import pytest

SHARED = "shared fixture"
START = "start"
"""The name of imports and collection among the folders."""
ALL = "all tests"
MARGIN = 1.2
"""Runs may take so much more than their budgets: machines differ, and so does what workers share."""
SECONDS_BETWEEN = 20.0
"""Seconds of the clock from one reading of the yardstick to the next."""
READINGS = "readings"
"""The name of the yardstick's readings among what a worker returns."""


class Tier(NamedTuple):
    """Seconds that a tier may take: all of it, each folder of tests, and each test, the latter two if there is a limit.

    `yardstick` is its processor seconds on two quiet cores; without it, seconds are compared as they are.
    """

    total: float
    folders: Mapping[str, float] | None = None
    test: float = float("inf")
    yardstick: float | None = None


def tier(name: str) -> Tier:
    """Reads a tier of `budget.toml`."""
    tiers = tomllib.loads(pathlib.Path(__file__).with_name("budget.toml").read_text())
    if name not in tiers:
        raise pytest.UsageError(f"PODRACER_TEST_BUDGET is {name!r}; set it to one of {', '.join(tiers)}")
    return Tier(**tiers[name])


def processor_time() -> float:
    """Seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def yardstick() -> float:
    """Processor seconds of work like that of tests: programs that are traced, lowered and compiled, each a new one."""
    import jax
    import jax.numpy as jnp

    begin = time.process_time()
    for _ in range(2):
        number = float(time.time_ns() % 1_000_000)  # no cache has it

        def loss(w: Any, number: float = number) -> Any:
            x = jnp.ones((4, 8))
            for _ in range(4):
                x = jnp.tanh(x @ w + number)
            return jnp.sum(jax.nn.softmax(x))

        jax.jit(jax.grad(loss)).lower(jnp.ones((8, 8))).compile()
    return time.process_time() - begin


def folder_of(nodeid: str) -> str:
    """The folder of `tests` in which a test is; "tests" itself for a file that is in none."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"


class Budget:
    """Seconds by test, by shared fixture and by folder, from the reports of this process or of its workers."""

    def __init__(self, allowed: Tier | None = None):
        self.allowed = allowed
        self.spent: collections.Counter[str] = collections.Counter()
        self.costs: collections.Counter[str] = collections.Counter()
        self.start = 0.0
        self.item: pytest.Item | None = None
        self.processor = 0.0
        self.readings: list[float] = []
        self.read_at, self.reading_seconds = -SECONDS_BETWEEN, 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if self.allowed and self.allowed.yardstick and time.monotonic() > self.read_at + SECONDS_BETWEEN:
            before = processor_time()
            if not self.readings:
                yardstick()  # the first of a process makes what all others use
            self.readings.append(yardstick())
            self.read_at = time.monotonic()
            self.reading_seconds += processor_time() - before
        self.item, self.processor = item, processor_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        before, self.processor = self.processor, processor_time()
        report.cost = self.processor - before  # both travel with a worker's report
        report.charged = min(report.duration, report.cost)
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
        self.costs[report.nodeid] += getattr(report, "cost", 0.0)  # none of a test that ended its process
        if "slow" in report.keywords:
            return
        self.spent[report.nodeid] += getattr(report, "charged", 0.0)
        if report.when == "teardown":  # every phase repeats the properties
            for name, seconds in report.user_properties:
                if name.startswith(SHARED):
                    self.spent[report.nodeid] -= seconds
                    self.spent[name] = max(self.spent[name], seconds)  # each worker makes its own

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})  # a worker that was ended has none
        self.start += output.get(START, 0.0)
        self.readings += output.get(READINGS, [])

    @property
    def folders(self) -> collections.Counter[str]:
        """Seconds by folder, and those that no test was charged for."""
        sums: collections.Counter[str] = collections.Counter()
        for nodeid, seconds in self.costs.items():
            sums[folder_of(nodeid)] += seconds
        sums[START] += self.start
        return sums

    @property
    def slowness(self) -> float:
        """The machine's time for the yardstick over that of two quiet cores; 1 for a machine that is faster."""
        if not self.readings or self.allowed is None or not self.allowed.yardstick:
            return 1.0
        return max(1.0, statistics.mean(self.readings) / self.allowed.yardstick)

    @property
    def exceeded(self) -> list[tuple[str, float, float]]:
        """The name of what took too long, its seconds, and those that it may take, of two quiet cores."""
        if self.allowed is None:
            return []
        slowness = self.slowness
        found = [(ALL, sum(self.folders.values()), MARGIN * self.allowed.total)]
        found += [(name, seconds, self.allowed.test) for name, seconds in self.spent.most_common()]
        return [(name, seconds / slowness, may) for name, seconds, may in found if seconds / slowness > may]

    @property
    def large_folders(self) -> list[tuple[str, float, float]]:
        """The name of each folder above its share of the budget, its seconds and its share."""
        if self.allowed is None or self.allowed.folders is None:
            return []
        shares = self.allowed.folders  # a folder without a share may take nothing
        slowness = self.slowness
        spent = [(name, seconds / slowness, shares.get(name, 0.0)) for name, seconds in self.folders.most_common()]
        return [(name, seconds, share) for name, seconds, share in spent if seconds > MARGIN * share]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        charged = sum(self.costs.values())
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[START], output[READINGS] = processor_time() - charged - self.reading_seconds, self.readings
        elif session.config.getoption("numprocesses", None):
            self.start += sum(os.times()[:2])  # the workers have said theirs
        else:
            self.start = processor_time() - charged - self.reading_seconds
        if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        sums = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.folders.most_common())
        total, slowness = sum(self.folders.values()), self.slowness
        terminalreporter.write_line(f"Processor seconds: {total:.0f} ({sums})")
        if self.readings:
            readings = f"{len(self.readings)} readings of {statistics.mean(self.readings):.2f} s"
            of_quiet = f"{total / slowness:.0f} s of two quiet cores"
            terminalreporter.write_line(
                f"Yardstick: {readings}; the run took {of_quiet}, {slowness:.2f} times as long here"
            )
        for name, seconds, share in self.large_folders:
            terminalreporter.write_line(f"Above its share {name}: {seconds:.1f} s, of {share:.1f} s", yellow=True)
        for name, seconds, limit in self.exceeded:
            terminalreporter.write_line(f"OVER BUDGET {name}: {seconds:.1f} s, of {limit:.1f} s", red=True)
        if path := os.environ.get("PODRACER_TEST_COSTS"):
            rounded = {name: round(seconds, 2) for name, seconds in [(START, self.start), *self.costs.most_common()]}
            pathlib.Path(path).write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    name = os.environ.get("PODRACER_TEST_BUDGET")
    config.pluginmanager.register(Budget(tier(name) if name else None), "podracer-budget")
