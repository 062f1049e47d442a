"""Speed of our environments' steps beside gymnax's and pgx's: random actions, autoreset, one machine, in turns.

    pip install --no-deps --target PEERS gymnax six seaborn    # as gymnax would have its own version of JAX
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
GAMES = ("breakout", "freeway", "asterix", "space_invaders", "seaquest")
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


def ours(game: str) -> Loop:
    environment = envs_jax.make(f"minatar_{game}")

    def step(lane: Any, action: jax.Array, key: jax.Array) -> Any:
        step_key, reset_key = jax.random.split(key)
        return autoreset.step(environment, lane, action, step_key, environment.reset(reset_key))

    return Loop(
        reset=lambda key: autoreset.reset(environment, key),
        step=step,
        observe=lambda lane: lane.timestep.observation,
        num_actions=environment.spec.action_space.num_values,  # type: ignore[union-attr]
    )


def gymnax(game: str) -> Loop:
    import gymnax  # pyright: ignore[reportMissingImports] - installed beside

    name = "".join(word.capitalize() for word in game.split("_")) + "-MinAtar"
    environment, params = gymnax.make(name)

    def step(state: Any, action: jax.Array, key: jax.Array) -> Any:
        observation, state, *_ = environment.step(key, state[1], action, params)
        return observation, state

    return Loop(lambda key: environment.reset(key, params), step, lambda state: state[0], environment.num_actions)


def pgx(game: str) -> Loop:
    import pgx
    from pgx.experimental import auto_reset

    environment = pgx.make(f"minatar-{game}")  # type: ignore[arg-type]
    step = auto_reset(environment.step, environment.init)
    return Loop(environment.init, step, lambda state: state.observation, environment.num_actions)


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


def measured(game: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rates of a game in each library, in steps a second, and ours over the better one of the others'."""
    made = {"ours": ours(game)}
    made |= {make.__name__: make(game) for make in (gymnax, pgx) if importlib.util.find_spec(make.__name__)}
    programs = {name: Program(loop, arguments.num_lanes) for name, loop in made.items()}
    rates = measure.in_turns(programs, arguments.repeats, arguments.seconds)  # type: ignore[arg-type]
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    others = [name for name in rates if name != "ours"]
    ratios = [mine / max(rates[name][i] for name in others) for i, mine in enumerate(rates["ours"])] if others else []
    return {
        "game": game,
        "steps_per_second": medians,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
        "compile_seconds": {name: program.compile_seconds for name, program in programs.items()},
        "rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", default=GAMES)
    parser.add_argument("--num-lanes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for game in arguments.games:
        results.append(measured(game, arguments))
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in results[-1]["steps_per_second"].items())
        ratio = f", ratio {results[-1]['ratio']:.2f}" if results[-1]["ratio"] else ""
        print(f"{game}: {rates} steps/s{ratio}", flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    measure.write(arguments.output, "python benchmarks/environments.py", settings, results)


if __name__ == "__main__":
    main()
