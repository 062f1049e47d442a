"""Speed of our environments' steps beside other libraries': random actions, autoreset, one machine, in turns.

    pip install --no-deps --target PEERS gymnax six seaborn    # as gymnax would have its own version of JAX
    pip install --no-deps --target PEERS xminigrid tqdm imageio imageio-ffmpeg
    PYTHONPATH=PEERS python benchmarks/environments.py         # minutes; writes benchmarks/results/environments.json

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
from podracer.bench import measure
from podracer.environments import autoreset

RESULTS = pathlib.Path(__file__).parent / "results" / "environments.json"
NAMES = (
    *(f"minatar_{game}" for game in ("breakout", "freeway", "asterix", "space_invaders", "seaquest")),
    *("minigrid_empty", "minigrid_doorkey"),
)
STEPS = 64
"""Steps of a call."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """An environment of one lane.

    Attributes:
      reset: key -> state.
      step: (state, action, key) -> state, after which a lane that is over begins anew.
      observe: state -> observation.
      num_actions: A.
    """

    reset: Callable[[jax.Array], Any]
    step: Callable[[Any, jax.Array, jax.Array], Any]
    observe: Callable[[Any], jax.Array]
    num_actions: int


def ours(name: str) -> Loop:
    environment = envs_jax.make(name)

    def step(lane: Any, action: jax.Array, key: jax.Array) -> Any:
        step_key, reset_key = jax.random.split(key)
        return autoreset.step(environment, lane, action, step_key, environment.reset(reset_key))

    return Loop(
        reset=lambda key: autoreset.reset(environment, key),
        step=step,
        observe=lambda lane: jax.tree.leaves(lane.timestep.observation)[-1],
        num_actions=environment.spec.action_space.num_values,  # type: ignore[union-attr]
    )


def gymnax(name: str) -> Loop:
    import gymnax  # pyright: ignore[reportMissingImports] - installed beside

    game = "".join(word.capitalize() for word in name.split("_")[1:])
    environment, params = gymnax.make(f"{game}-MinAtar")

    def step(state: Any, action: jax.Array, key: jax.Array) -> Any:
        observation, state, *_ = environment.step(key, state[1], action, params)
        return observation, state

    return Loop(lambda key: environment.reset(key, params), step, lambda state: state[0], environment.num_actions)


def pgx(name: str) -> Loop:
    import pgx
    from pgx.experimental import auto_reset

    environment = pgx.make(name.replace("_", "-", 1))  # type: ignore[arg-type]
    step = auto_reset(environment.step, environment.init)
    return Loop(environment.init, step, lambda state: state.observation, environment.num_actions)


def xminigrid(name: str) -> Loop:
    import xminigrid  # pyright: ignore[reportMissingImports] - installed beside
    from xminigrid.wrappers import DmEnvAutoResetWrapper  # pyright: ignore[reportMissingImports]

    environment, params = xminigrid.make({"empty": "MiniGrid-Empty-8x8"}.get(name[9:], "MiniGrid-DoorKey-8x8"))
    environment = DmEnvAutoResetWrapper(environment)
    return Loop(
        reset=lambda key: environment.reset(params, key),
        step=lambda timestep, action, key: environment.step(params, timestep, action),
        observe=lambda timestep: timestep.observation,
        num_actions=environment.num_actions(params),
    )


PEERS = {"minatar": (gymnax, pgx), "minigrid": (xminigrid,)}
"""The libraries that have a family of environments."""


class Program:
    """A loop over `num_lanes` lanes, compiled; a call makes n times `STEPS` steps of each, and returns their number."""

    def __init__(self, loop: Loop, num_lanes: int):
        def one(state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
            state = loop.step(state, action, key)
            return state, jnp.sum(loop.observe(state), dtype=jnp.int32)

        def many(states: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            keys = jax.random.split(key, (STEPS, num_lanes))
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
    peers = PEERS.get(name.split("_")[0], ())
    made = {"ours": ours(name)}
    made |= {make.__name__: make(name) for make in peers if importlib.util.find_spec(make.__name__)}
    programs = {name: Program(loop, arguments.num_lanes) for name, loop in made.items()}
    rates = measure.in_turns(programs, arguments.repeats, arguments.seconds)  # type: ignore[arg-type]
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    others = [name for name in rates if name != "ours"]
    ratios = [mine / max(rates[name][i] for name in others) for i, mine in enumerate(rates["ours"])] if others else []
    return {
        "environment": name,
        "steps_per_second": medians,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "compile_seconds": {name: program.compile_seconds for name, program in programs.items()},
        "rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--num-lanes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for name in arguments.names:
        results.append(measured(name, arguments))
        rates = ", ".join(f"{library} {rate:,.0f}" for library, rate in results[-1]["steps_per_second"].items())
        ratio = f", ratio {results[-1]['ratio']:.2f}" if results[-1]["ratio"] else ""
        print(f"{name}: {rates} steps/s{ratio}", flush=True)
    settings = {option: value for option, value in vars(arguments).items() if option != "output"}
    measure.write(arguments.output, "python benchmarks/environments.py", settings, results)


if __name__ == "__main__":
    main()
