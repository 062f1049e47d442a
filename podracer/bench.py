"""`podracer bench`: speed measured in one run, next to a hand-written yardstick, with the floor it is judged by."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

import envs_jax
from podracer import config as configs
from podracer import ops, spaces, topology
from podracer.anakin import program, runner
from podracer.experiment import make_agent
from podracer.types import Agent, Environment
from podracer.version import __version__

YARDSTICKS = {"ppo": "plain_ppo.py", "vtrace": "plain_vtrace.py"}
"""Minimal single-file loops under `benchmarks/` of a source checkout: `make(num_envs, num_steps, updates_per_call)`."""

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {
        "rollout_length": 32,
        "num_epochs": 4,
        "num_minibatches": 4,
        "hidden_sizes": (64, 64),
        "learning_rate": 2.5e-4,
        "learning_rate_decay": False,
        "value_clip_epsilon": 0.2,
        "normalize_rewards": False,
    },
    "vtrace": {
        "rollout_length": 20,
        "hidden_sizes": (64, 64),
        "optimizer": "rmsprop",
        "optimizer_eps": 0.01,
        "learning_rate": 6e-4,
        "learning_rate_decay": False,
        "max_grad_norm": 40.0,
        "loss_reduction": "sum",
    },
}
"""Agent settings that the yardsticks have too."""

YARDSTICK_ENVS = {"ppo": "cartpole", "vtrace": "catch"}


@dataclasses.dataclass(frozen=True)
class AnakinArguments:
    """Measure Anakin.

    Attributes:
      agents: which agents, each on the environment of its yardstick.
      num_envs: environment lanes to measure with.
      devices: how many devices to measure with; all local ones if None.
      repeats: measurements of each thing, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    agents: tuple[str, ...] = ("ppo", "vtrace")
    num_envs: tuple[int, ...] = configs.field((1024,), low=1)
    devices: tuple[int, ...] | None = configs.field(None, low=1)
    repeats: int = configs.field(7, low=1)
    seconds: float = configs.field(1.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)
        if self.devices and max(self.devices) > len(jax.local_devices()):
            raise ValueError(f"devices={self.devices}: this machine has {len(jax.local_devices())}.")
        for agent in self.agents:
            if agent not in YARDSTICKS:
                raise ValueError(f"unknown agent {agent!r}; {configs.suggest(agent, YARDSTICKS)}")


Measured = Callable[[int], int]
"""Does n repetitions of something and waits for them; returns rows done."""


def main(arguments: AnakinArguments) -> int:
    """Measures, prints a table, writes JSON."""
    results = []
    for name in arguments.agents:
        for devices in arguments.devices or (len(jax.local_devices()),):
            for num_envs in arguments.num_envs:
                what = f"{name} with {num_envs} environments on {devices} device(s)"
                print(f"measuring {what} ...", file=sys.stderr, flush=True)
                results.append(measure(name, num_envs, devices, arguments.repeats, arguments.seconds))
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    print(_table(results))
    print("rows/s (a row is one step of one lane, resets included), medians; ratio is training over the plain loop.")
    for r in results:
        print(f"{r['agent']}: {r['transitions_share']:.1%} of its rows are real transitions, the rest resets.")
    if arguments.json:
        report = {
            "podracer": __version__,
            "jax": jax.__version__,
            "machine": describe_machine(),
            "commit": commit(),
            "versions": versions(),
            "command": "podracer bench anakin",
            "settings": configs.to_json(arguments) | {"json": None},
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
        print(f"wrote {arguments.json}")
    return 0


def _table(results: list[dict[str, Any]]) -> str:
    header = ["agent", "env", "envs", "devices", "environment", "acting", "training", "plain loop", "ratio"]
    lines = [[*header, "compile s", "memory MiB"]]
    for r in results:
        rates = [f"{r[key]:,.0f}" if r[key] else "-" for key in ("environment", "acting", "training", "yardstick")]
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else "-"
        memory = f"{r['memory_bytes'] / 2**20:,.0f}" if r["memory_bytes"] else "-"
        lines.append([r["agent"], r["env"], str(r["num_envs"]), str(r["devices"]), *rates, ratio])
        lines[-1] += [f"{r['compile_seconds']:.1f}", memory]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def measure(name: str, num_envs: int, devices: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Rates of one agent on its yardstick's environment, everything measured in turns."""
    environment = envs_jax.make(YARDSTICK_ENVS[name])
    agent = make_agent(name, environment, PRESETS[name])
    layout = topology.make(num_envs=num_envs, envs_per_device=num_envs, devices=jax.local_devices()[:devices])
    T = agent.config.rollout_length
    training = _trainer(agent, environment, layout, T)
    measured: dict[str, Measured] = {
        "environment": _environment_only(agent, environment, layout, T),
        "acting": _acting_only(agent, environment, layout, T),
        "training": training,
    }
    yardstick = _yardstick(name, num_envs, T)
    if yardstick:
        measured["yardstick"] = yardstick
    rates = _in_turns(measured, repeats, seconds)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    pairs = [a / b for a, b in zip(rates["training"], rates.get("yardstick", []))]
    return {
        "agent": name,
        "env": environment.spec.name,
        "num_envs": num_envs,
        "rollout_length": T,
        "devices": layout.num_devices,
        "environment": medians["environment"],
        "acting": medians["acting"],
        "training": medians["training"],
        "training_transitions": medians["training"] * training.transitions_share,
        "yardstick": medians.get("yardstick"),
        "ratio": statistics.median(pairs) if pairs else None,
        "ratio_range": [min(pairs), max(pairs)] if pairs else None,
        "transitions_share": training.transitions_share,
        "compile_seconds": training.compiled.seconds,
        "memory_bytes": training.compiled.memory,
        "rates": rates,
    }


def _in_turns(measured: dict[str, Measured], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Interleaves measurements, so that a machine that slows down does so for all of them."""
    sizes = {}
    for key, call in measured.items():
        call(1)
        n, elapsed = 1, 0.0
        while elapsed < seconds / 4:
            n *= 2
            start = time.perf_counter()
            call(n)
            elapsed = time.perf_counter() - start
        sizes[key] = max(1, int(n * seconds / elapsed))
    rates: dict[str, list[float]] = {key: [] for key in measured}
    for _ in range(repeats):
        for key, call in measured.items():
            start = time.perf_counter()
            rows = call(sizes[key])
            rates[key].append(rows / (time.perf_counter() - start))
    return rates


class _Training:
    """The whole program; n updates in one call."""

    def __init__(self, compiled: runner.Compiled, state: program.RunState, rows_per_update: int):
        self.compiled = compiled
        self._state, self._rows = state, rows_per_update
        self._updates = 0

    def __call__(self, n: int) -> int:
        self._state, report = self.compiled.call(self._state, program.Limits.of(2**50, 2**50, n))
        jax.block_until_ready(report)
        self._updates += n
        return n * self._rows

    @property
    def transitions_share(self) -> float:
        """Real transitions per row, so far."""
        return int(runner.counter_values(self._state.env_steps)[0]) / (self._updates * self._rows)


def _environment_only(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> Measured:
    """The same rollouts with uniformly random actions instead of a policy."""
    space = environment.spec.action_space

    def act(params: Any, memory: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
        B = timestep.reward.shape[0]
        if isinstance(space, spaces.Discrete):
            return jnp.floor(jax.random.uniform(key, (B,)) * space.num_values).astype(jnp.int32), {}, memory
        return jax.vmap(space.sample)(jax.random.split(key, B)), {}, memory  # type: ignore[union-attr]

    idle = agent._replace(act=act, learn=_learn_nothing, start=lambda lanes, num_lanes: ())
    return _trainer(idle, environment, layout, T)


def _acting_only(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> Measured:
    """Rollouts into a trajectory as training does them, without learning."""
    return _trainer(agent._replace(learn=_learn_nothing), environment, layout, T)


def _trainer(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> _Training:
    anakin = program.make(agent, environment, layout, program.Settings(T))
    hyper = {k: jnp.full((1,), v, jnp.float32) for k, v in agent.hyper.items()}
    state = anakin.init(jnp.zeros(1, jnp.int32), hyper)
    compiled = runner.compile_step(anakin, state)
    return _Training(compiled, state, T * layout.num_envs)


def _learn_nothing(learner: Any, trajectory: Any, progress: jax.Array, key: jax.Array) -> Any:
    # Every part of the trajectory is read, or the compiler would not make it.
    total = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(trajectory._replace(actor_state=())))
    return learner, {"sum": ops.global_sum(total)}


def _yardstick(name: str, num_envs: int, T: int) -> Measured | None:
    path = pathlib.Path(__file__).parent.parent / "benchmarks" / YARDSTICKS[name]
    if not path.exists():
        print(f"no yardstick: {path} is only in a source checkout.", file=sys.stderr)
        return None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    updates = 4
    init, step = module.make(num_envs=num_envs, num_steps=T, updates_per_call=updates)
    holder = [init(jax.random.key(0))]

    def call(n: int) -> int:
        for _ in range(n):
            holder[0], metrics = step(holder[0])
        jax.block_until_ready((holder[0], metrics))
        return n * updates * T * num_envs

    return call


def describe_machine() -> str:
    """Device and processor, for tables and files."""
    device = jax.local_devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        name = _cpu_model() or platform.machine()
    count, cores = len(jax.local_devices()), os.cpu_count()
    return f"{count} x {device.platform} ({name}, {cores} cores), Python {platform.python_version()}"


def _cpu_model() -> str | None:
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return None
    lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else None


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}


def commit() -> str | None:
    """The checkout's commit, with `-dirty` where anything but results has changed; None outside one."""
    root = pathlib.Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return (f"{name}-dirty" if changed else name) or None
