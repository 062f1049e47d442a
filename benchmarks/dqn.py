"""`python benchmarks/dqn.py`: table 1 of fast DQN (Daley and Amato 2021) as a grid, beside the prediction of a model.

    standard        W threads of one lane each, mode="serial": no update runs while a lane acts concurrent      W
    threads of one lane each, mode="lockstep": a period is learnt from while the next is acted synchronised    one
    thread of W lanes, one batched inference a round, mode="serial" both            one thread of W lanes,
    mode="lockstep"

With S_W seconds of acting and R seconds of learning for a row, each measured alone, a row should take S_W + R, and
max(S_W, R) where they run side by side. In the paper, R / S_1 is 4.44 / 20.64 hours.

Beside it is the ratio of an update's time on images to that of its gradients and forward passes, each measured alone.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import script
import tyro
from paced import Paced

from podracer import configs, environments, nets, spaces, topology
from podracer.agents.registry import make_agent
from podracer.bench.measure import describe_machine, in_turns, table, write
from podracer.bench.sebulba import Acting
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba.driver import Sebulba
from podracer.types import Agent, EnvSpec
from podracer.version import __version__

LEARNING_OVER_SAMPLING = 4.44 / 20.64
"""R / S_1 in the paper (table 1: hours of one thread with and without concurrency)."""

CORES = 8
"""Lanes of an emulator that the paper's processor steps at a time."""

KINDS = {
    "standard": ("threads", "serial"),
    "concurrent": ("threads", "lockstep"),
    "synchronised": ("lanes", "serial"),
    "both": ("lanes", "lockstep"),
}
"""The kinds of loops: the way W lanes are acted for, and the order of acting and learning."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting to measure: an environment and the agent's settings; `paced` lanes wait instead of computing."""

    env: str
    config: Mapping[str, Any]
    paced: bool

    @property
    def rows_per_update(self) -> int:
        """Rows acted for an update."""
        return int(self.config["batch_size"] / self.config["replay_ratio"])

    @property
    def target_rows(self) -> int:
        """Rows acted between copies to the target network, those of a rollout of all lanes."""
        return self.config["target_interval"] * self.rows_per_update


_COMMON = {
    "replay_capacity": 20_000,
    "replay_min_size": 40,
    "epsilon_start": 0.1,
    "epsilon_final": 0.1,
}
_IMAGES = {"batch_size": 32, "n_step": 3, "torso": "shallow", "frame_stack": 4, "clip_rewards": True}
SETTINGS = {
    # Batches so large that what a row costs beside its wait, and a rollout beside its updates, is little.
    "paced": Setting(
        "envpool:Catch-v0",
        _COMMON | {"target_interval": 10, "batch_size": 4096, "replay_ratio": 1024.0, "hidden_sizes": (256, 256)},
        True,
    ),
    "pong": Setting("envpool:Pong-v5", _COMMON | _IMAGES | {"target_interval": 100, "replay_ratio": 8.0}, False),
}


@dataclasses.dataclass(frozen=True)
class DQNArguments:
    """Measure the concurrency and the batched inference of fast DQN.

    Attributes:
      setting: "paced" lanes of catch wait for the time of the paper's R / S_1, eight at a time, without a core; "pong"
        computes.
      lanes: W, each a row of the grid.
      repeats: measurements of each cell, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    setting: Literal["paced", "pong"] = "paced"
    lanes: tuple[int, ...] = configs.field((1, 2, 4, 8), low=1)
    repeats: int = configs.field(3, low=1)
    seconds: float = configs.field(3.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)
        rows = SETTINGS[self.setting].target_rows
        for lanes in self.lanes:
            if rows % lanes:
                raise ValueError(f"lanes={lanes} must divide the {rows} rows between copies to the target network.")


class _Training:
    """A cell of the grid: acts, learns from and publishes n rollouts of every thread; returns rows."""

    def __init__(self, driver: Sebulba, threads: int, lanes: int):
        self._driver, self._threads = driver, threads
        self._rows = threads * lanes * driver.rollout_length
        state = driver.init()
        self._learner = driver.learner(state)
        self.actor_pool = driver.actor_pool(self._learner.learner, 0.0)
        self.actor_pool.__enter__()

    def prepare(self) -> None:
        """Consumes the rollouts from before the clock started: those in the queue, those in work, and the first after
        them."""
        self(3)

    def __call__(self, n: int) -> int:
        until = self._learner.rollouts + n * self._threads
        self._learner.run(
            self.actor_pool,
            RunHooks(
                next_milestone=lambda steps: 2**50,
                on_progress=lambda progress: None,
                on_milestone=lambda state, steps: None,
                should_stop=lambda: self._learner.rollouts >= until and not self._learner.pending,
            ),
            snapshot=self._driver.init,  # never called, for there is no milestone
        )
        return n * self._rows


class _Updates:
    """Does n updates on a full replay; returns updates."""

    def __init__(self, training: _Training):
        training(4)
        self._learner = training._learner

    def __call__(self, n: int) -> int:
        self._learner.pending = n
        self._learner.run_pending_updates(lambda: False)
        jax.block_until_ready(self._learner.learner)
        return n


class _Grid:
    """The cells of a setting, which share an agent for each number of lanes."""

    def __init__(self, setting: Setting):
        self.setting = setting
        source: Any = environments.make(setting.env, num_threads=1 if setting.paced else None)
        self.environments: Any = Paced(source, 0.0, CORES) if setting.paced else source

    def agent(self, lanes: int) -> Agent:
        """An agent whose rollouts have the rows between copies to the target network, over all lanes."""
        rollout_length = self.setting.target_rows // lanes
        return make_agent("dqn", self.environments, {**self.setting.config, "rollout_length": rollout_length})

    def driver(self, lanes: int, threads: int, mode: Any, agent: Agent) -> Sebulba:
        """A compiled driver with `lanes` for each thread."""
        layout = topology.make_host(
            num_envs=lanes * threads,
            envs_per_actor=lanes,
            actor_threads=threads,
            num_shards=1,
            devices=jax.local_devices()[:1],
        )
        driver = Sebulba(agent, self.environments, layout, RunConfig(mode=mode), agent.hyper)
        driver.compile(driver.init())
        return driver


def main(arguments: DQNArguments) -> int:
    """Measures, prints a table, writes JSON."""
    setting = SETTINGS[arguments.setting]
    grid = _Grid(setting)
    say = lambda what: print(f"{what} ...", file=sys.stderr, flush=True)  # noqa: E731
    say("measuring acting and learning alone")
    acting, update, updates = _measure_alone(grid, arguments)
    if setting.paced:
        grid.environments.seconds = update / setting.rows_per_update / LEARNING_OVER_SAMPLING - acting[1]
        if grid.environments.seconds <= 0:
            raise RuntimeError(
                f"acting takes {acting[1] * 1e3:.2f} ms and an update {update * 1e3:.2f} ms: lanes would have to wait "
                "for less than no time; use a quieter machine."
            )
    say("measuring an update on images, and what it consists of")
    arithmetic = _arithmetic(arguments)
    cells: dict[str, Any] = {}
    for W in arguments.lanes:
        agent = grid.agent(W)
        for kind, (how, mode) in KINDS.items():
            if W == 1 and how == "lanes":
                continue  # one thread of one lane is there already
            say(f"compiling {kind} with {W} lane(s)")
            lanes, threads = (1, W) if how == "threads" else (W, 1)
            cells[f"{kind} {W}"] = _Training(grid.driver(lanes, threads, mode, agent), threads, lanes)
    say("measuring the grid in turns")
    results = _measure(cells, updates, grid, acting, arguments)
    _show(results, arguments, acting, update, grid)
    parts = " and ".join(f"{arithmetic[x]} {x} at {arithmetic[f'{x}_per_second']:,.0f} rows/s" for x in _Passes.KINDS)
    share = f"{arithmetic['share']:.2f} of which are {parts}"
    print(f"an update on images takes {arithmetic['update_seconds'] * 1e3:.1f} ms, {share}.")
    if arguments.json:
        alone = {
            "acting_seconds": acting,
            "update_seconds": update,
            "pace_seconds": getattr(grid.environments, "seconds", 0),
            "waiting_at_a_time": CORES if setting.paced else None,
        }
        found = {"setting": setting, "alone": alone, "arithmetic": arithmetic, "cells": results}
        command = f"python benchmarks/dqn.py --setting {arguments.setting}"
        write(arguments.json, command, arguments, configs.to_json(found))
    return 0


def _arithmetic(arguments: DQNArguments) -> dict[str, Any]:
    """The time of an update on images, and the share of its necessary arithmetic.

    That is a gradient for each row of the batch, and the outputs of the network and its target for the next row.
    """
    grid = _Grid(SETTINGS["pong"])
    agent = grid.agent(1)
    config, spec = agent.config, nets.stacked_spec(grid.environments.spec, agent.config.frame_stack)
    network = nets.make_q(
        spec, torso=config.torso, head_size=config.head_size, dueling=config.dueling, init=config.init
    )
    training = _Training(grid.driver(1, 1, "serial", agent), 1, 1)
    passes = _Passes(network, spec, config.batch_size)
    measured: dict[str, Any] = {
        "update": _Updates(training),
        "gradients": passes.gradients,
        "forwards": passes.forwards,
    }
    try:
        rates = in_turns(measured, arguments.repeats, arguments.seconds)
    finally:
        training.actor_pool.__exit__()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    gradients, forwards = config.batch_size, 2 * config.batch_size  # with double Q-learning
    seconds = gradients / medians["gradients"] + forwards / medians["forwards"]
    return {
        "setting": grid.setting,
        "update_seconds": 1.0 / medians["update"],
        "gradients": gradients,
        "gradients_per_second": medians["gradients"],
        "forwards": forwards,
        "forwards_per_second": medians["forwards"],
        "seconds": seconds,
        "share": seconds * medians["update"],
    }


class _Passes:
    """Gradients and forward passes of a network on batches of random images; calls do n batches and return rows."""

    KINDS = ("gradients", "forwards")

    def __init__(self, network: nets.Network, spec: EnvSpec, batch: int):
        assert isinstance(spec.observation_space, spaces.Box)
        shape = (1, batch, *spec.observation_space.shape)
        images = jax.random.randint(jax.random.key(0), shape, 0, 256, np.uint8)
        rows = nets.Inputs(images, jnp.zeros(shape[:2]), jnp.zeros(shape[:2], bool), ())
        self._arguments, self._batch = (network.init(jax.random.key(1)), rows), batch
        outputs = lambda params, rows: network.apply(params, rows, ())[0]  # noqa: E731
        self._forward = jax.jit(outputs)
        self._gradient = jax.jit(jax.grad(lambda params, rows: jnp.sum(jnp.square(outputs(params, rows)))))

    def forwards(self, n: int) -> int:
        return self._do(self._forward, n)

    def gradients(self, n: int) -> int:
        return self._do(self._gradient, n)

    def _do(self, call: Any, n: int) -> int:
        for _ in range(n):
            jax.block_until_ready(call(*self._arguments))
        return n * self._batch


def _measure_alone(grid: _Grid, arguments: DQNArguments) -> tuple[dict[int, float], float, _Updates]:
    """Seconds of a round of acting by number of lanes, without waiting, and of an update; and the object that does
    updates."""
    measured: dict[str, Any] = {}
    for lanes in sorted({1, *arguments.lanes}):
        driver = grid.driver(lanes, 1, "async", grid.agent(lanes))
        measured[str(lanes)] = Acting(driver, driver._layout)
        if lanes == 1:
            training = _Training(driver, 1, 1)
            measured["update"] = _Updates(training)
            training.actor_pool.__exit__()
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    for name, call in measured.items():
        if name != "update":
            call.actor_pool.__exit__()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    update = 1.0 / medians.pop("update")
    return {int(lanes): int(lanes) / rate for lanes, rate in medians.items()}, update, measured["update"]


def _predict(grid: _Grid, acting: Mapping[int, float], update: float, lanes: tuple[int, ...]) -> dict[str, float]:
    """Rows per second of every cell, by the model."""
    wait, R = getattr(grid.environments, "seconds", 0.0), update / grid.setting.rows_per_update
    predicted = {}
    for W in lanes:
        sampling = {"threads": (wait + acting[1]) / W, "lanes": (math.ceil(W / CORES) * wait + acting[W]) / W}
        for kind, (how, mode) in KINDS.items():
            S = sampling[how]
            predicted[f"{kind} {W}"] = 1.0 / (S + R if mode == "serial" else max(S, R))
    return predicted


def _measure(
    cells: dict[str, Any], updates: _Updates, grid: _Grid, acting: Mapping[int, float], arguments: DQNArguments
) -> list[dict[str, Any]]:
    """Measures every cell in turns with updates alone, because machines change their speed; returns rows beside the
    model's."""
    try:
        rates = in_turns({"update": updates, **cells}, arguments.repeats, arguments.seconds)
    finally:
        for cell in cells.values():
            cell.actor_pool.__exit__()
    predicted = [_predict(grid, acting, 1.0 / rate, arguments.lanes) for rate in rates.pop("update")]
    first = f"standard {arguments.lanes[0]}"
    results = []
    for name, values in rates.items():
        kind, _, W = name.partition(" ")
        ratios = [value / base for value, base in zip(values, rates[first])]
        model = [of_turn[name] for of_turn in predicted]
        results.append(
            {
                "kind": kind,
                "lanes": int(W),
                "rows_per_second": statistics.median(values),
                "speed_up": statistics.median(ratios),
                "speed_up_range": [min(ratios), max(ratios)],
                "predicted_rows_per_second": statistics.median(model),
                "measured_over_predicted": statistics.median(rate / base for rate, base in zip(values, model)),
                "rates": values,
            }
        )
    return results


def _show(
    results: list[dict[str, Any]], arguments: DQNArguments, acting: Mapping[int, float], update: float, grid: _Grid
) -> None:
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    header = [""] + [f"{kind} (x) [model]" for kind in KINDS]
    lines = [header]
    for W in arguments.lanes:
        line = [f"{W} lane(s)"]
        for kind in KINDS:
            cell = next((r for r in results if (r["kind"], r["lanes"]) == (kind, W)), None)
            line.append(
                f"{cell['rows_per_second']:,.0f} ({cell['speed_up']:.2f}x) [{cell['measured_over_predicted']:.2f}]"
                if cell
                else "-"
            )
        lines.append(line)
    print(table(lines))
    print(
        "rows/s, medians of cells measured in turn; (x) over the first cell of its turn; [model] over what the "
        "model predicts from updates alone in that turn."
    )
    wait = f", a wait of {grid.environments.seconds * 1e3:.2f} ms" if grid.setting.paced else ""
    rounds = ", ".join(f"{seconds * 1e3:.2f} ms with {lanes}" for lanes, seconds in acting.items())
    print(f"alone: an update {update * 1e3:.2f} ms; a round of acting {rounds} lane(s){wait}.")


if __name__ == "__main__":
    sys.exit(script.run("dqn", DQNArguments, main))
