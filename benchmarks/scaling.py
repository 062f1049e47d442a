"""`python benchmarks/scaling.py`: an experiment on more devices and processes, and the cost of their agreement.

Every layout is measured in processes of its own, started by `podracer launch`, one layout after the other and all of
them `repeats` times. Devices that a CPU simulates share its cores: there the same work is divided among them, and the
figure is the additional time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import hlo
import jax
import numpy as np
import script
import tyro
from jax import lax
from jax.sharding import PartitionSpec

from podracer import configs, environments, topology
from podracer.agents.registry import make_agent
from podracer.bench import anakin, sebulba
from podracer.bench.measure import describe_machine, table, write
from podracer.run.config import RunConfig
from podracer.sebulba.driver import Sebulba
from podracer.topology import DATA_AXIS
from podracer.topology.processes import ALONE, Processes
from podracer.version import __version__

LANES = {"vtrace": 4096, "ppo": 4096, "sebulba": 128, "sebulba-pong": 32}
"""The number of lanes by preset: V-trace on catch and PPO on cartpole under Anakin; V-trace on EnvPool's CartPole and
Pong."""

OF_SEBULBA = {"sebulba": "cartpole", "sebulba-pong": "pong"}
"""The presets that `podracer bench sebulba` has too, with their names there."""

ROUNDS = 20
"""The number of all-reduces in one call when they are timed alone, and of updates that are timed one by one."""


@dataclasses.dataclass(frozen=True)
class ScalingArguments:
    """Measure the same on several processes and devices.

    Attributes:
      presets: vtrace, ppo, sebulba, sebulba-pong.
      layouts: processes of this machine x devices of each; the first is the reference.
      num_envs: number of lanes, instead of the presets'.
      strong: True divides the same lanes among the devices of every layout (the default on CPUs); False gives each
        device as many.
      repeats: measurements of each layout, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    presets: tuple[str, ...] = tuple(LANES)
    layouts: tuple[str, ...] = ("1x1", "1x2", "1x4", "2x1", "2x2")
    num_envs: int | None = configs.field(None, low=1)
    strong: bool | None = None
    repeats: int = configs.field(3, low=1)
    seconds: float = configs.field(2.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)
        for preset in self.presets:
            if preset not in LANES:
                raise ValueError(f"unknown preset {preset!r}; {configs.suggest(preset, LANES)}")
        for layout in self.layouts:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout):
                raise ValueError(f"layout {layout!r}: use PROCESSESxDEVICES, such as 2x4.")


def main(arguments: ScalingArguments) -> int:
    """Measures, prints a table, writes JSON."""
    layouts: list[tuple[int, int]] = [tuple(map(int, layout.split("x"))) for layout in arguments.layouts]  # type: ignore[misc]
    strong = arguments.strong if arguments.strong is not None else jax.default_backend() == "cpu"
    found: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for repeat in range(arguments.repeats):
        for processes, devices in layouts:
            what = f"{processes} process(es) x {devices} device(s)"
            print(f"measuring {what}, {repeat + 1} of {arguments.repeats} ...", file=sys.stderr, flush=True)
            request = {
                "presets": {name: arguments.num_envs or LANES[name] for name in arguments.presets},
                "strong": strong,
                # Of the same work, all layouts have the same shards and replicas, and learn the same.
                "shards": math.lcm(*(p * d for p, d in layouts)) if strong else None,
                "replicas": math.lcm(*(p for p, _ in layouts)) if strong else None,
                "seconds": arguments.seconds,
            }
            for result in _launch(request, processes, devices):
                found.setdefault((result["preset"], processes, devices), []).append(result)
    results = [_summary(key, several, found) for key, several in found.items()]
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    print(_table(results, strong))
    if arguments.json:
        write(arguments.json, "python benchmarks/scaling.py", arguments, results)
    return 0


def _launch(request: dict[str, Any], processes: int, devices: int) -> list[dict[str, Any]]:
    """Measures a layout in processes of its own and returns the result of process 0.

    Raises:
      RuntimeError: if a process fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "found.json"
        launcher = [sys.executable, "-m", "podracer", "launch", "--processes", str(processes)]
        launcher += ["--devices-per-process", str(devices), "--module", "scaling"]
        search_path = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*launcher, "--", json.dumps(request | {"path": str(path)})],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": search_path},
        )
        if done.returncode or not path.exists():
            raise RuntimeError(f"{processes} x {devices}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(path.read_text())


def _summary(key: tuple[str, int, int], several: list[dict[str, Any]], found: dict[Any, Any]) -> dict[str, Any]:
    """The medians of a layout, beside the first of its preset."""
    preset, processes, devices = key
    (_, *least), first = next((other, value) for other, value in found.items() if other[0] == preset)
    seconds = {name: [one[name] for one in several] for name in several[0] if name.endswith("_seconds")}
    ratios = [one["update_seconds"] / other["update_seconds"] for one, other in zip(several, first)]
    gains = [one["rows"] / other["rows"] / ratio for one, other, ratio in zip(several, first, ratios)]
    n = processes * devices
    return several[0] | {
        "processes": processes,
        "devices": n,
        **{name: statistics.median(values) for name, values in seconds.items()},
        "rows_per_second": statistics.median(one["rows"] / one["update_seconds"] for one in several),
        "time_ratio": statistics.median(ratios),
        "time_ratio_range": [min(ratios), max(ratios)],
        "efficiency": statistics.median(gains) * math.prod(least) / n,
        "jitter": statistics.median(one["jitter"] for one in several),
        "measured": seconds,
    }


def _table(results: list[dict[str, Any]], strong: bool) -> str:
    measure = "time" if strong else "efficiency"
    header = ["preset", "processes x devices", "lanes", "rows/s", "ms an update", f"{measure} of the first", "ms apart"]
    lines = [[*header, "all-reduces", "kB", "ms of those alone", "waiting", "jitter"]]
    milliseconds = lambda x: "-" if x is None else f"{1e3 * x:.2f}"  # noqa: E731
    for r in results:
        layout = f"{r['processes']} x {r['devices'] // r['processes']}"
        ratio = r["time_ratio"] if strong else r["efficiency"]
        line = [r["preset"], layout, str(r["lanes"]), f"{r['rows_per_second']:,.0f}", milliseconds(r["update_seconds"])]
        line += [f"{ratio:.2f}", milliseconds(r.get("apart_seconds"))]
        line += [str(r["all_reduces"]) if "all_reduces" in r else "-"]
        line += [f"{r['bytes'] / 1e3:.1f}" if "bytes" in r else "-", milliseconds(r.get("all_reduce_seconds"))]
        waiting = f"{r['wait_share']:.2f}" if r.get("wait_share") is not None else "-"
        lines.append([*line, waiting, f"{r['jitter']:.2f}"])
    text = (
        "apart: every device by itself with its share of the lanes, so the same without all-reduces but one of 4 bytes "
        "an update, by which devices agree to go on; jitter: of the time of an update, its standard deviation over its "
        "mean"
    )
    waits = any(r.get("wait_share") is not None for r in results)
    return f"{table(lines)}\n{text}{'; waiting: share of the time, for other processes' * waits}."


# In the processes of a layout


def worker(request: dict[str, Any]) -> None:
    """Measures all presets on all devices of the processes."""
    with _processes() as processes:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        found = []
        for preset, lanes in request["presets"].items():
            measure = _sebulba if preset in OF_SEBULBA else _anakin
            lanes *= 1 if request["strong"] else len(devices)
            found.append({"preset": preset, "lanes": lanes} | measure(preset, lanes, devices, request, processes))
        if processes.is_first:
            pathlib.Path(request["path"]).write_text(json.dumps(found))


def _processes() -> contextlib.AbstractContextManager[Processes]:
    if os.environ["JAX_NUM_PROCESSES"] == "1":
        return ALONE
    from podracer.pod import peers, settings

    return peers.start(settings.Pod())


def _anakin(
    preset: str, lanes: int, devices: list[Any], request: dict[str, Any], processes: Processes
) -> dict[str, Any]:
    environment = anakin.AnakinArguments().environment(preset)
    agent = make_agent(preset, environment, anakin.PRESETS[preset])
    T, n = agent.config.rollout_length, len(devices)
    shards = request["shards"] or n
    together = topology.make(num_envs=lanes, envs_per_device=lanes, num_shards=shards, devices=devices)
    # Members of a population share nothing, and fill devices first.
    apart = topology.make(
        num_envs=lanes // n, envs_per_device=lanes, num_shards=shards // n, population=n, devices=devices
    )
    updates = {"update_seconds": anakin.trainer(agent, environment, together, T)}
    if n > 1:
        updates["apart_seconds"] = anakin.trainer(agent, environment, apart, T)
    rows = {"update_seconds": T * lanes, "apart_seconds": T * lanes // n}
    seconds = {
        name: _seconds(lambda k, call=call, rows=rows[name]: call(k) // rows, request["seconds"], processes)
        for name, call in updates.items()
    }
    sizes = hlo.count(updates["update_seconds"].compiled.call.as_text()).sizes if n > 1 else {}  # type: ignore[attr-defined]
    return {
        **seconds,
        "jitter": _jitter(updates["update_seconds"]),
        "rows": T * lanes,
        "all_reduces": sum(sizes.values()),
        "bytes": sum(size * number for size, number in sizes.items()),
        "all_reduce_seconds": _seconds(_all_reduces(sizes, together.mesh), request["seconds"] / 4, processes) / ROUNDS
        if sizes
        else 0.0,
    }


def _all_reduces(sizes: dict[int, int], mesh: Any) -> Callable[[int], int]:
    """The all-reduces of an update without its computation, one after the other; calls do n times `ROUNDS` of them."""

    def turn(_: Any, arrays: list[jax.Array]) -> list[jax.Array]:
        done = []
        for x, number in zip(arrays, sizes.values()):
            for _ in range(number):
                x = lax.psum(x, DATA_AXIS) / mesh.size
            done.append(x)
        return done

    everywhere: Any = PartitionSpec()
    mapped = jax.shard_map(
        lambda arrays: lax.fori_loop(0, ROUNDS, turn, arrays),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    program, arrays = jax.jit(mapped), [np.ones(max(1, size // 4), np.float32) for size in sizes]

    def call(n: int) -> int:
        for _ in range(n):
            jax.block_until_ready(program(arrays))
        return n

    return call


def _sebulba(
    preset: str, lanes: int, devices: list[Any], request: dict[str, Any], processes: Processes
) -> dict[str, Any]:
    settings = sebulba.PRESETS[OF_SEBULBA[preset]]
    source: Any = environments.make(settings.env, num_threads=settings.num_threads)
    agent = make_agent("vtrace", source, settings.config)
    layout = topology.make_host(
        num_envs=lanes,
        envs_per_actor=lanes,
        num_shards=request["shards"],
        replicas=request["replicas"],
        actor_devices=max(1, len(devices) // processes.count // 2),  # so many learners divide the shards
        devices=devices,
    )
    driver = Sebulba(agent, source, layout, RunConfig(), agent.hyper)
    driver.compile(driver.init())
    training = sebulba.Training(driver, layout)
    try:
        seconds = _seconds(lambda n: training(n) and n, request["seconds"], processes)
        waiting = training.stages.get("pod/wait_share")
        jitter = _jitter(training)
    finally:
        training.actor_pool.__exit__()
    rows = driver.rollout_length * layout.envs_per_actor * layout.replicas
    return {"update_seconds": seconds, "jitter": jitter, "rows": rows, "wait_share": waiting}


def _jitter(call: Callable[[int], int]) -> float:
    """The standard deviation of an update's time, relative to its mean; all processes time as many."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call(1)
        times.append(time.perf_counter() - start)
    return statistics.pstdev(times) / statistics.mean(times)


def _seconds(call: Callable[[int], int], seconds: float, processes: Processes) -> float:
    """The seconds of one repetition; `call` does n of them and returns how many. All processes do as many as process
    0."""
    call(1)
    n, elapsed = 1, 0.0
    while processes.broadcast(elapsed < seconds / 4):
        n = processes.broadcast(2 * n)
        start = time.perf_counter()
        call(n)
        elapsed = time.perf_counter() - start
    n = processes.broadcast(max(1, round(n * seconds / max(elapsed, 1e-9))))
    start = time.perf_counter()
    done = call(n)
    return (time.perf_counter() - start) / done


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))  # a process of `_launch`
    else:
        sys.exit(script.run("scaling", ScalingArguments, main))
