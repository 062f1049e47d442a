"""Speed of the three ways to open episodes, for environments with large states and expensive resets.

    python benchmarks/resets.py                          # minutes; writes benchmarks/results/resets.json
    python benchmarks/resets.py --sizes 21 --lengths 100 1000 --num-lanes 256

`fresh` makes a state for every lane at every step (`reset_pool=0`), `pool` draws from some that are made anew for each
rollout, and `costly` resets only lanes that are over (`costly_reset`, the default for states of this size). The
environment is artificial: its state has the size of Craftax's, 21 KB of the symbolic and 273 KB of the full game, its
`step` changes one row of it and its `reset` smooths noise over all of it. Episodes end by chance, at the same mean
length in each lane. Compare rates within a row only: other programs on the machine slow a row down as a whole.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import agents, spaces, topology
from podracer.anakin import program, runner
from podracer.bench import measure
from podracer.bench.anakin import Training, learn_nothing
from podracer.types import EnvSpec, Transition

RESULTS = pathlib.Path(__file__).parent / "results" / "resets.json"
WIDTH = 64


class WorldState(NamedTuple):
    """The state of `World`.

    Attributes:
      cells: float32 [H, 64].
      row: int32 []; the row that the next step changes.
    """

    cells: jax.Array
    row: jax.Array


class World:
    """A state of `kilobytes`, a reset of `rounds` passes over it, and episodes of `length` steps on average.

    Observation: float32 [64], a row of the state.
    Action: `Discrete(4)`, added to that row.
    Reward: the mean of the row.
    """

    def __init__(self, kilobytes: int, length: int, rounds: int, costly: bool):
        self._height, self._length, self._rounds = max(1, kilobytes * 256 // WIDTH), length, rounds
        self.costly_reset = costly
        self.spec = EnvSpec("world", spaces.Box(-1e9, 1e9, (WIDTH,)), spaces.Discrete(4))

    def reset(self, key: jax.Array) -> WorldState:
        """Draws noise and smooths it, as generators of landscapes do."""

        def smooth(_: Any, cells: jax.Array) -> jax.Array:
            return 0.5 * cells + 0.25 * jnp.roll(cells, 1, 0) + 0.25 * jnp.roll(cells, 1, 1)

        cells = jax.random.normal(key, (self._height, WIDTH))
        return WorldState(jax.lax.fori_loop(0, self._rounds, smooth, cells), jnp.int32(0))

    def step(self, state: WorldState, action: jax.Array, key: jax.Array) -> tuple[WorldState, Transition]:
        """Changes one row."""
        row = state.cells[state.row] + action.astype(jnp.float32)
        over = jax.random.bernoulli(key, 1.0 / self._length)
        after = WorldState(state.cells.at[state.row].set(row), (state.row + 1) % self._height)
        return after, Transition(jnp.mean(row), 1.0 - over.astype(jnp.float32), over)

    def observe(self, state: WorldState) -> jax.Array:
        """The row that the next step changes."""
        return state.cells[state.row]


def rollouts(world: World, reset_pool: int | None, num_lanes: int, rollout_length: int) -> Training:
    """Makes rollouts of random actions that nothing is learnt from."""

    def act(params: Any, memory: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
        actions = jnp.floor(jax.random.uniform(key, timestep.reward.shape) * 4).astype(jnp.int32)
        return actions, {}, memory

    agent = agents.vtrace.make(
        world.spec, agents.VTraceConfig(rollout_length=rollout_length, hidden_sizes=(8,), envs_per_device=num_lanes)
    )
    idle = agent._replace(act=act, learn=learn_nothing, start=lambda lanes, num_lanes: ())
    layout = topology.make(num_envs=num_lanes, envs_per_device=num_lanes, devices=jax.local_devices()[:1])
    made = program.make(idle, world, layout, program.RolloutSettings(rollout_length, reset_pool))
    hyper = {name: jnp.full((1,), value, jnp.float32) for name, value in idle.hyper.items()}
    state = made.init(jnp.zeros(1, jnp.int32), hyper)
    return Training(runner.compile_step(made, state), state, made.limits, rollout_length * num_lanes)


def measured(kilobytes: int, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rates of the three ways for one size and length of episodes, in rows a second."""
    ways = {"fresh": (False, 0), "pool": (False, arguments.reset_pool), "costly": (True, None)}
    programs = {}
    for name, (costly, reset_pool) in ways.items():
        world = World(kilobytes, length, arguments.rounds, costly)
        programs[name] = rollouts(world, reset_pool, arguments.num_lanes, arguments.rollout_length)
    rates = measure.in_turns(programs, arguments.repeats, arguments.seconds)  # type: ignore[arg-type]
    return {
        "kilobytes": kilobytes,
        "length": length,
        "rows_per_second": {name: statistics.median(rate) for name, rate in rates.items()},
        "costly_over": {
            name: statistics.median(mine / other for mine, other in zip(rates["costly"], rates[name]))
            for name in ("fresh", "pool")
        },
        "memory_bytes": {name: training.compiled.memory for name, training in programs.items()},
        "compile_seconds": {name: training.compiled.seconds for name, training in programs.items()},
        "rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=(21, 273), help="kilobytes of a state")
    parser.add_argument("--lengths", type=int, nargs="+", default=(100, 1000), help="mean steps of an episode")
    parser.add_argument("--rounds", type=int, default=20, help="passes over the state that a reset takes")
    parser.add_argument("--num-lanes", type=int, default=256)
    parser.add_argument("--rollout-length", type=int, default=16)
    parser.add_argument("--reset-pool", type=int, default=16, help="states of a pool")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    results = []
    for kilobytes in arguments.sizes:
        for length in arguments.lengths:
            results.append(measured(kilobytes, length, arguments))
            rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in results[-1]["rows_per_second"].items())
            ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in results[-1]["costly_over"].items())
            print(f"{kilobytes} KB, episodes of {length}: {rates} rows/s; costly is {ratios}", flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    measure.write(arguments.output, "python benchmarks/resets.py", settings, results)


if __name__ == "__main__":
    main()
