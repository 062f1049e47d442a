"""Linear recurrences and cores: times of the ways to compute them, with their gradient.

    python benchmarks/scans.py [--lanes 16] [--seconds 0.2]

Writes `benchmarks/results/scans.json`, by which `podracer/topology/scans.py` chooses. Ways run in turns; times are
medians.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import nets
from podracer.bench import measure
from podracer.topology import scans

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS = (16, 32, 64, 128, 512)
UNITS = (64, 256, 1024)
LONGEST_UNROLLED = 32
"""Rows; more in one piece take a minute to compile."""
CORES = {"T 20, D 64": (20, 64, 64), "T 80, D 256": (80, 16, 256)}
"""Rows, lanes and units that whole cores are measured with, inputs as wide as their units."""


def recurrence(way: str) -> Callable[..., jax.Array]:
    """A way of computing a linear recurrence, `(gate, x, start) -> h`."""
    if way == "unrolled":  # on CPU too
        step = lambda h, row: (row[0] * h + row[1],) * 2  # noqa: E731
        return lambda gate, x, start: lax.scan(step, start, (gate, x), unroll=len(x))[1]
    return lambda gate, x, start: scans.linear_recurrence(gate, x, start, False, way)  # type: ignore[arg-type]


def prepared(function: Callable[..., Any], *arguments: Any) -> tuple[measure.Measured, float]:
    """A compiled function as a measurement, and the seconds that it took to compile."""
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - begin

    def run(n: int) -> int:
        for _ in range(n):
            jax.block_until_ready(compiled(*arguments))
        return n

    return run, seconds


def compared(functions: dict[str, tuple[measure.Measured, float]], seconds: float) -> dict[str, dict[str, float]]:
    """Microseconds of a call and seconds of compilation, by name."""
    rates = measure.in_turns({name: run for name, (run, _) in functions.items()}, 5, seconds)
    return {
        name: {"us": round(1e6 / statistics.median(rates[name]), 1), "compile_seconds": round(compile_seconds, 2)}
        for name, (_, compile_seconds) in functions.items()
    }


def of_recurrence(T: int, lanes: int, units: int, seconds: float) -> dict[str, dict[str, float]]:
    """Times of the recurrence and its gradient by each way."""
    keys = jax.random.split(jax.random.key(0), 3)
    gate, x = jax.random.uniform(keys[0], (T, lanes, units)), jax.random.normal(keys[1], (T, lanes, units))
    arguments = gate, x, jax.random.normal(keys[2], (lanes, units))

    def gradient(way: str) -> Callable[..., Any]:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(recurrence(way)(*a))), (0, 1, 2))

    ways = ("sequential", "associative", *(("unrolled",) if T <= LONGEST_UNROLLED else ()))
    return compared({way: prepared(gradient(way), *arguments) for way in ways}, seconds)


def of_cores(T: int, lanes: int, units: int, seconds: float) -> dict[str, dict[str, float]]:
    """Times of whole cores and their gradient."""
    x, first = jax.random.normal(jax.random.key(0), (T, lanes, units)), jnp.zeros((T, lanes), bool)
    functions = {}
    for name in ("lstm", "gru", "mingru", "lru", "gtrxl"):
        core: Any = nets.CoreSettings(name, units).make()  # type: ignore[arg-type]
        params = jax.jit(core.init)(jax.random.key(1), x, first, core.start(lanes))
        loss = lambda p, x, core=core: jnp.sum(jnp.sin(core.apply(p, x, first, core.start(lanes))[0]))  # noqa: E731
        functions[name] = prepared(jax.grad(loss, (0, 1)), params, x)
    return compared(functions, seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.2)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"recurrences": {}, "cores": {}}
    write = lambda: measure.write(RESULTS / "scans.json", "python benchmarks/scans.py", vars(arguments), results)  # noqa: E731
    for T in ROWS:
        for units in UNITS:
            found = of_recurrence(T, arguments.lanes, units, arguments.seconds)
            results["recurrences"][f"T {T}, D {units}"] = found
            print(f"T {T}, D {units}: {found}", flush=True)
    write()
    for name, (T, lanes, units) in CORES.items():
        found = of_cores(T, lanes, units, arguments.seconds)
        results["cores"][name] = found
        print(f"{name}: {found}", flush=True)
    write()


if __name__ == "__main__":
    main()
