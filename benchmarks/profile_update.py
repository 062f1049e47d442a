"""Sums up where the time of an update goes on CPU: products, sums, copies, random numbers, loops, and all the rest.

python benchmarks/profile_update.py vtrace                  # the settings of `podracer bench anakin`
taskset -c 0 python benchmarks/profile_update.py ppo        # one core: times are those of the work, not of waiting
python benchmarks/profile_update.py ppo --operations 20     # the longest operations, too

XLA's own profile of each operation, without the operations that it contains. Profiling takes time itself: shares are
to be trusted more than their sum, for which there is the first line.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

import envs_jax
from podracer import topology
from podracer.agents.registry import make_agent
from podracer.bench.anakin import PRESETS, YARDSTICK_ENVS, trainer

RANDOM = re.compile(r"_uniform|random|threefry|shuffle|_split|jit\(_gumbel|bits")
COPIES = {"copy", "transpose", "dynamic-slice", "dynamic-update-slice", "broadcast", "slice", "concatenate", "pad"}


def kinds(program: str) -> dict[str, str]:
    """The kind of every operation of a compiled program's text, by its name."""
    bodies: dict[str, set[str]] = {}
    found: dict[str, str] = {}
    body: set[str] = set()
    for line in program.splitlines():
        if computation := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            body = bodies.setdefault(computation[1], set())
        elif operation := re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*?\s([a-z][a-z-]*)\(", line):
            name, opcode = operation.groups()
            body.add(opcode)
            calls = re.search(r"calls=%([\w.-]+)", line)
            codes = bodies.get(calls[1], set()) if calls else {opcode}
            found[name] = _kind(codes - {"parameter", "constant", "bitcast", "reshape", "get-tuple-element"}, line)
    return found


def _kind(opcodes: set[str], line: str) -> str:
    source = re.search(r'op_name="([^"]*)"', line)
    if source and RANDOM.search(source[1].removeprefix("jit(step)")):
        return "random numbers"
    for kind, codes in (
        ("products", {"dot", "convolution"}),
        ("loops", {"while", "call", "conditional"}),
        ("sums", {"reduce", "reduce-window", "all-reduce"}),
    ):
        if opcodes & codes:
            return kind
    # XLA names a fusion by what it does last: transposing for a product, though the activation is computed on the way.
    moves = re.search(r"%[\w-]*(copy|transpose)[\w-]*fusion", line.split("=")[0])
    others = opcodes - COPIES - {"add", "compare", "select"}
    return "copies" if moves or (opcodes & COPIES and not others) else "elements"


def operations(folder: str) -> Iterator[tuple[str, float]]:
    """Names and microseconds of the operations in a profile, without those that each contains."""
    (file,) = pathlib.Path(folder).glob("**/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    threads: dict[Any, list[Any]] = collections.defaultdict(list)
    for event in events:
        if "hlo_op" in event.get("args", {}):
            threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        open_ones: list[Any] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_ones and open_ones[-1]["ts"] + open_ones[-1]["dur"] <= event["ts"]:
                open_ones.pop()
            if open_ones:
                yield open_ones[-1]["name"], -event["dur"]
            yield event["name"], event["dur"]
            open_ones.append(event)


def main() -> None:
    """Trains under the profiler, and prints the parts of an update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", choices=sorted(PRESETS))
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--operations", type=int, default=0)
    args = parser.parse_args()
    environment = envs_jax.make(YARDSTICK_ENVS[args.agent])
    agent = make_agent(args.agent, environment, PRESETS[args.agent])
    layout = topology.make(num_envs=args.num_envs, envs_per_device=args.num_envs, devices=jax.local_devices()[:1])
    training = trainer(agent, environment, layout, agent.config.rollout_length)
    training(args.updates)
    start, cpu = time.perf_counter(), time.process_time()
    training(args.updates)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{wall / args.updates * 1e3:.2f} ms an update, {cpu / args.updates * 1e3:.2f} ms of processor time")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            training(args.updates)
        profile = list(operations(folder))
    kind_of = kinds(training.compiled.call.as_text())  # type: ignore[attr-defined]
    times, kinds_of_times, number = collections.Counter(), collections.Counter(), collections.Counter()
    for name, duration in profile:
        times[name] += duration / args.updates
        number[name] += duration > 0
        kinds_of_times[kind_of.get(name, "loops")] += duration / args.updates
    total = sum(kinds_of_times.values())
    for kind, duration in kinds_of_times.most_common():
        print(f"{duration / 1e3:9.2f} ms {duration / total:6.1%}  {kind}")
    for name, duration in times.most_common(args.operations):
        print(f"{duration / 1e3:9.3f} ms {number[name] / args.updates:8.1f} times  {name}: {kind_of.get(name, '?')}")


if __name__ == "__main__":
    main()
