"""`podracer eval`, `podracer export` and `podracer plot`: the results of a run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Literal

import tyro

import podracer
from podracer.cli import elo
from podracer.cli.arguments import InputError, parse
from podracer.evaluation.rendering import check_rendering
from podracer.result import lineage, members, plots
from podracer.run import metrics, rundir
from podracer.system import console


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Evaluate a trained policy.

    Attributes:
      run_dir: the run directory.
      episodes: how many whole episodes to play.
      seed: seed of the episodes.
      member: number of a population's member; the best one if None.
      greedy: True takes the best actions, False samples, as in training; None acts as in the run's own evaluations.
      step: step of the checkpoint; the newest if None, or `best` for the one with the best evaluation.
      gif: also write an animation of one episode.
      json: print JSON instead of words.
      opponent: in a game for two: random, tactical, perfect, mcts:SIMULATIONS or another run,
        RUN_DIR[@STEP][:SIMULATIONS]; half of the `episodes` are played from each seat.
      simulations: in a game for two, simulations of the policy's search; 0 for the network's move alone.
      trust: import the module of the environment that the run names, which runs its code.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    episodes: Annotated[int, tyro.conf.arg(aliases=["--games"])] = 100
    seed: int = 0
    member: int | None = None
    greedy: bool | None = None
    step: int | Literal["best"] | None = None
    gif: pathlib.Path | None = None
    json: bool = False
    opponent: str | None = None
    simulations: int | None = None
    trust: bool = False


def evaluate(argv: list[str]) -> int:
    arguments = parse(EvalArguments, argv, "podracer eval")
    result = podracer.load(arguments.run_dir, step=arguments.step, trust=arguments.trust)
    versus = arguments.opponent is not None or arguments.simulations is not None
    if versus and arguments.gif:
        raise InputError("--gif shows the policy alone; leave out --opponent and --simulations.")
    if versus and arguments.greedy is not None:
        raise InputError("--greedy is for the policy alone; leave out --opponent and --simulations.")
    if arguments.gif and arguments.greedy is False:
        raise InputError("--gif shows the best actions; leave out --greedy False.")
    if arguments.gif:
        check_rendering(result.environment)
    if versus:
        return elo.match(arguments, result)
    evaluation = result.evaluate(
        arguments.episodes, seed=arguments.seed, member=arguments.member, greedy=arguments.greedy
    )
    if arguments.json:
        figures = {"mean": evaluation.mean, "std": evaluation.std, "interval": evaluation.interval}
        print(json.dumps(figures | {"episodes": evaluation.episodes, "unfinished": evaluation.unfinished}))
    else:
        member = result.best_member if arguments.member is None else arguments.member
        whose = f", member {member} of {result.population}" if result.population > 1 else ""
        print(f"{result.agent.name} on {result.description['env']}{whose}: {evaluation}")
    if arguments.gif:
        console.say(f"animation: {result.animate(arguments.gif, seed=arguments.seed, member=arguments.member)}")
    return 0


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Write a trained policy as files that run without the agent's code.

    Attributes:
      run_dir: the run directory.
      output: directory of the files.
      member: number of a population's member; the best one if None.
      step: step of the checkpoint; the newest if None, or `best` for the one with the best evaluation.
      episodes: played for the score in the model card; 0 for none.
      trust: import the module of the environment that the run names, which runs its code.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    output: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-o"])]
    member: int | None = None
    step: int | Literal["best"] | None = None
    episodes: int = 128
    trust: bool = False


def export(argv: list[str]) -> int:
    arguments = parse(ExportArguments, argv, "podracer export")
    result = podracer.load(arguments.run_dir, step=arguments.step, trust=arguments.trust)
    directory = result.export(arguments.output, member=arguments.member, episodes=arguments.episodes)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory} ({size / 1024:,.0f} KiB): podracer.load_policy('{directory}') acts as {arguments.run_dir}")
    return 0


@dataclasses.dataclass(frozen=True)
class PlotArguments:
    """Draw learning curves.

    Attributes:
      run_dirs: run directories.
      output: file of the picture; its suffix chooses the format.
      metric: name of the metric to draw; return if None.
      group: one line, with a band, for runs that differ only in their seeds; else one for each directory.
      pbt: the numbers, the lineage and the returns of one run with population based training, instead of curves.
    """

    run_dirs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    output: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-o"])] = pathlib.Path("curve.png")
    metric: str | None = None
    group: bool = True
    pbt: bool = False


def plot(argv: list[str]) -> int:
    arguments = parse(PlotArguments, argv, "podracer plot")
    if not arguments.run_dirs:
        raise InputError("plot needs one or more run directories.")
    names = [directory.resolve().name for directory in arguments.run_dirs]
    found = []
    for directory, name in zip(arguments.run_dirs, names):
        if not (directory / "metrics.jsonl").exists():
            raise InputError(f"{directory} holds no run: there is no metrics.jsonl in it.")
        label = name if names.count(name) == 1 else str(directory)
        rows = metrics.history(metrics.stream(directory / "metrics.jsonl"))
        found += members.from_run(rundir.read(directory), rows, label)
    if arguments.pbt:
        run_dir, *others = arguments.run_dirs
        if others or arguments.metric:
            raise InputError("--pbt draws one run, and all that there is of its generations: leave out the others.")
        print(lineage.picture(run_dir, arguments.output))
        return 0
    titles = {f"{member.agent} on {member.env}" for member in found}
    title = titles.pop() if len(titles) == 1 else ""
    curves = members.curves(found, group=arguments.group)
    print(plots.learning_curve(curves, arguments.output, title=title, metric=arguments.metric))
    return 0
