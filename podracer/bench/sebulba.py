"""`podracer bench sebulba`: environments alone, a plain act-and-append loop, our actors, and training, in one run."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Annotated, Any, Literal

import jax
import tyro

from podracer import configs, environments, topology
from podracer.agents.registry import make_agent
from podracer.bench.measure import Measured, describe_machine, in_turns, table, write, yardstick
from podracer.run.config import RunConfig
from podracer.run.driver import Progress, RunHooks
from podracer.sebulba.driver import Sebulba
from podracer.version import __version__


@dataclasses.dataclass(frozen=True)
class Preset:
    """One line of the table: an environment, its lanes and threads, and the agent's settings."""

    env: str
    num_envs: int
    num_threads: int
    config: dict[str, Any]


_IMAGES = {"frame_stack": 4, "reward_transform": "abs_one", "learning_rate": 6e-4}
PRESETS = {
    "cartpole": Preset("envpool:CartPole-v1", 64, 2, {"rollout_length": 20, "hidden_sizes": (64, 64)}),
    "pong": Preset("envpool:Pong-v5", 16, 2, {"rollout_length": 20, "torso": "shallow", **_IMAGES}),
    "pong-resnet": Preset("envpool:Pong-v5", 8, 2, {"rollout_length": 20, "torso": "resnet", **_IMAGES}),
}


@dataclasses.dataclass(frozen=True)
class SebulbaArguments:
    """Measure Sebulba with V-trace.

    Attributes:
      presets: presets to measure.
      num_envs: number of lanes of each actor thread, instead of the preset's.
      pool_threads: number of EnvPool's threads for each actor thread, instead of the preset's.
      torso: the network of presets with images, instead of the preset's.
      actor_devices: as in `podracer train`.
      actor_threads: as in `podracer train`; the lanes of a preset are those of each thread.
      simulated_devices: if the only device is a CPU, measure again while it simulates so many; 0 does not.
      repeats: measurements of each thing, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    num_envs: int | None = configs.field(None, low=1)
    pool_threads: int | None = configs.field(None, low=1)
    torso: Literal["nature", "shallow", "resnet"] | None = None
    actor_devices: int | None = configs.field(None, low=1)
    actor_threads: int = configs.field(1, low=1)
    simulated_devices: int = configs.field(8, low=0)
    repeats: int = configs.field(5, low=1)
    seconds: float = configs.field(2.0, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)
        for preset in self.presets:
            if preset not in PRESETS:
                raise ValueError(f"unknown preset {preset!r}; {configs.suggest(preset, PRESETS)}")
            if self.torso and "torso" not in PRESETS[preset].config:
                raise ValueError(f"torso={self.torso!r}: {preset} has no images; choose others with --presets.")

    def preset(self, name: str) -> Preset:
        """A preset with the arguments' changes."""
        preset = PRESETS[name]
        return Preset(
            preset.env,
            self.num_envs or preset.num_envs,
            self.pool_threads or preset.num_threads,
            preset.config | ({"torso": self.torso} if self.torso else {}),
        )


def main(arguments: SebulbaArguments) -> int:
    """Measures, prints a table, writes JSON."""
    results = []
    for name in arguments.presets:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results.append(measure(name, arguments))
    if arguments.simulated_devices and jax.default_backend() == "cpu" and jax.local_device_count() == 1:
        results += _run_simulated(arguments)
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    header = ["preset", "devices", "envs", "environment", "plain acting", "acting", "training"]
    lines = [[*header, "acting/plain", "training/acting", "fetching/training"]]
    ratio = lambda x: f"{x:.2f}" if x else "-"  # noqa: E731
    for r in results:
        rates = [f"{r[key]:,.0f}" if r[key] else "-" for key in ("environment", "plain_acting", "acting", "training")]
        ratios = [ratio(r[key]) for key in ("acting_ratio", "training_ratio", "fetching_ratio")]
        lines.append([r["preset"], str(r["devices"]), str(r["num_envs"]), *rates, *ratios])
    print(table(lines))
    print("rows/s (one step of one lane, resets included), medians; ratios are of pairs measured in turn.")
    print("fetching: training where the learner fetches its shards, instead of the actors sending them.")
    for r in results:
        shares = "  ".join(f"{name.removeprefix('sebulba/')} {value:.2f}" for name, value in r["stages"].items())
        print(f"{r['preset']}, {r['layout']}: {shares}")
    if arguments.json:
        write(arguments.json, "podracer bench sebulba", arguments, results)
    return 0


def _run_simulated(arguments: SebulbaArguments) -> list[dict[str, Any]]:
    """The results with a CPU that simulates several devices, which takes a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "results.json"
        command = [
            sys.executable,
            "-m",
            "podracer",
            "bench",
            "sebulba",
            "--json",
            str(path),
            "--simulated-devices",
            "0",
        ]
        for name in ("actor_threads", "repeats", "seconds"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        for name in ("num_envs", "pool_threads", "torso", "actor_devices"):
            if getattr(arguments, name):
                command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        count = str(arguments.simulated_devices)
        # With fewer threads than devices, collectives of a loaded machine wait for one another for good.
        settings = {"JAX_NUM_CPU_DEVICES": count, "NPROC": str(4 * arguments.simulated_devices)}
        command += ["--presets", *arguments.presets]
        done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            print(f"nothing measured on {count} simulated devices: exit code {done.returncode}.", file=sys.stderr)
            return []
        return json.loads(path.read_text())["results"]


def measure(name: str, arguments: SebulbaArguments) -> dict[str, Any]:
    """Rates of one preset, all measured in turns."""
    preset = arguments.preset(name)
    source: Any = environments.make(preset.env, num_threads=preset.num_threads)
    agent = make_agent("vtrace", source, preset.config)
    layout = topology.make_host(
        num_envs=None,
        envs_per_actor=preset.num_envs,
        actor_devices=arguments.actor_devices,
        actor_threads=arguments.actor_threads,
    )
    driver = Sebulba(agent, source, layout, RunConfig(), agent.hyper)
    compile_seconds = driver.compile(driver.init())
    acting, training = Acting(driver, layout), Training(driver, layout)
    measured: dict[str, Measured] = {"acting": acting, "training": training}
    pools = [acting.actor_pool, training.actor_pool]
    if len(layout.devices) > 1:
        fetching = Training(driver, layout, fetch=True)
        measured["fetching"] = fetching
        pools.append(fetching.actor_pool)
    plain = yardstick("plain_actor.py")
    task = preset.env.partition(":")[2]
    if plain is not None:
        measured["environment"] = plain.make_raw(task, preset.num_envs, preset.num_threads)
        if name == "cartpole":  # the plain loop's network is an MLP
            T = agent.config.rollout_length
            measured["plain_acting"] = plain.make(task, preset.num_envs, preset.num_threads, T)
    try:
        rates = in_turns(measured, arguments.repeats, arguments.seconds)
    finally:
        for pool in pools:
            pool.__exit__()
    medians = {key: statistics.median(values) for key, values in rates.items()}
    pairs = [a / b for a, b in zip(rates["acting"], rates.get("plain_acting", []))]
    fetched = [a / b for a, b in zip(rates.get("fetching", []), rates["training"])]
    return {
        "preset": name,
        "env": preset.env,
        "num_envs": layout.num_envs,
        "devices": len(layout.devices),
        "layout": layout.describe(),
        **{key: medians.get(key) for key in ("environment", "plain_acting", "acting", "training")},
        "acting_ratio": statistics.median(pairs) if pairs else None,
        "acting_ratio_range": [min(pairs), max(pairs)] if pairs else None,
        "training_ratio": statistics.median(a / b for a, b in zip(rates["training"], rates["acting"])),
        "fetching_ratio": statistics.median(fetched) if fetched else None,
        "compile_seconds": compile_seconds,
        "stages": training.stages,
        "rates": rates,
    }


class Acting:
    """n rollouts of actors into trajectories, without learning."""

    def __init__(self, driver: Sebulba, layout: topology.HostTopology):
        self.actor_pool = driver.actor_pool(jax.tree.map(lambda x: x[0], driver.init().learner), 0.0)
        self._rows = layout.envs_per_actor * driver.rollout_length
        # In the queue, in the actors' hands, and the first that is all of this turn.
        self._waiting = 3 * len(layout.actors)
        self.actor_pool.__enter__()

    def prepare(self) -> None:
        """Consumes the rollouts from before the clock started."""
        self(self._waiting)

    def __call__(self, n: int) -> int:
        for number in range(n):
            rollouts = self.actor_pool.next_rollouts(number, lambda: False)
            assert rollouts is not None
            jax.block_until_ready([rollout.trajectory for rollout in rollouts])
        return n * self._rows


class Training(Acting):
    """n rollouts of acting and learning; with `fetch`, the learner moves rollouts that actors leave in place.

    `stages` has the parts of the last call's time.
    """

    def __init__(self, driver: Sebulba, layout: topology.HostTopology, fetch: bool = False):
        learning = driver.learning
        if fetch:
            driver.learning = learning._replace(spread=lambda trajectory, replica: trajectory)
        super().__init__(driver, layout)
        driver.learning = learning
        if fetch:
            actor_pool: Any = self.actor_pool
            take = actor_pool.next_rollouts

            def next_rollouts(*arguments: Any) -> Any:
                rollouts = take(*arguments)
                return rollouts and [r._replace(trajectory=learning.spread(r.trajectory)) for r in rollouts]

            actor_pool.next_rollouts = next_rollouts
        self.stages: dict[str, float] = {}
        self._driver, self._learner = driver, driver.learner(driver.init())

    def __call__(self, n: int) -> int:
        before = self._learner.rollouts
        reports: list[Progress] = []

        self._learner.run(
            self.actor_pool,
            RunHooks(
                next_milestone=lambda steps: 2**50,
                on_progress=reports.append,
                on_milestone=lambda state, steps: None,
                should_stop=lambda: self._learner.rollouts - before >= n,
            ),
            snapshot=self._driver.init,  # never called, for there is no milestone
        )
        names = [name for name in reports[0].metrics if name.endswith("_share")]
        seconds = sum(report.seconds for report in reports)
        share = lambda name: sum(float(report.metrics[name][0]) * report.seconds for report in reports) / seconds  # noqa: E731
        self.stages = {name: share(name) for name in names}
        return (self._learner.rollouts - before) * self._rows
