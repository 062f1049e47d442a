"""`python benchmarks/remote.py`: environments at workers over the loopback, beside the same ones in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
import remote_plan as plan
import remote_workers as workers
import script
import tyro

from podracer import configs, environments, topology
from podracer.agents.registry import make_agent
from podracer.bench.measure import Measured, describe_machine, in_turns, table, write
from podracer.bench.sebulba import PRESETS, Acting
from podracer.run.config import RunConfig
from podracer.sebulba.driver import Sebulba
from podracer.types import HostStep
from podracer.version import __version__

LANES = 64
FRAME = 16 * 1024  # bytes of HTTP/2's
BLOCKS = (8, 32, 64, 256)
STREAMS = (1, 8)
WIRE = {
    "latency": f"ms from actions to rows, {LANES} lanes of an environment that does nothing",
    "messages": "messages/s there and back",
    "blocks": "rows/s by lanes of a block",
    "ways": "rows/s by how both are connected",
    "ratios of ways": "of rows/s with TCP, in turns",
    "where": f"microseconds of a round trip of {LANES} lanes, and where they go",
}


@dataclasses.dataclass(frozen=True)
class RemoteArguments:
    """Measure remote environments with V-trace.

    Attributes:
      parts: parts to measure: actors, environments without a policy, messages.
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
    header = ["rows/s, medians", "local", "remote", "ratio", "range", "us a row", "loop", "bytes up", "down"]
    lines = [header, *(_line(name, result) for name, result in results.items())]
    if "wire" in arguments.parts:
        for name, measure in (("latency", latency), ("messages", messages), ("blocks", blocks), ("ways", ways)):
            say(name)
            results[name] = measure(arguments)
        results["where"] = results["latency"].pop("where")
        results["ratios of ways"] = results["ways"].pop("ratios")
    results["arithmetic"] = plan.arithmetic(results)

    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    print(table([["", "measured", "target", "met"], *plan.beside_targets(results)]))
    print(table(lines))
    for name, words in WIRE.items():
        if name in results:
            print(f"{words}: " + ", ".join(f"{key} {plan.figure(value)}" for key, value in results[name].items()))
    for rows in results["arithmetic"].values():
        print(table(rows))
    if arguments.json:
        write(arguments.json, "python benchmarks/remote.py", arguments, results)
    return 0


def _line(name: str, result: dict[str, Any]) -> list[str]:
    low, high = result["ratio_range"]
    rates = [f"{result[key]:,.0f}" for key in ("local", "remote")]
    ratios = [f"{result['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
    cells = [f"{result[key]:.2f}" for key in ("learner_cpu_us_per_row", "loop_busy")]
    return [name, *rates, *ratios, *cells, f"{result['bytes_up']:,.1f}", f"{result['bytes_down']:,.1f}"]


# Workers


@contextlib.contextmanager
def fleet(
    environment: str,
    processes: int = 1,
    lanes: int | None = None,
    options: dict[str, Any] | None = None,
    connection: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """A context with remote environments and their worker processes."""
    from podracer.remote.environments import RemoteEnvironments
    from podracer.remote.session_pb2 import Goodbye
    from podracer.remote.settings import Remote

    lanes = lanes or LANES
    local: Any = workers.Still() if environment == "still" else environments.make(environment, **(options or {}))
    remote = Remote(**({"listen": "127.0.0.1:0", "block": lanes} | settings))
    made = RemoteEnvironments(environment, local, None, remote, answer_timeout=60.0, strict=False)
    context = multiprocessing.get_context("spawn")
    arguments = (environment, made.where, lanes, options or {}, connection or {})
    children = [context.Process(target=workers.serve, args=arguments, daemon=True) for _ in range(processes)]
    try:
        for child in children:
            child.start()
        made.workers = [child.pid for child in children]  # type: ignore[attr-defined]
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
            driver = Sebulba(agent, source, layout, RunConfig(), agent.hyper)
            driver.compile(driver.init())
            measured[key] = Acting(driver, layout)
        try:
            return _compare(measured, remote, arguments)
        finally:
            for each in measured.values():
                each.actor_pool.__exit__()


def alone(name: str, arguments: RemoteArguments) -> dict[str, Any]:
    """Environments without a policy, here and at a worker."""
    preset = PRESETS[name]
    options = {"num_threads": preset.num_threads}
    with fleet(preset.env, options=options) as remote:
        measured = {
            "local": Stepping(environments.make(preset.env, **options)),  # type: ignore[arg-type]
            "remote": Stepping(remote),
        }
        return _compare(measured, remote, arguments)


class Stepping:
    """n steps of all lanes with action 0."""

    def __init__(self, source: Any, lanes: int | None = None):
        lanes = lanes or LANES
        self._environment, self._actions = source.make(lanes, 0), np.zeros(lanes, np.int32)
        self._environment.recv()

    def __call__(self, n: int) -> int:
        lanes = np.arange(len(self._actions), dtype=np.int32)
        for _ in range(n):
            self._environment.send(lanes, self._actions)
            self._environment.recv()
        return n * len(lanes)


class Together:
    """n steps of several environments, each in a thread of its own."""

    def __init__(self, made: list[Stepping]):
        self._made = made

    def __call__(self, n: int) -> int:
        with concurrent.futures.ThreadPoolExecutor(len(self._made)) as pool:
            return sum(pool.map(lambda each: each(n), self._made))


class Metered:
    """A measurement, with this process's processor time a row, and the busy fraction of the loop of remote
    environments."""

    def __init__(self, measured: Any, remote: Any):
        self._measured, self._remote = measured, remote
        self.prepare = getattr(measured, "prepare", lambda: None)
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def __call__(self, n: int) -> int:
        before = time.process_time()
        rows = self._measured(n)
        self.seconds.append((time.process_time() - before) / rows)
        self.busy.append(self._remote.metrics()["remote/loop_busy"])
        return rows


def _compare(measured: dict[str, Any], remote: Any, arguments: RemoteArguments) -> dict[str, Any]:
    from podracer.remote import session_pb2 as pb
    from podracer.remote import wire

    metered = {key: Metered(each, remote) for key, each in measured.items()}
    before = remote.metrics()
    rates = in_turns(metered, arguments.repeats, arguments.seconds)
    after = remote.metrics()
    rows = after["remote/rows"] - before["remote/rows"]
    up = (after["remote/bytes_up"] - before["remote/bytes_up"]) / rows
    size = len(wire.pack(pb.FromWorker(rows=pb.Rows(block=1, step=2**20, env_us=2**14)), [bytes(round(up * LANES))]))
    ratios = [a / b for a, b in zip(rates["remote"], rates["local"])]
    newest = lambda values: statistics.median(values[-arguments.repeats :])  # noqa: E731
    return {
        **{key: statistics.median(values) for key, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "bytes_up": up,
        "bytes_down": (after["remote/bytes_down"] - before["remote/bytes_down"]) / rows,
        "wire_ratio": (size + 5 + 9 * -(-size // FRAME)) / (up * LANES),  # with what gRPC and HTTP/2 put in front
        "learner_cpu_us_per_row": 1e6 * newest(metered["remote"].seconds),
        "local_cpu_us_per_row": 1e6 * newest(metered["local"].seconds),
        "loop_busy": newest(metered["remote"].busy),
        "rates": rates,
    }


def latency(arguments: RemoteArguments) -> dict[str, Any]:
    """Milliseconds from `send` to the end of `recv`, without the environment's own, and their parts."""
    with fleet("still") as remote:
        environment = remote.make(LANES, 0)
        lanes, _ = environment.recv()
        actions, times, busy = np.zeros(LANES, np.int32), [], []
        before, learner, worker = remote.metrics(), time.process_time(), _processor_time(remote.workers[0])
        until = time.perf_counter() + arguments.seconds * arguments.repeats
        while (begin := time.perf_counter()) < until:
            environment.send(lanes, actions)
            environment.recv()
            times.append(time.perf_counter() - begin)
            if len(times) % 256 == 0:
                busy.append(remote.metrics()["remote/loop_busy"])
        after, learner = remote.metrics(), time.process_time() - learner
        worker = _processor_time(remote.workers[0]) - worker
        spent = (after["remote/env_seconds"] - before["remote/env_seconds"]) / len(times)
    settled = 1e3 * (np.asarray(times[len(times) // 10 :]) - spent)
    whole = 1e6 * float(np.mean(times))
    loop = whole * statistics.median(busy or [0.0])
    actor, worker_time = 1e6 * learner / len(times) - loop, 1e6 * worker / len(times)
    where = {
        **{"whole": whole, "learner's loop": loop, "learner's actor and gRPC's threads": actor, "worker": worker_time},
        "waking, waiting, kernel": whole - loop - actor - worker_time,
    }
    return {"p50": float(np.percentile(settled, 50)), "p99": float(np.percentile(settled, 99)), "where": where}


def _processor_time(pid: int) -> float:
    """The processor time of another process, in seconds."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def messages(arguments: RemoteArguments) -> dict[str, float]:
    """Messages a second with rows and actions of one lane each, by number of streams, and of the hub alone."""
    with contextlib.ExitStack() as stack:
        measured: dict[str, Any] = {"the hub alone": _hub_alone()}
        for streams in STREAMS:
            remote = stack.enter_context(fleet("still", streams, lanes=1))
            made = [Stepping(remote, 1) for _ in range(streams)]
            measured[f"{streams} stream{'s'[: streams > 1]}"] = Together(made)
        return _medians(measured, arguments)


def _hub_alone() -> Measured:
    """n rows into a hub and actions out of it, without a wire."""
    from podracer.remote import session_pb2 as pb
    from podracer.remote import wire
    from podracer.remote.blocks import Timeouts, WorkerSession
    from podracer.remote.hub import Hub

    layout = wire.Layout(workers.Still.spec)
    hub = Hub(layout, Timeouts(), say=lambda line: None)
    pool = hub.open_pool(LANES, LANES, 0)
    session = WorkerSession("alone", LANES, lambda data: None, lambda why: None)
    hub.join(session)
    rows = HostStep.zeros(workers.Still.spec, LANES)
    rows.scalars[1] = 1.0
    later = memoryview(b"".join(layout.pack_rows(rows)))
    rows.scalars[2] = 1.0
    payload, actions, step = memoryview(b"".join(layout.pack_rows(rows))), np.zeros(LANES, np.int32), 0

    def play(n: int) -> int:
        nonlocal payload, step
        for _ in range(n):
            hub.rows(session, pb.Rows(block=0, step=step), payload)
            hub.take(pool)
            hub.act(pool, (0,), lambda start, end: layout.pack_actions(actions[start:end]))
            payload, step = later, step + 1
        return n

    return play


def blocks(arguments: RemoteArguments) -> dict[str, float]:
    """Rows a second of one stream, by the lanes of a message."""
    with contextlib.ExitStack() as stack:
        fleets = {lanes: stack.enter_context(fleet("still", lanes=lanes)) for lanes in BLOCKS}
        return _medians({str(lanes): Stepping(remote, lanes) for lanes, remote in fleets.items()}, arguments)


def ways(arguments: RemoteArguments) -> dict[str, Any]:
    """Rows a second of CartPole's size by the kind of connection, and their ratios to TCP."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        choices: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "TCP": ({}, {}),
            "unix": ({"listen": f"unix:{folder}/socket"}, {}),
        }
        if encrypted := _certificates(pathlib.Path(folder)):
            choices["TLS"] = encrypted
        measured = {
            name: Stepping(stack.enter_context(fleet("still", connection=connection, **settings)))
            for name, (settings, connection) in choices.items()
        }
        rates = in_turns(measured, arguments.repeats, arguments.seconds)  # type: ignore[arg-type]
    beside = {n: [a / b for a, b in zip(values, rates["TCP"])] for n, values in rates.items() if n != "TCP"}
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    return medians | {"ratios": {name: statistics.median(values) for name, values in beside.items()}}


def _medians(measured: dict[str, Measured], arguments: RemoteArguments) -> dict[str, float]:
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    return {name: statistics.median(values) for name, values in rates.items()}


def _certificates(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Settings of both sides for encryption, or None if `trustme` is not installed."""
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


if __name__ == "__main__":
    sys.exit(script.run("remote", RemoteArguments, main))
