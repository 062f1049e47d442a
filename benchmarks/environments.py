"""Speed of our environments' steps beside other libraries': random actions, autoreset, one machine, in turns.

    pip install --no-deps --target PEERS gymnax six seaborn    # as gymnax would have its own version of JAX
    pip install --no-deps --target PEERS xminigrid tqdm imageio imageio-ffmpeg
    PYTHONPATH=PEERS python benchmarks/environments.py         # minutes; writes benchmarks/results/environments.json
    python benchmarks/environments.py acrobot bandit           # these alone

A library that is missing is left out. Every program is the same loop over the library's own step: a random action for
each lane, a step, a new episode for each lane that is over, and the sum of all observations, so that none is left out.
Compare rates within a row only: other programs on the machine slow a row down as a whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import envs_jax
from podracer import spaces
from podracer.bench import measure
from podracer.environments import autoreset

RESULTS = pathlib.Path(__file__).parent / "results" / "environments.json"
STEPS = 64
"""Steps of a call."""


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment of ours, and what the libraries call the same one.

    Attributes:
      gymnax: its name there, or None where there is none.
      pgx: its name there, or None.
      xminigrid: its name there, or None.
      options: of ours, as gymnax has it.
      gymnax_options: of gymnax's.
    """

    gymnax: str | None = None
    pgx: str | None = None
    xminigrid: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    gymnax_options: dict[str, Any] = dataclasses.field(default_factory=dict)


TASKS = {
    "minatar_breakout": Task("Breakout-MinAtar", "minatar-breakout"),
    "minatar_freeway": Task("Freeway-MinAtar", "minatar-freeway"),
    "minatar_asterix": Task("Asterix-MinAtar", "minatar-asterix"),
    "minatar_space_invaders": Task("SpaceInvaders-MinAtar", "minatar-space_invaders"),
    "minatar_seaquest": Task("Seaquest-MinAtar", "minatar-seaquest"),
    "mountain_car": Task("MountainCar-v0"),
    "mountain_car_continuous": Task("MountainCarContinuous-v0"),
    "acrobot": Task("Acrobot-v1"),
    "bandit": Task("SimpleBandit-bsuite"),
    "discounting_chain": Task("DiscountingChain-bsuite"),
    "umbrella_chain": Task("UmbrellaChain-bsuite", options={"length": 10}, gymnax_options={"n_distractor": 20}),
    "minigrid_empty": Task(xminigrid="MiniGrid-Empty-8x8"),
    "minigrid_doorkey": Task(xminigrid="MiniGrid-DoorKey-8x8"),
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """An environment of one lane.

    Attributes:
      reset: key -> state.
      step: (state, action, key) -> state, after which a lane that is over begins anew.
      observe: state -> observation.
      num_actions: A, or None where actions are float32 [1] in [-1, 1].
    """

    reset: Callable[[jax.Array], Any]
    step: Callable[[Any, jax.Array, jax.Array], Any]
    observe: Callable[[Any], jax.Array]
    num_actions: int | None


def ours(name: str) -> Loop:
    environment = envs_jax.make(name, **TASKS[name].options)
    space = environment.spec.action_space

    def step(lane: Any, action: jax.Array, key: jax.Array) -> Any:
        step_key, reset_key = jax.random.split(key)
        return autoreset.step(environment, lane, action, step_key, environment.reset(reset_key))

    return Loop(
        reset=lambda key: autoreset.reset(environment, key),
        step=step,
        observe=lambda lane: jax.tree.leaves(lane.timestep.observation)[-1],
        num_actions=space.num_values if isinstance(space, spaces.Discrete) else None,
    )


def gymnax(name: str) -> Loop:
    import gymnax  # pyright: ignore[reportMissingImports] - installed beside

    task = TASKS[name]
    environment, params = gymnax.make(task.gymnax, **task.gymnax_options)
    num_actions = None if name == "mountain_car_continuous" else environment.num_actions

    def step(state: Any, action: jax.Array, key: jax.Array) -> Any:
        observation, state, *_ = environment.step(key, state[1], action, params)
        return observation, state

    return Loop(lambda key: environment.reset(key, params), step, lambda state: state[0], num_actions)


def pgx(name: str) -> Loop:
    import pgx
    from pgx.experimental import auto_reset

    environment = pgx.make(TASKS[name].pgx)  # type: ignore[arg-type]
    step = auto_reset(environment.step, environment.init)
    return Loop(environment.init, step, lambda state: state.observation, environment.num_actions)


def xminigrid(name: str) -> Loop:
    import xminigrid  # pyright: ignore[reportMissingImports] - installed beside
    from xminigrid.wrappers import DmEnvAutoResetWrapper  # pyright: ignore[reportMissingImports]

    environment, params = xminigrid.make(TASKS[name].xminigrid)
    environment = DmEnvAutoResetWrapper(environment)
    return Loop(
        reset=lambda key: environment.reset(params, key),
        step=lambda timestep, action, key: environment.step(params, timestep, action),
        observe=lambda timestep: timestep.observation,
        num_actions=environment.num_actions(params),
    )


class Program:
    """A loop over `num_lanes` lanes, compiled; a call makes n times `STEPS` steps of each, and returns their number."""

    def __init__(self, loop: Loop, num_lanes: int):
        def one(state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
            state = loop.step(state, action, key)
            seen = loop.observe(state)
            return state, jnp.sum(seen, dtype=jnp.float32 if seen.dtype == jnp.float32 else jnp.int32)

        def many(states: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            keys = jax.random.split(key, (STEPS, num_lanes))
            if loop.num_actions is None:
                actions = jax.random.uniform(key, (STEPS, num_lanes, 1), minval=-1.0)
            else:
                actions = jax.random.randint(key, (STEPS, num_lanes), 0, loop.num_actions)
            return jax.lax.scan(lambda states, now: jax.vmap(one)(states, *now), states, (actions, keys))

        begun = time.perf_counter()
        with jax.numpy_dtype_promotion("standard"):
            self.states = jax.jit(jax.vmap(loop.reset))(jax.random.split(jax.random.key(0), num_lanes))
            self.many = jax.jit(many).lower(self.states, jax.random.key(0)).compile()
        self.compile_seconds, self.num_lanes, self.calls = time.perf_counter() - begun, num_lanes, 0

    def __call__(self, n: int) -> int:
        for _ in range(n):
            self.calls += 1
            self.states, total = self.many(self.states, jax.random.key(self.calls))
        jax.block_until_ready((self.states, total))
        return n * STEPS * self.num_lanes


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rates of an environment in each library, in steps a second, and ours over the best one of the others'."""
    there = [library for library in (gymnax, pgx, xminigrid) if getattr(TASKS[name], library.__name__)]
    made = {"ours": ours(name)}
    made |= {make.__name__: make(name) for make in there if importlib.util.find_spec(make.__name__)}
    programs = {library: Program(loop, arguments.num_lanes) for library, loop in made.items()}
    rates = measure.in_turns(programs, arguments.repeats, arguments.seconds)  # type: ignore[arg-type]
    medians = {library: statistics.median(rate) for library, rate in rates.items()}
    others = [rate for library, rate in rates.items() if library != "ours"]
    ratios = [mine / max(rate[i] for rate in others) for i, mine in enumerate(rates["ours"])] if others else []
    return {
        "environment": name,
        "steps_per_second": medians,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "compile_seconds": {library: program.compile_seconds for library, program in programs.items()},
        "rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", default=list(TASKS))
    parser.add_argument("--num-lanes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for name in arguments.environments:
        results.append(measured(name, arguments))
        rates = ", ".join(f"{library} {rate:,.0f}" for library, rate in results[-1]["steps_per_second"].items())
        ratio = f", ratio {results[-1]['ratio']:.2f}" if results[-1]["ratio"] else ""
        print(f"{name}: {rates} steps/s{ratio}", flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    measure.write(arguments.output, "python benchmarks/environments.py", settings, results)


if __name__ == "__main__":
    main()
