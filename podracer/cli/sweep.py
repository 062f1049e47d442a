"""`podracer sweep`: trains many values of tunable numbers side by side."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import tyro

from podracer.agents import registry
from podracer.cli import train
from podracer.cli.arguments import InputError, asks_for_help, parse, parse_known
from podracer.errors import Interrupted
from podracer.system import console

USAGE = """usage: podracer sweep AGENT ENV --hyper NAME=VALUES... [options] [options of podracer train]
VALUES: 0.001,0.01 (a grid), log:1e-4:1e-2 or uniform:0:1 (drawn, as many as --members says)
add --help after AGENT and ENV to see the options"""

OWN = {
    "--population": "--members is the number of configurations",
    "--member-seeds": "--seeds is the number of seeds of each",
    "--run-dir": "use --out",
    "--resume": "what is in the directory goes on anyway",
    "--gif": "podracer eval RUN_DIR --gif FILE draws one",
    "--topology": "a sweep runs on the devices of one process",
    "--pod": "a sweep runs on the devices of one process",
    "--pbt": "members of a sweep do not copy each other",
    "--pbt-dir": "members of a sweep do not copy each other",
    "--remote": "a sweep steps its environments itself",
}
"""Options of `podracer train` that a sweep sets itself, with advice for users."""


@dataclasses.dataclass(frozen=True)
class SweepArguments:
    """Train many values of an agent's tunable numbers side by side, and the best ones again on fresh seeds.

    The same command goes on with a sweep that was stopped. Options of podracer train may follow, for all members.

    Attributes:
      hyper: tunable numbers and their values, as learning_rate=log:1e-4:1e-2 entropy_cost=0.001,0.01.
      members: number of configurations; may be left out for a grid.
      seeds: number of seeds that every configuration is trained with.
      seed: seed of the draws, and the first one of training.
      at_once: members side by side; more are trained in waves. What memory allows if None, on a CPU at most 64.
      out: directory of the sweep; sweeps/ENV-AGENT if None.
    """

    hyper: tuple[str, ...] = ()
    members: int | None = None
    seeds: int = 3
    seed: int = 0
    at_once: int | None = None
    out: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["-o"])] = None


def sweep(argv: list[str]) -> int:
    """Runs `podracer sweep` with the words after it, and returns the exit code.

    Raises:
      InputError: for words that are no sweep.
    """
    if not argv or asks_for_help(argv[:1]):
        print(USAGE)
        return 0
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        raise InputError("sweep needs an agent and an environment: podracer sweep AGENT ENV --hyper NAME=VALUES.")
    agent, environment, *rest = argv
    prog = f"podracer sweep {agent} {environment}"
    if asks_for_help(rest):
        parse(SweepArguments, ["--help"], prog)
    arguments, flags = parse_known(SweepArguments, rest, prog)
    for flag in flags:
        option = re.split("[=.]", flag)[0].replace("_", "-")
        if option in OWN:
            raise InputError(f"{flag.partition('=')[0]} is not for a sweep: {OWN[option]}.")
    sweeper = _sweeper(agent, environment, arguments, flags)
    try:
        swept = sweeper.run()
    except Interrupted as error:
        console.say(f"{error}: {shlex.join(['podracer', 'sweep', *argv])}")
        return 128 + signal.Signals[error.signal]
    if "--quiet" not in flags:
        where = f"{swept.out} (sweep.json, sweep.png, a run directory for each wave)"
        console.write(sys.stdout, f"{swept}\nfiles: {where}\n")
    return 0


def _sweeper(agent: str, environment: str, arguments: SweepArguments, flags: list[str]) -> Any:
    """The sweep that was asked for, checked, with nothing trained."""
    from podracer.run import rundir
    from podracer.sweeps import plan, ranges
    from podracer.sweeps.sweep import Sweeper

    settings, fixed, quiet = train.parsed([agent, environment, *flags])
    hyper: dict[str, Any] = {}
    for text in arguments.hyper:
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and values):
            raise InputError(f"--hyper {text}: write NAME=VALUES; {ranges.FORMS}.")
        if name in hyper or name in fixed:
            raise InputError(f"--hyper {name} is given twice.")
        plan.check_names([name], registry.AGENTS[agent][0])
        hyper[name] = ranges.parse(name, values)
    if not hyper:
        raise InputError(f"{USAGE.splitlines()[0].partition(': ')[2]}: name a tunable number and its values.")
    for name, value in fixed.items():
        if isinstance(value, list):
            raise InputError(f"--hyper.{name.replace('_', '-')} is one number for all members; use --hyper {name}=...")
    planned = plan.make(hyper | fixed, arguments.members, arguments.seeds, arguments.seed)
    out = arguments.out or pathlib.Path("sweeps") / rundir.name_of(agent, environment)

    def command(chosen: Mapping[str, float]) -> str:
        swept = {f"--hyper.{name.replace('_', '-')}": repr(x) for name, x in chosen.items() if name not in fixed}
        return shlex.join(["podracer", "train", agent, environment, *flags, *itertools.chain(*swept.items())])

    return Sweeper(agent, environment, planned, arguments.at_once, out, not quiet, settings, command)
