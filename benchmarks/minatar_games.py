"""MinAtar: every agent with a preset for it on the five games, beside published returns.

    python benchmarks/minatar_games.py                      # trains what is missing, one run at a time
    python benchmarks/minatar_games.py --agents ppo pqn --seeds 0 1
    python benchmarks/minatar_games.py --side-by-side       # on an accelerator: all seeds of a game in one program
    python benchmarks/minatar_games.py --report             # trains nothing

Each agent's runs are a suite: `podracer suite minatar AGENT --preset minatar`. A suite that was stopped goes on, and
the same line started twice (with `taskset -c 0` and `taskset -c 1`, say) shares the runs. The score of a run is the
mean return of its last policy over 100 fresh episodes. Scores and curves go to `benchmarks/results/minatar.json` and
`minatar.png`, beside those of other seeds that the file has. The exit code is 1 where a gate does not hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import job_queue
import numpy as np
import script

from podracer.bench import measure
from podracer.run import metrics
from podracer.suite import aggregates, collection, pictures
from podracer.suite.jobs import Job
from podracer.system import children
from podracer.system.stopping import StopSignal
from podracer.training import presets

RESULTS = pathlib.Path(__file__).parent / "results"
FILE = RESULTS / "minatar.json"

GAMES = presets.MINATAR_GAMES
STEPS = {
    agent: presets.MINATAR[agent].run["total_steps"]
    for agent in ("ppo", "vtrace", "pqn", "muzero", "efficientzero", "dqn")
}
"""Agents with the steps of their preset, in the order of their runs."""

MODELS = ("muzero", "efficientzero")
"""Agents that learn a model, of which one has to be ahead of DQN."""


class Published(NamedTuple):
    """Mean returns by others.

    Attributes:
      algorithm: theirs.
      steps: of training, in millions.
      source: of the numbers.
      protocol: what they are means of.
      returns: by game, in the order of `GAMES`; None where there is none.
      agent: ours of the same family; "" where these numbers are no gate.
      share: of each return that ours must reach.
      others: games on which it need not.
    """

    algorithm: str
    steps: int
    source: str
    protocol: str
    returns: tuple[float | None, ...]
    agent: str = ""
    share: float = 0.9
    others: int = 1


PUBLISHED = (
    Published(
        "DQN",
        5,
        "Young and Tian 2019, curves",
        "last games of training, epsilon 0.1, sticky, all six actions, 30 seeds",
        (16.8, 10.0, 50.1, 20.0, 43.7),
        "dqn",
        share=1.0,
        others=0,
    ),
    Published(
        "AC(0.8)",
        5,
        "Young and Tian 2019, curves",
        "last games of training, sticky, all six actions, 30 seeds",
        (18.7, 17.3, 47.4, 14.5, 179.7),
        "vtrace",
    ),
    Published(
        "DQN",
        5,
        "Daley et al. 2025, scores of their code",
        "games with epsilon 0.01, sticky, minimal actions, 30 seeds",
        (32.3, 35.7, 59.6, 68.6, 131.8),
    ),
    Published(
        "PPO",
        10,
        "gymnax, README",
        "sampled policy, at most 1,000 steps a game, not sticky",
        (15.0, 28.0, 58.0, None, 131.0),
        "ppo",
    ),
    Published(
        "PQN without traces",
        10,
        "Mousseau's fork of purejaxql, curves",
        "games of training, not sticky, five seeds",
        (30.0, 23.5, 58.0, None, 90.0),
        "pqn",
    ),
    Published("PPO", 20, "pgx, curves", "sampled policy, sticky, minimal actions", (22.0, 50.0, 63.5, 54.0, 144.0)),
)
"""Read from figures where the source says curves. Seaquest of 2019 is of a version with a mistake in its oxygen."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train agents on MinAtar.

    Attributes:
      agents: names; all of `STEPS` by default.
      seeds: a run of every game for each.
      runs: where the suites are, a folder for each agent.
      side_by_side: one program for all seeds of a game.
      report: write the results of what is there, and train nothing.
    """

    agents: tuple[str, ...] = tuple(STEPS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    runs: pathlib.Path = pathlib.Path("suites/minatar")
    side_by_side: bool = False
    report: bool = False


def command(agent: str, seeds: tuple[int, ...], out: pathlib.Path) -> list[str]:
    """The words of a suite's command, without the interpreter's."""
    every = STEPS[agent] // 20
    evaluations = ["--eval-every", str(every), "--eval-episodes", "100", "--checkpoint-every", str(every)]
    words = ["suite", "minatar", agent, "--preset", "minatar", "--games", *GAMES, "--seeds", *map(str, seeds)]
    return ["podracer", *words, *evaluations, "--out", str(out)]


def summary(found: collection.Collection) -> dict[str, Any]:
    """Scores of an agent by game, with their mean and its 95% interval over seeds, and the runs' commits and curves."""
    games: dict[str, Any] = {}
    for game, scores in found.values("score").items():
        of_game = [result for job, result in found.results.items() if job.game == game]
        samples = aggregates.resamplings(np.asarray(scores, float)[:, None])
        games[game] = {
            "scores": scores,
            "seeds": [result["seed"] for result in of_game],
            "mean": float(np.mean(scores)),
            "iqm": float(aggregates.iqm(np.asarray(scores, float)[:, None])),
            "interval": aggregates.interval(aggregates.mean, samples),
            "minutes": [result["train_seconds"] / 60 for result in of_game],
            "side_by_side": [result.get("side_by_side", 1) for result in of_game],
            "devices": [result["machine"]["device"] for result in of_game],
            "commits": [result["commit"] for result in of_game],
            "curves": [[(row["frames"], row["mean"]) for row in result["evaluations"]] for result in of_game],
        }
    return games


def runs_of_summaries(agents: dict[str, Any]) -> dict[str, dict[Job, dict[str, Any]]]:
    """The runs that summaries were made of, by agent, with what a summary and a picture need of them."""
    runs: dict[str, dict[Job, dict[str, Any]]] = {}
    for agent, games in agents.items():
        for game, one in games.items():
            columns = (
                one[name] for name in ("seeds", "scores", "minutes", "side_by_side", "devices", "commits", "curves")
            )
            for seed, score, minutes, side_by_side, device, commit, curve in zip(*columns, strict=True):
                runs.setdefault(agent, {})[Job(game, seed)] = {
                    "seed": seed,
                    "score": score,
                    "train_seconds": minutes * 60,
                    "side_by_side": side_by_side,
                    "machine": {"device": device},
                    "commit": commit,
                    "evaluations": [{"frames": frames, "mean": mean} for frames, mean in curve],
                    "training": [],
                }
    return runs


def all_runs(folder: pathlib.Path) -> list[collection.Collection]:
    """The runs in the file of results and in suites, whose runs count where both have a seed."""
    known = runs_of_summaries(json.loads(FILE.read_text())["results"]["agents"]) if FILE.exists() else {}
    collections = []
    for agent in STEPS:
        runs, settings = known.get(agent, {}), {}
        if any((folder / agent / "results").glob("minatar_*-*[0-9].json")):
            found = collection.read(folder / agent)
            runs, settings = runs | found.results, found.settings
        if runs:
            ordered = {job: runs[job] for job in sorted(runs, key=lambda job: (GAMES.index(job.game), job.seed))}
            collections.append(collection.Collection(agent, None, settings, ordered, {}))
    return collections


def unfinished_runs(folder: pathlib.Path, agents: dict[str, Any]) -> dict[str, Any]:
    """The runs that go on, in the file of results and in suites, by agent, game and seed: `curve` and `commit`.

    Args:
      folder: of the suites.
      agents: summaries of the runs that have ended, by agent and game.
    """
    found = json.loads(FILE.read_text())["results"].get("unfinished", {}) if FILE.exists() else {}
    for agent, game in itertools.product(STEPS, GAMES):
        directories = sorted((folder / agent / "runs").glob(f"{game}-[0-9]*"))
        for path in [directory / "metrics.jsonl" for directory in directories if directory.is_dir()]:
            rows = metrics.read(path)
            curve = [(row["env_steps"], row["eval/return_mean"]) for row in rows if "eval/return_mean" in row]
            commit = json.loads(path.parent.with_suffix(".start.json").read_text())["commit"]
            one = found.setdefault(agent, {}).setdefault(game, {})
            one[path.parent.name.removeprefix(f"{game}-")] = {"curve": curve, "commit": commit}
    ended = {agent: set(games) for agent, games in agents.items()}
    return {
        agent: left
        for agent, games in found.items()
        if (left := {game: one for game, one in games.items() if game not in ended.get(agent, ())})
    }


def ahead(agent: str, agents: dict[str, Any], unfinished: dict[str, Any]) -> dict[str, Any]:
    """The gate of an agent with a model: at its end it is ahead of DQN after as many steps, on three of five games.

    Runs of DQN that go on count once they have come so far.
    """
    curves = {game: one["curves"] for game, one in agents.get("dqn", {}).items()}
    for game, runs in unfinished.get("dqn", {}).items():
        curves[game] = [run["curve"] for run in runs.values() if run["curve"] and run["curve"][-1][0] >= STEPS[agent]]
    bounds = {}
    for game in (game for game in GAMES if curves.get(game)):
        points = [min(curve, key=lambda point: abs(point[0] - STEPS[agent])) for curve in curves[game]]
        bounds[game] = round(float(np.mean([mean for _, mean in points])), 2)
    scores = agents.get(agent, {})
    reached = [game for game, bound in bounds.items() if game in scores and scores[game]["mean"] > bound]
    gate = {"agent": agent, "beside": f"DQN of ours after {STEPS[agent]:,} steps", "bounds": bounds}
    return gate | {"reached": reached, "holds": len(reached) >= 3}


def gates(agents: dict[str, Any], unfinished: dict[str, Any]) -> list[dict[str, Any]]:
    """The gates: a share of what others publish of the family, on enough of their games, and `ahead`.

    Args:
      agents: summaries by game, by agent.
      unfinished: of `unfinished_runs`.
    """
    found = []
    for one in (published for published in PUBLISHED if published.agent):
        bounds = {game: round(one.share * x, 2) for game, x in zip(GAMES, one.returns) if x is not None}
        scores = agents.get(one.agent, {})
        reached = [game for game, bound in bounds.items() if game in scores and scores[game]["mean"] >= bound]
        gate = {"agent": one.agent, "beside": f"{one.algorithm}, {one.source}", "bounds": bounds, "reached": reached}
        found.append(gate | {"holds": len(reached) >= len(bounds) - one.others})
    return [*found, *(ahead(agent, agents, unfinished) for agent in MODELS)]


def write(runs: pathlib.Path) -> bool:
    """Writes all results that there are; returns True where all gates hold, and one of those of `MODELS`."""
    collections = all_runs(runs)
    agents = {one.label: summary(one) for one in collections}
    unfinished = unfinished_runs(runs, agents)
    found = gates(agents, unfinished)
    commands = {agent: " ".join(command(agent, Arguments.seeds, pathlib.Path("DIR"))) for agent in STEPS}
    written = {"agents": agents, "published": [one._asdict() for one in PUBLISHED], "gates": found}
    written["unfinished"] = unfinished
    measure.write(FILE, "python benchmarks/minatar_games.py", {"commands": commands}, written)
    pictures.curves(collections, RESULTS / "minatar.png")
    for agent, games in agents.items():
        for game, one in games.items():
            print(f"{agent:8} {game:15} {one['mean']:8.2f}  {', '.join(f'{x:.1f}' for x in one['scores'])}")
    for gate in found:
        verdict = "holds" if gate["holds"] else "does not hold"
        print(f"{gate['agent']} beside {gate['beside']}: {len(gate['reached'])} of {len(gate['bounds'])}, {verdict}")
    of_models = [gate["holds"] for gate in found if gate["agent"] in MODELS]
    return any(of_models) and all(gate["holds"] for gate in found if gate["agent"] not in MODELS)


def train(arguments: Arguments) -> int:
    """Trains what is missing, every agent with a seed (or all of them) before the next; returns the exit code."""
    programs = [arguments.seeds] if arguments.side_by_side else [(seed,) for seed in arguments.seeds]
    with StopSignal() as signals:
        for seeds, agent in itertools.product(programs, arguments.agents):
            words = command(agent, seeds, arguments.runs / agent)
            words += ["--side-by-side"] if arguments.side_by_side else []
            process = children.start([sys.executable, "-m", *words], sys.stdout.fileno())
            code = job_queue.wait(process, lambda: signals.requested)
            if code or signals.requested:
                return code or 128 + signals.number
    return 0


def main(arguments: Arguments) -> int:
    unknown = [agent for agent in arguments.agents if agent not in STEPS]
    if unknown:
        raise ValueError(f"--agents {' '.join(unknown)}: known are {', '.join(STEPS)}.")
    if not arguments.report and (code := train(arguments)):
        return code
    return 0 if write(arguments.runs) else 1


if __name__ == "__main__":
    sys.exit(script.run("minatar_games", Arguments, main))
