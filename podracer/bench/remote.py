"""`podracer bench remote`: environments that workers step over the loopback, beside the same ones in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from podracer import config as configs
from podracer import environments, spaces, topology
from podracer.bench.measure import describe_machine, in_turns, table, write
from podracer.bench.sebulba import PRESETS, Acting
from podracer.run.experiment import make_agent
from podracer.sebulba.driver import Sebulba
from podracer.types import EnvSpec, HostStep
from podracer.version import __version__

LANES = 64
BLOCKS = (8, 32, 64, 256)
STREAMS = (1, 8)
DEMANDS = (10_000, 50_000, 100_000, 400_000, 1_000_000)
"""Rows a second of which the arithmetic is done."""

NETWORKS = (1, 10, 25, 100, 400)
"""Gbit/s of Ethernet, of which nine tenths carry rows."""


WIRE = {
    "latency": f"ms from actions to rows, {LANES} lanes of an environment that does nothing",
    "messages": "messages/s there and back",
    "blocks": "rows/s by lanes of a block",
    "ways": "rows/s by how both are connected",
}


@dataclasses.dataclass(frozen=True)
class RemoteArguments:
    """Measure remote environments with V-trace.

    Attributes:
      parts: what to measure: actors, environments without a policy, messages.
      repeats: measurements of each thing, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    parts: tuple[Literal["acting", "alone", "wire"], ...] = ("acting", "alone", "wire")
    repeats: int = configs.field(7, low=1)
    seconds: float = configs.field(2.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)


def main(arguments: RemoteArguments) -> int:
    """Measures, prints tables, writes JSON."""
    say = lambda line: print(f"measuring {line} ...", file=sys.stderr, flush=True)  # noqa: E731
    results: dict[str, Any] = {}
    if "acting" in arguments.parts:
        for preset, actors in (("cartpole", 1), ("cartpole", 2), ("pong", 1)):
            name = preset if actors == 1 else f"{preset}, {actors} actors"
            say(f"{name}, acting")
            results[f"{name}, acting"] = acting(preset, actors, arguments)
    if "alone" in arguments.parts:
        for preset in ("cartpole", "pong"):
            say(f"{preset}, environment alone")
            results[f"{preset}, alone"] = alone(preset, arguments)
    header = ["rows/s, medians", "local", "remote", "remote/local", "range", "bytes up", "bytes down"]
    lines = [header, *(_line(name, result) for name, result in results.items())]
    wire: dict[str, dict[str, float]] = {}
    if "wire" in arguments.parts:
        for name, measure in (("latency", latency), ("messages", messages), ("blocks", blocks), ("ways", ways)):
            say(name)
            wire[name] = measure(arguments)

    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    print(table(lines))
    for name, values in wire.items():
        print(f"{WIRE[name]}: " + ", ".join(f"{key} {value:,.6g}" for key, value in values.items()))
    results |= wire
    if "alone" in arguments.parts:
        results["arithmetic"] = arithmetic(results["pong, alone"])
        header = ["Pong rows/s", "Gbit/s", "Ethernet", "cores of the learner", "cores of workers"]
        print(table([header, *results["arithmetic"]]))
    if arguments.json:
        write(arguments.json, "podracer bench remote", arguments, results)
    return 0


def _line(name: str, result: dict[str, Any]) -> list[str]:
    low, high = result["ratio_range"]
    rates = [f"{result[key]:,.0f}" for key in ("local", "remote")]
    ratios = [f"{result['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
    return [name, *rates, *ratios, f"{result['bytes_up']:,.1f}", f"{result['bytes_down']:,.1f}"]


# Workers


class Still:
    """Host environments that do nothing, with rows as large as CartPole's."""

    spec = EnvSpec("still", spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2))

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> _StillLanes:
        return _StillLanes(num_lanes)


class _StillLanes:
    spec = Still.spec

    def __init__(self, num_lanes: int):
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._first = True

    def recv(self) -> tuple[np.ndarray, HostStep]:
        rows = HostStep.zeros(self.spec, len(self._lanes))
        rows.scalars[1], rows.scalars[2] = 1.0, self._first
        return self._lanes, rows

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._first = False

    def close(self) -> None:
        pass


def _serve(environment: str, where: str, lanes: int, options: dict[str, Any], connection: dict[str, Any]) -> None:
    """A worker process."""
    from podracer.remote import worker

    source: Any = Still() if environment == "still" else environment
    with contextlib.suppress(worker.LearnerError):
        worker.serve_envs(source, where, lanes=lanes, env_options=options or None, quiet=True, **connection)


@contextlib.contextmanager
def fleet(
    environment: str,
    processes: int = 1,
    lanes: int = LANES,
    options: dict[str, Any] | None = None,
    connection: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """Remote environments with worker processes, for as long as the context is open."""
    from podracer.remote.environments import RemoteEnvironments
    from podracer.remote.session_pb2 import Goodbye
    from podracer.remote.settings import Remote

    local: Any = Still() if environment == "still" else environments.make(environment, **(options or {}))
    remote = Remote(**({"listen": "127.0.0.1:0", "block": lanes} | settings))
    made = RemoteEnvironments(environment, local, None, remote, answer_timeout=60.0, strict=False)
    context = multiprocessing.get_context("spawn")
    arguments = (environment, made.where, lanes, options or {}, connection or {})
    children = [context.Process(target=_serve, args=arguments, daemon=True) for _ in range(processes)]
    try:
        for child in children:
            child.start()
        yield made
    finally:
        made.close(Goodbye.FINISHED)
        for child in children:
            child.join(10.0)
            child.kill()


# What is measured


def acting(name: str, actors: int, arguments: RemoteArguments) -> dict[str, Any]:
    """Actors into trajectories, on environments here and at a worker."""
    preset = PRESETS[name]
    options = {"num_threads": preset.num_threads if actors == 1 else 1}
    local: Any = environments.make(preset.env, **options)
    agent = make_agent("vtrace", local, preset.config)
    layout = topology.make_host(
        num_envs=None, envs_per_actor=LANES, actor_threads=actors, devices=jax.local_devices()[:1]
    )
    with fleet(preset.env, actors, options=options) as remote:
        sources = {"local": local, "remote": remote}
        measured = {}
        for key, source in sources.items():
            driver = Sebulba(agent, source, layout, seed=0, hyper=agent.hyper)
            driver.compile(driver.init())
            measured[key] = Acting(driver, layout)
        try:
            return _compared(measured, remote, arguments)
        finally:
            for each in measured.values():
                each.crew.__exit__()


def alone(name: str, arguments: RemoteArguments) -> dict[str, Any]:
    """Environments without a policy, here and at a worker."""
    preset = PRESETS[name]
    options = {"num_threads": preset.num_threads}
    with fleet(preset.env, options=options) as remote:
        measured = {
            "local": Stepping(environments.make(preset.env, **options)),  # type: ignore[arg-type]
            "remote": Stepping(remote),
        }
        return _compared(measured, remote, arguments)


class Stepping:
    """n steps of all lanes with action 0."""

    def __init__(self, source: Any, lanes: int = LANES):
        self._environment, self._actions = source.make(lanes, 0), np.zeros(lanes, np.int32)
        self._environment.recv()
        self.cpu = 0.0

    def __call__(self, n: int) -> int:
        lanes = np.arange(len(self._actions), dtype=np.int32)
        before = time.process_time()
        for _ in range(n):
            self._environment.send(lanes, self._actions)
            self._environment.recv()
        self.cpu = (time.process_time() - before) / (n * len(lanes))
        return n * len(lanes)


def _compared(measured: dict[str, Any], remote: Any, arguments: RemoteArguments) -> dict[str, Any]:
    before = remote.metrics()
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    after = remote.metrics()
    rows = after["remote/rows"] - before["remote/rows"]
    ratios = [a / b for a, b in zip(rates["remote"], rates["local"])]
    return {
        **{key: statistics.median(values) for key, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "bytes_up": (after["remote/bytes_up"] - before["remote/bytes_up"]) / rows,
        "bytes_down": (after["remote/bytes_down"] - before["remote/bytes_down"]) / rows,
        "learner_cpu_us_per_row": 1e6 * getattr(measured["remote"], "cpu", np.nan),
        "rates": rates,
    }


def latency(arguments: RemoteArguments) -> dict[str, float]:
    """Milliseconds from `send` to the end of `recv`."""
    with fleet("still") as remote:
        environment = remote.make(LANES, 0)
        lanes, _ = environment.recv()
        actions, times = np.zeros(LANES, np.int32), []
        until = time.perf_counter() + arguments.seconds * arguments.repeats
        while (begin := time.perf_counter()) < until:
            environment.send(lanes, actions)
            environment.recv()
            times.append(time.perf_counter() - begin)
    settled = 1e3 * np.asarray(times[len(times) // 10 :])
    return {"p50": float(np.percentile(settled, 50)), "p99": float(np.percentile(settled, 99))}


def messages(arguments: RemoteArguments) -> dict[str, float]:
    """Rows and actions of one lane each, by streams, and what the hub alone could do."""
    found = {}
    for streams in STREAMS:
        with fleet("still", streams, lanes=1) as remote:
            made = [Stepping(remote, 1) for _ in range(streams)]
            found[f"{streams} stream{'s'[: streams > 1]}"] = _together(made, arguments)
    from podracer.remote import session_pb2 as pb
    from podracer.remote import wire
    from podracer.remote.blocks import Patience, Session
    from podracer.remote.hub import Hub

    layout = wire.Layout(Still.spec)
    hub = Hub(layout, Patience(), say=lambda line: None)
    pool = hub.open_pool(LANES, LANES, 0)
    session = Session("alone", LANES, lambda data: None, lambda why: None)
    hub.join(session)
    rows = HostStep.zeros(Still.spec, LANES)
    rows.scalars[1] = 1.0
    later = memoryview(b"".join(layout.pack_rows(rows)))
    rows.scalars[2] = 1.0
    payload, actions, step = memoryview(b"".join(layout.pack_rows(rows))), np.zeros(LANES, np.int32), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < arguments.seconds:
        for _ in range(100):
            hub.rows(session, pb.Rows(block=0, step=step), payload)
            hub.take(pool)
            hub.act(pool, (0,), lambda start, end: layout.pack_actions(actions[start:end]))
            payload, step = later, step + 1
    found["the hub alone"] = step / (time.perf_counter() - begin)
    return found


def blocks(arguments: RemoteArguments) -> dict[str, float]:
    """Rows a second of one stream by the lanes of a message."""
    found = {}
    for lanes in BLOCKS:
        with fleet("still", lanes=lanes) as remote:
            found[str(lanes)] = _together([Stepping(remote, lanes)], arguments)
    return found


def ways(arguments: RemoteArguments) -> dict[str, float]:
    """Rows a second of CartPole's size by how the two are connected."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        choices: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "TCP": ({}, {}),
            "unix": ({"listen": f"unix:{folder}/socket"}, {}),
        }
        if encrypted := _certificates(pathlib.Path(folder)):
            choices["TLS"] = encrypted
        for name, (settings, connection) in choices.items():
            with fleet("still", connection=connection, **settings) as remote:
                found[name] = _together([Stepping(remote)], arguments)
    return found


def _certificates(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Settings of both sides that encrypt, or None where `trustme` is not installed."""
    try:
        import trustme
    except ImportError:
        print("TLS is not measured: that needs the package trustme.", file=sys.stderr)
        return None
    authority = trustme.CA()
    server = authority.issue_cert("localhost")
    paths = {name: str(folder / name) for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    server.cert_chain_pems[0].write_to_path(paths["cert"])
    server.private_key_pem.write_to_path(paths["key"])
    return {"tls_cert": paths["cert"], "tls_key": paths["key"]}, {"tls_ca": paths["ca"], "tls_name": "localhost"}


def _together(made: list[Stepping], arguments: RemoteArguments) -> float:
    """Rows a second of all, each in a thread of its own; the median."""
    rates, number = [], 1
    while True:
        threads = [threading.Thread(target=each, args=(number,)) for each in made]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if seconds < arguments.seconds / 4:
            number *= 2
            continue
        rates.append(number * sum(len(each._actions) for each in made) / seconds)
        if len(rates) == arguments.repeats:
            return statistics.median(rates)


def arithmetic(pong: dict[str, Any]) -> list[list[str]]:
    """What so many rows of Pong a second need, of networks and of cores.

    From what was measured: bytes a row; the learner's processor time to take a row in; rows a second of two cores.
    """
    lines = []
    for rows in DEMANDS:
        gigabits = rows * 8 * pong["bytes_up"] / 1e9
        network = next((f"{g} GbE" for g in NETWORKS if 0.9 * g >= gigabits), "-")
        learner = rows * pong["learner_cpu_us_per_row"] * 1e-6
        workers = rows / (pong["local"] / 2)
        lines.append([f"{rows:,}", f"{gigabits:.2f}", network, f"{learner:.1f}", f"{workers:.0f}"])
    return lines
