"""Masks of actions: does every agent follow them, what are they worth, and what do they cost?

    python benchmarks/masks.py probe [--seeds 3]    # every agent on a task that only the mask explains
    python benchmarks/masks.py 2048 [--seeds 3]     # PPO on pgx's 2048 for 2,000,000 steps, with its mask and without
    python benchmarks/masks.py speed                # PPO and DQN with 18 actions, with a mask and without, in turns

Writes `benchmarks/results/masks.json`, `masks-2048.json` and `masks-speed.json`; `python benchmarks/readme.py` writes
them into docs/results/learning.md. The exit code says whether the bounds hold. `alphazero` is not here: it plays games
for two, and follows their rules.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import script
import tyro

import podracer
from podracer import environments, spaces, topology
from podracer.agents.registry import make_agent
from podracer.bench import anakin, measure
from podracer.types import Environment, EnvSpec, Transition

RESULTS = pathlib.Path(__file__).parent / "results"
LEAST, MOST_HIDDEN, RATIO, MOST_COST = 0.99, -0.5, 2.0, 0.03
"""Bounds: the probe's return with the mask and without, the ratio of returns in 2048, and the share of time."""

SECONDS = 0.1
"""The length of one measurement of speed. Other programs disturb both of a short pair alike."""

SMALL: dict[str, Any] = {"hidden_sizes": (8,), "discount": 0.8, "learning_rate": 1e-2}
SEARCH: dict[str, Any] = {
    "hidden_sizes": (16,),
    "state_size": 16,
    "head_size": 16,
    "num_bins": 21,
    "simulations": 8,
    "replay_ratio": 4.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": SMALL | {"rollout_length": 16, "num_epochs": 2, "num_minibatches": 2},
    "vtrace": SMALL | {"rollout_length": 8, "learning_rate": 3e-2},
    "pqn": SMALL | {"rollout_length": 16, "num_minibatches": 4},
    "dqn": SMALL
    | {"discount": 0.5, "learning_rate": 3e-3, "epsilon_final": 0.3, "rollout_length": 8, "n_step": 2, "dueling": True}
    | {"batch_size": 64, "replay_ratio": 4.0, "target_interval": 20},
    "r2d2": SMALL
    | {"discount": 0.5, "learning_rate": 3e-3, "optimizer_eps": 1e-6, "epsilon_alpha": 1.0, "rollout_length": 8}
    | {"burn_in": 0, "trace_length": 8, "n_step": 2, "core": "none", "head_size": 8, "batch_size": 64}
    | {"replay_capacity": 32_000, "replay_min_size": 400, "replay_ratio": 16.0, "target_interval": 20},
    "muzero": SEARCH | {"discount": 0.5, "search": "gumbel"},
    "efficientzero": SEARCH | {"discount": 0.5, "search": "gumbel", "lstm_size": 16, "projection_size": 16},
}
"""Settings of the agents on the probe. The next step's legal actions are drawn anew, so that a small discount helps."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The measurement and its size.

    Attributes:
      part: the measurement.
      seeds: of `probe` and `2048`.
      agents: of `probe`.
      repeats: of `speed`, in turns.
    """

    part: Annotated[Literal["probe", "2048", "speed"], tyro.conf.Positional]
    seeds: int = 3
    agents: tuple[str, ...] = tuple(SETTINGS)
    repeats: int = 101


class State(NamedTuple):
    """Unbatched: `legal` bool [A], at least one of them; `time` int32 []."""

    legal: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class MaskedAction:
    """Four steps, each with a random set of legal actions: 1/4 for its largest, -1 and the end for an illegal one.

    With `mask` the best return is 1, and known to nobody who does not look at the mask: all else is always 0. Each
    action's own value is the larger, the larger its number. Fails if a mask is forgotten, or of another row or lane.
    """

    mask: bool = True
    num_actions: int = 8
    num_seen: int = 1

    @property
    def spec(self) -> EnvSpec:
        seen: dict[str, spaces.Space] = {"seen": spaces.Box(-1.0, 1.0, (self.num_seen,))}
        if self.mask:
            seen["action_mask"] = spaces.Box(0, 1, (self.num_actions,), np.int8)
        actions = spaces.Discrete(self.num_actions)
        return EnvSpec("probe:masked_action", spaces.Dict(seen), actions, 4, metrics=("illegal",))

    def reset(self, key: jax.Array) -> State:
        return State(self._draw(key), jnp.int32(0))

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        numbers, time = jnp.arange(self.num_actions), state.time + 1
        illegal = ~jnp.any(state.legal & (numbers == action))
        largest = jnp.max(jnp.where(state.legal, numbers, 0))
        reward = jnp.where(illegal, -1.0, jnp.where(action == largest, 0.25, 0.0))
        over = illegal | (time == 4)
        discount, metrics = 1.0 - over.astype(jnp.float32), {"illegal": illegal.astype(jnp.float32)}
        return State(self._draw(key), time), Transition(reward.astype(jnp.float32), discount, over, metrics)

    def observe(self, state: State) -> dict[str, jax.Array]:
        seen = {"seen": jnp.zeros(self.num_seen)}
        return seen | ({"action_mask": state.legal.astype(jnp.int8)} if self.mask else {})

    def _draw(self, key: jax.Array) -> jax.Array:
        some, one = jax.random.split(key)
        drawn = jax.random.bernoulli(some, 0.4, (self.num_actions,))
        return drawn | (jnp.arange(self.num_actions) == jax.random.randint(one, (), 0, self.num_actions))


class Counted:
    """A game of pgx for one player that counts illegal actions."""

    def __init__(self, game: Any):
        self._game = game
        self.spec = game.spec._replace(metrics=("illegal",))
        self.reset, self.observe = game.reset, game.observe

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        after, transition = self._game.step(state, action, key)
        illegal = 1.0 - state.legal_action_mask[action].astype(jnp.float32)
        return after, transition._replace(metrics={"illegal": illegal})


class Run(NamedTuple):
    """A run's result, and the largest mean of illegal actions in episodes of training."""

    result: podracer.Result
    illegal: float


def train(agent: str, environment: Environment, **settings: Any) -> Run:
    """Trains on an environment that counts illegal actions."""
    result = podracer.train(agent, environment, progress=False, check=False, **settings)
    illegal = [row["episode/illegal"] for row in result.history if "episode/illegal" in row]
    return Run(result, max(x for x in illegal if np.isfinite(x)))


def probed(agent: str, *, mask: bool = True, **settings: Any) -> Run:
    """A run of an agent on the probe."""
    fixed = {"config": SETTINGS[agent], "total_steps": 20_000, "num_envs": 16}
    return train(agent, MaskedAction(mask), **fixed, eval_every=20_000, eval_episodes=200, **settings)


def returns(run: Run) -> list[float]:
    """Mean returns of evaluation, by seed."""
    summary = run.result.summary
    return [member["eval_return_mean"] for member in summary.get("members", [summary])]


def probe(arguments: Arguments) -> tuple[dict[str, Any], bool]:
    """Agents on the probe, with the mask by both drivers and with the mask hidden; the results of others stay."""
    path = RESULTS / "masks.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for agent in arguments.agents:
        seeds = {"population": arguments.seeds}
        cases = {
            "anakin": {"arch": "anakin", **seeds},
            "sebulba": {"arch": "sebulba"},
            "hidden": {"arch": "anakin", "mask": False, **seeds},
        }
        found: dict[str, Any] = {"commit": measure.commit()}
        for case, settings in cases.items():
            begin = time.perf_counter()
            run = probed(agent, **settings)
            found[case] = {
                "returns": returns(run),
                "illegal": run.illegal,
                "seconds": time.perf_counter() - begin,
            }
            print(f"{agent}, {case}: {found[case]}", flush=True)
        results[agent] = found
    return results, holds(results)


def holds(results: dict[str, Any]) -> bool:
    """Returns True if all agents of `SETTINGS` have a result, and follow their masks."""
    return all(agent in results and follows(results[agent]) for agent in SETTINGS)


def follows(found: dict[str, Any]) -> bool:
    """Returns True if an agent learns the probe with its mask, without an illegal action, and only then."""
    masked, hidden = [found["anakin"], found["sebulba"]], found["hidden"]
    learns = all(min(case["returns"]) >= LEAST and not case["illegal"] for case in masked)
    return learns and max(hidden["returns"]) < MOST_HIDDEN and hidden["illegal"] > 0


def game_2048(arguments: Arguments) -> tuple[dict[str, Any], bool]:
    """PPO on pgx's 2048, with its mask and without: scores, of which an illegal move is the end."""
    results: dict[str, Any] = {}
    for case, mask in (("with the mask", True), ("without", False)):
        begin, runs = time.perf_counter(), []
        for seed in range(arguments.seeds):
            game = Counted(environments.make("pgx:2048", mask=mask))
            runs.append(train("ppo", game, total_steps=2_000_000, seed=seed, eval_episodes=200))
            print(f"{case}, seed {seed}: {returns(runs[-1])}, illegal {runs[-1].illegal}", flush=True)
        results[case] = {
            "returns": [x for run in runs for x in returns(run)],
            "illegal": [run.illegal for run in runs],
            "seconds": time.perf_counter() - begin,
        }
    masked, plain = results["with the mask"], results["without"]
    return results, min(masked["returns"]) >= RATIO * max(plain["returns"]) and not any(masked["illegal"])


def speed(arguments: Arguments) -> tuple[dict[str, Any], bool]:
    """Training with 18 actions and a mask, beside training where the mask is hidden, by seconds of the processor."""
    measured = {}
    for agent in ("ppo", "dqn"):
        for mask in (True, False):
            environment = MaskedAction(mask, num_actions=18, num_seen=128)  # as many as Atari has, and bytes of memory
            made = make_agent(agent, environment, {})
            layout = topology.make(num_envs=256, envs_per_device=256, devices=jax.local_devices()[:1])
            case = f"{agent}, {'mask' if mask else 'hidden'}"
            measured[case] = anakin.trainer(made, environment, layout, made.config.rollout_length)
    rates = measure.in_turns(measured, arguments.repeats, SECONDS, time.process_time)
    results: dict[str, Any] = {"rates": rates, "cost": {}}
    for agent in ("ppo", "dqn"):
        pairs = [plain / masked - 1.0 for masked, plain in zip(rates[f"{agent}, mask"], rates[f"{agent}, hidden"])]
        low, median, high = statistics.quantiles(pairs, n=4)
        results["cost"][agent] = {"median": median, "low": low, "high": high}
        print(f"{agent}: a mask takes {median:+.1%} (half of the pairs {low:+.1%} to {high:+.1%})")
    return results, all(cost["median"] <= MOST_COST for cost in results["cost"].values())


def main(arguments: Arguments) -> int:
    """Measures and writes; returns 0 if the bounds hold."""
    part = {"probe": probe, "2048": game_2048, "speed": speed}[arguments.part]
    results, success = part(arguments)
    print(f"the bounds {'hold' if success else 'do not hold'}")
    name = "masks" if arguments.part == "probe" else f"masks-{arguments.part}"
    command = f"python benchmarks/masks.py {arguments.part}"
    if arguments.part == "probe":
        arguments = dataclasses.replace(arguments, agents=tuple(name for name in results if name in SETTINGS))
    measure.write(RESULTS / f"{name}.json", command, arguments, results | {"holds": success})
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(script.run("masks", Arguments, main))
