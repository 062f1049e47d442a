"""`podracer bench anakin`: speed measured in one run, next to a hand-written yardstick."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import envs_jax
from podracer import configs, nets, spaces, topology
from podracer.agents.registry import make_agent
from podracer.anakin import program, runner
from podracer.bench.measure import Measured, describe_machine, in_turns, table, write, yardstick
from podracer.run.driver import RunState, counter_values
from podracer.topology import collectives
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
        "learning_rate_schedule": "constant",
        "value_clip_epsilon": 0.2,
        "normalize_rewards": False,
    },
    "vtrace": {
        "rollout_length": 20,
        "hidden_sizes": (64, 64),
        "optimizer": "rmsprop",
        "optimizer_eps": 0.01,
        "learning_rate": 6e-4,
        "learning_rate_schedule": "constant",
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
      agents: agents to measure, each on the environment of its yardstick.
      env: a pure-JAX environment instead of the yardsticks', without yardsticks.
      env_options: options of `env` as JSON, such as '{"task": "random_goals"}'.
      num_envs: number of environment lanes.
      devices: number of devices; all local ones if None.
      only: measurements among environment, acting, training and yardstick; training is always measured.
      cores: memories to measure each agent with (`nets.NetworkConfig`); yardsticks have none.
      repeats: measurements of each thing, taken in turns; the median counts.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    agents: tuple[str, ...] = ("ppo", "vtrace")
    env: str | None = None
    env_options: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    num_envs: tuple[int, ...] = configs.field((1024,), low=1)
    devices: tuple[int, ...] | None = configs.field(None, low=1)
    only: tuple[Literal["environment", "acting", "training", "yardstick"], ...] = (
        "environment",
        "acting",
        "training",
        "yardstick",
    )
    cores: tuple[nets.CoreName, ...] = ("none",)
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
        self.environment("ppo")

    def environment(self, agent: str) -> Environment:
        """The environment on which an agent is measured."""
        try:
            options = json.loads(self.env_options)
        except json.JSONDecodeError as error:
            raise ValueError(f"env_options={self.env_options!r} is not JSON: {error}.") from None
        if not isinstance(options, dict):
            raise ValueError(f"env_options={self.env_options!r}: must be an object of option names and values.")
        if options and not self.env:
            raise ValueError("env_options belong to an environment: name it with --env.")
        return envs_jax.make(self.env or YARDSTICK_ENVS[agent], **options)


def main(arguments: AnakinArguments) -> int:
    """Measures, prints a table, writes JSON."""
    results = []
    for name in arguments.agents:
        for devices in arguments.devices or (len(jax.local_devices()),):
            for num_envs, core in itertools.product(arguments.num_envs, arguments.cores):
                memory = "" if core == "none" else f" and core {core}"
                what = f"{name} with {num_envs} environments{memory} on {devices} device(s)"
                print(f"measuring {what} ...", file=sys.stderr, flush=True)
                results.append(measure(name, num_envs, devices, core, arguments))
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}")
    print(_table(results))
    print("rows/s (a row is one step of one lane, resets included), medians; ratio is training over the plain loop.")
    for r in results:
        memory = "" if r["core"] == "none" else f" with {r['core']}"
        print(f"{r['agent']}{memory}: {r['transitions_share']:.1%} of its rows are real transitions, the rest resets.")
    if arguments.json:
        write(arguments.json, "podracer bench anakin", arguments, results)
    return 0


def _table(results: list[dict[str, Any]]) -> str:
    header = ["agent", "core", "env", "envs", "devices", "environment", "acting", "training", "plain loop", "ratio"]
    lines = [[*header, "compile s", "memory MiB"]]
    for r in results:
        rates = [f"{r[key]:,.0f}" if r[key] else "-" for key in ("environment", "acting", "training", "yardstick")]
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else "-"
        memory = f"{r['memory_bytes'] / 2**20:,.0f}" if r["memory_bytes"] else "-"
        lines.append([r["agent"], r["core"], r["env"], str(r["num_envs"]), str(r["devices"]), *rates, ratio])
        lines[-1] += [f"{r['compile_seconds']:.1f}", memory]
    return table(lines)


def measure(name: str, num_envs: int, devices: int, core: nets.CoreName, arguments: AnakinArguments) -> dict[str, Any]:
    """Rates of one agent, all measured in turns, next to its yardstick on the yardstick's environment."""
    environment = arguments.environment(name)
    agent = make_agent(name, environment, PRESETS[name] | {"core": core})
    layout = topology.make(num_envs=num_envs, envs_per_device=num_envs, devices=jax.local_devices()[:devices])
    T = agent.config.rollout_length
    training = trainer(agent, environment, layout, T)
    measured: dict[str, Measured] = {"training": training}
    if "environment" in arguments.only:
        measured["environment"] = _environment_only(agent, environment, layout, T)
    if "acting" in arguments.only:
        measured["acting"] = _acting_only(agent, environment, layout, T)
    alike = not arguments.env and core == "none"
    yardstick = _yardstick(name, num_envs, T) if alike and "yardstick" in arguments.only else None
    if yardstick:
        measured["yardstick"] = yardstick
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    pairs = [a / b for a, b in zip(rates["training"], rates.get("yardstick", []))]
    return {
        "agent": name,
        "core": core,
        "env": environment.spec.name,
        "num_envs": num_envs,
        "rollout_length": T,
        "devices": layout.num_devices,
        "environment": medians.get("environment"),
        "acting": medians.get("acting"),
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


class Training:
    """The whole program; n updates in one call, or as many as the process with the least n."""

    def __init__(self, compiled: runner.Compiled, state: RunState, limits: program.LimitsFn, rows_per_update: int):
        self.compiled, self._limits = compiled, limits
        self._state, self._rows = state, rows_per_update
        self._updates = 0

    def __call__(self, n: int) -> int:
        self._state, report = self.compiled.call(self._state, self._limits(2**50, 2**50, n))
        done = int(np.max(jax.device_get(report.updates)))
        self._updates += done
        return done * self._rows

    @property
    def transitions_share(self) -> float:
        """Real transitions per row, so far."""
        return int(counter_values(self._state.env_steps)[0]) / (self._updates * self._rows)


def _environment_only(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> Measured:
    """The same rollouts with uniformly random actions instead of a policy."""
    space = environment.spec.action_space

    def act(params: Any, memory: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
        B = timestep.reward.shape[0]
        if isinstance(space, spaces.Discrete):
            return jnp.floor(jax.random.uniform(key, (B,)) * space.num_values).astype(jnp.int32), {}, memory
        return jax.vmap(space.sample)(jax.random.split(key, B)), {}, memory  # type: ignore[union-attr]

    idle = agent._replace(act=act, learn=learn_nothing, start=lambda lanes, num_lanes: ())
    return trainer(idle, environment, layout, T)


def _acting_only(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> Measured:
    """Rollouts into a trajectory as training does them, without learning."""
    return trainer(agent._replace(learn=learn_nothing), environment, layout, T)


def trainer(agent: Agent, environment: Environment, layout: topology.Topology, T: int) -> Training:
    anakin = program.make(agent, environment, layout, program.RolloutSettings(T))
    members = layout.population
    hyper = {k: jnp.full((members,), v, jnp.float32) for k, v in agent.hyper.items()}
    state = anakin.init(jnp.arange(members, dtype=jnp.int32), hyper)
    compiled = runner.compile_step(anakin, state)
    return Training(compiled, state, anakin.limits, T * layout.num_envs)


def learn_nothing(learner: Any, trajectory: Any, progress: jax.Array, key: jax.Array) -> Any:
    """`Agent.learn` that only waits for its trajectory."""
    # Every part of the trajectory is read, or the compiler would not make it.
    total = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(trajectory._replace(actor_state=())))
    return learner, {"sum": collectives.global_sum(total)}


def _yardstick(name: str, num_envs: int, T: int) -> Measured | None:
    module = yardstick(YARDSTICKS[name])
    if module is None:
        return None
    updates = 4
    init, step = module.make(num_envs=num_envs, num_steps=T, updates_per_call=updates)
    holder = [init(jax.random.key(0))]

    def call(n: int) -> int:
        for _ in range(n):
            holder[0], metrics = step(holder[0])
        jax.block_until_ready((holder[0], metrics))
        return n * updates * T * num_envs

    return call
