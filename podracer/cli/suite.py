"""`podracer suite`: trains an agent on many games, and reports its scores."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from podracer import configs
from podracer.cli import train
from podracer.cli.arguments import InputError, asks_for_help, parse, parse_known
from podracer.run import rundir
from podracer.system import console
from podracer.training.presets import MINATAR_GAMES

USAGE = """usage: podracer suite atari57 AGENT [options] [options of podracer train]
       podracer suite atari100k AGENT [options] [options of podracer train]
       podracer suite minatar AGENT [options] [options of podracer train]
       podracer suite report DIR... [options]
add --help after AGENT, or after report, to see the options"""

OWN = {
    "--seed": "use --seeds",
    "--population": "use --seeds and --side-by-side, or podracer sweep for values of tunable numbers",
    "--member-seeds": "use --seeds and --side-by-side",
    "--run-dir": "use --out",
    "--resume": "what is in the directory goes on anyway",
    "--gif": "podracer eval RUN_DIR --gif FILE draws one",
    "--quiet": "what a run says goes into runs/GAME-SEED.log",
}
"""Options of `podracer train` that a suite sets for every job, or does not take, with advice for users."""

SUITES: dict[str, str | None] = {"atari57": None, "atari100k": "atari100k", "minatar": None}
"""Suites by name, with the protocol of those that have one of their own."""

MOST_SEEDS = 40
"""The most seeds of one run: all of them are in the names of its files."""

FREE = {"seed", *rundir.FREE_TO_CHANGE} - {"eval_every", "eval_episodes"}
"""Run settings that may differ among the jobs of one directory. Those of evaluations may not: they decide the best
one."""


@dataclasses.dataclass(frozen=True)
class SuiteArguments:
    """Train an agent on games of Atari or MinAtar, a run for each game and seed, and collect the results.

    Runs that are complete in OUT are not repeated, and others are resumed: the same command, here or on other machines
    with the same disk, does the rest. Options of podracer train may follow, for every run.

    Attributes:
      games: names such as Pong, or atari57, nature49 or atari100k; the protocol's if not given, else the suite's. Names
        such as breakout in the suite minatar.
      seeds: seeds; every game has a run for each.
      preset: settings to begin with, as of podracer train.
      protocol: protocol of games and scores, as of podracer train; atari100k for the suite of that name.
      out: the suite's directory; suites/AGENT[-PRESET][-PROTOCOL], or suites/AGENT-minatar[-PRESET], if None.
      part: a share I/N of the runs, such as 3/57; all that are left if None.
      workers: number of runs at a time.
      side_by_side: all seeds of a game in one run, as members of a population (minatar alone): on an accelerator they
        take little more time than one.
      dry_run: print a command for each run that is left, and run none.
    """

    games: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    preset: str | None = None
    protocol: str | None = None
    out: pathlib.Path | None = None
    part: str | None = None
    workers: int = 1
    side_by_side: bool = False
    dry_run: bool = False


def suite(argv: list[str]) -> int:
    if not argv or asks_for_help(argv[:1]):
        print(USAGE)
        return 0
    if argv[0] == "report":
        return report(argv[1:])
    if argv[0] not in SUITES:
        raise InputError(f"unknown suite {argv[0]!r}; {configs.suggest(argv[0], (*SUITES, 'report'))}")
    return train_on(argv[0], argv[1:])


def train_on(name: str, argv: list[str]) -> int:
    """Trains on a suite by name."""
    from podracer.agents import registry
    from podracer.suite import jobs

    if not argv or argv[0].startswith("-"):
        if asks_for_help(argv):
            parse(SuiteArguments, argv, f"podracer suite {name} AGENT")
        raise InputError(f"suite needs an agent: podracer suite {name} AGENT [options].")
    agent, *rest = argv
    if agent not in registry.AGENTS:
        raise InputError(registry.unknown(agent))
    arguments, flags = parse_known(SuiteArguments, rest, f"podracer suite {name} {agent}")
    arguments = dataclasses.replace(arguments, protocol=arguments.protocol or SUITES[name])
    for flag in flags:
        if (option := flag.partition("=")[0].replace("_", "-")) in OWN:
            raise InputError(f"{option} is not for a suite: {OWN[option]}.")
        if option.startswith("--pbt"):
            raise InputError(f"{option} is not for a suite: its seeds do not copy each other.")
    if arguments.workers < 1:
        raise InputError(f"--workers={arguments.workers}: must be at least 1.")
    if not arguments.seeds or len(set(arguments.seeds)) < len(arguments.seeds) or min(arguments.seeds) < 0:
        raise InputError(f"--seeds={' '.join(map(str, arguments.seeds))}: give one or more, from 0, each once.")
    for option in ("preset", "protocol"):
        if (value := getattr(arguments, option)) is not None:
            flags = [f"--{option}", value, *flags]
    of_minatar = name == "minatar"
    names = dict.fromkeys(value for value in (of_minatar and name, arguments.preset, arguments.protocol) if value)
    directory = arguments.out or pathlib.Path("suites") / "-".join([agent, *names])
    settings = _settings(agent, flags, MINATAR_GAMES[:2]) if of_minatar else _settings(agent, flags)
    if arguments.side_by_side:
        _check_side_by_side(of_minatar, arguments.seeds, settings["run"])
    for number, value in settings["hyper"].items():
        if isinstance(value, list):
            option = f"--hyper.{number.replace('_', '-')}"
            raise InputError(f"{option} has one value in a suite; podracer sweep compares several of them.")
    games = _minatar_games(arguments.games) if of_minatar else _games(arguments.games, settings["protocol"])
    planned = jobs.Suite(directory, settings, games, arguments.seeds, (agent, *flags), arguments.side_by_side)
    share = jobs.part(planned.jobs, arguments.part) if arguments.part else planned.jobs
    if not share:
        console.say(f"--part {arguments.part} has no runs: there are {len(planned.jobs)}.")
        return 0
    if arguments.dry_run:
        return _print(planned, share, [name, agent], arguments, flags)
    planned.register()  # whose file may have runs of several seeds
    share = jobs.part(planned.jobs, arguments.part) if arguments.part else planned.jobs
    return _run(planned, share, arguments.workers, ["podracer", "suite", name, *argv])


def _check_side_by_side(of_minatar: bool, seeds: tuple[int, ...], run: Mapping[str, Any]) -> None:
    """Checks that one program can train these seeds, and with which lanes.

    Raises:
      InputError: if it cannot, or the number of seeds would decide the number of lanes.
    """
    if not of_minatar:
        raise InputError("--side-by-side: games of EnvPool have no populations; the suite minatar has them.")
    if run["arch"] == "sebulba":
        raise InputError("--side-by-side: only Anakin has populations; leave --arch sebulba out.")
    if run["num_envs"] is None:  # on several devices it would go by the number of seeds
        raise InputError("--side-by-side: give --num-envs, or a preset that has it, such as --preset minatar.")
    if len(seeds) > MOST_SEEDS:
        raise InputError(f"--side-by-side: {len(seeds)} seeds are more than {MOST_SEEDS}; give them in several calls.")


def _games(requested: tuple[str, ...], protocol: str | None) -> list[str]:
    """EnvPool's names of games, each once, from names of games and of sets of games."""
    from podracer import atari
    from podracer.atari import games

    if not requested:
        return list(atari.PROTOCOLS[protocol].games if protocol else atari.GAMES57)
    found: dict[str, None] = {}
    for text in requested:
        name = text.rpartition(":")[2].partition("-v")[0]
        if text not in games.SETS and name not in games.GAMES57:
            raise InputError(f"unknown game {text!r}; {configs.suggest(name, [*games.SETS, *games.GAMES57])}")
        found |= dict.fromkeys(games.SETS.get(text, (name,)))
    return list(found)


def _minatar_games(requested: tuple[str, ...]) -> list[str]:
    """The names of environments of MinAtar, each once; all of them for no names."""
    found = [name if name in MINATAR_GAMES else f"minatar_{name}" for name in requested]
    for name, text in zip(found, requested):
        if name not in MINATAR_GAMES:
            raise InputError(f"unknown game {text!r}; {configs.suggest(name, MINATAR_GAMES)}")
    return list(dict.fromkeys(found or MINATAR_GAMES))


def _settings(agent: str, flags: list[str], games: tuple[str, ...] = ("Pong", "Breakout")) -> dict[str, Any]:
    """The settings that decide the results of all jobs, of which two are on these games."""
    from podracer import atari
    from podracer.run.config import RunConfig
    from podracer.suite import jobs

    # The options of all games are the same; of the agent's settings, all but those that a preset has by game.
    settings, other = (train.settings([agent, jobs.environment(game), *flags]) for game in games)
    alike = {name: x for name, x in settings["agent_config"].items() if x == other["agent_config"][name]}
    settings["agent_config"] = alike
    run = {name: value for name, value in settings["run"].items() if name not in FREE}
    protocol = settings["protocol"]
    typed = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    is_set = "--total-steps" in typed or run["total_steps"] != RunConfig().total_steps
    if protocol and atari.PROTOCOLS[protocol].frames is None and not is_set:
        raise InputError(f"protocol={protocol!r} does not say how long to train; give --total-steps.")
    of_atari = atari.PROTOCOLS[protocol].table if protocol else "atari57"
    return settings | {"run": run, "table": None if games[0] in MINATAR_GAMES else of_atari}


def _print(planned: Any, share: Any, what: list[str], arguments: SuiteArguments, flags: list[str]) -> int:
    """Prints a command for each job, with its result and its claim, to run here or from a queue."""
    own = ["--games", *arguments.games] if arguments.games else []
    own += ["--seeds", *map(str, planned.seeds), "--out", str(planned.directory)]
    own += ["--side-by-side"] if arguments.side_by_side else []
    for job in share:
        if not planned.done(job):
            place = f"{planned.jobs.index(job) + 1}/{len(planned.jobs)}"
            print(shlex.join(["podracer", "suite", *what, "--part", place, *own, *flags]))
    return 0


def _run(planned: Any, share: Any, workers: int, again: list[str]) -> int:
    """Runs jobs; returns the exit code."""
    from podracer.suite import result  # which needs JAX
    from podracer.suite.progress import Display
    from podracer.suite.runner import Runner
    from podracer.system.stopping import StopSignal

    display = Display(planned, len(share), str(planned.directory))
    try:
        with StopSignal() as stop:
            outcome = Runner(planned, share, workers, stop, display, result.read).run()
    finally:
        display.close()
    counts = [
        f"{len(outcome.done)} of {len(share)} runs are done",
        *([f"{len(outcome.failed)} failed"] if outcome.failed else []),
        *([f"{len(outcome.stopped)} were stopped"] if outcome.stopped else []),
        *([f"{len(outcome.elsewhere)} are run by others"] if outcome.elsewhere else []),
    ]
    console.say(f"{', '.join(counts)}; {_resume_hint(planned, outcome, len(share), again)}")
    if outcome.failed:
        return 1
    return 1 if outcome.stopped and not stop.requested else 0


def _resume_hint(planned: Any, outcome: Any, jobs: int, again: list[str]) -> str:
    if len(outcome.done) == jobs:
        return f"podracer suite report {shlex.quote(str(planned.directory))}"
    return f"continue with {shlex.join(again)}"


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Write a table, JSON and pictures of the results in one directory, or of several side by side.

    Attributes:
      directories: directories of suites.
      output: a directory, or a file named *.md or *.json; DIR/report, or report for several, if None.
      partial: also aggregate over part of the games, and label such aggregates.
      against: published scores to compare with, such as EfficientZero or BBF on Atari 100k.
    """

    directories: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    output: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["-o"])] = None
    partial: bool = False
    against: tuple[str, ...] = ()


def report(argv: list[str]) -> int:
    from podracer.suite import collection
    from podracer.suite import report as reports

    arguments = parse(ReportArguments, argv, "podracer suite report")
    directories = arguments.directories
    if not directories:
        raise InputError("suite report needs one or more directories of suites.")
    names = [directory.resolve().name for directory in directories]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, directories)]
    found = [collection.read(path, label) for path, label in zip(directories, labels)]
    found += [collection.from_papers(name) for name in arguments.against]
    output = arguments.output or (directories[0] / "report" if len(directories) == 1 else pathlib.Path("report"))
    paths = reports.write(found, output, arguments.partial)
    for one in found:
        if one.part:
            console.say(f"{one.label}: {one.part}{'' if arguments.partial else '; --partial aggregates them'}")
    if differ := reports.table_warning([one.settings for one in found]):
        console.say(differ)
    print("\n".join(map(str, paths)))
    return 0
