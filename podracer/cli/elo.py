"""`podracer eval --opponent` and `podracer elo`: the strength of runs of a game for two."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Annotated, Any, NamedTuple

import tyro

import podracer
from podracer.cli.arguments import InputError, parse
from podracer.environments.seeds import MAX_SEED
from podracer.evaluation import elo, matches, players
from podracer.result import plots
from podracer.run.best import BEST
from podracer.system import console


class Name(NamedTuple):
    """The parts of `RUN_DIR[@STEP][:SIMULATIONS]`."""

    directory: pathlib.Path
    step: int | None
    best: bool
    simulations: int | None


def parse_name(text: str) -> Name | None:
    """The parts of a run's player name, or None if there is no such directory."""
    if pathlib.Path(text).is_dir():
        return Name(pathlib.Path(text), None, False, None)
    found = re.fullmatch(r"(.+?)(?:@(\d+|best))?(?::(\d+))?", text)
    if not found or not pathlib.Path(found[1]).is_dir():
        return None
    step = int(found[2]) if found[2] and found[2] != BEST else None
    return Name(pathlib.Path(found[1]), step, found[2] == BEST, int(found[3]) if found[3] else None)


def _load(name: Name, environment: Any, trust: bool) -> podracer.Result:
    """Loads a run, of the game of `environment` unless that is None."""
    result = podracer.load(name.directory, step=BEST if name.best else None, trust=trust)
    if environment is not None and result.environment.spec != environment.spec:
        raise InputError(f"{name.directory} is of {result.environment.spec.name}, not of {environment.spec.name}.")
    return result


def match(arguments: Any, result: podracer.Result) -> int:
    """`podracer eval` of a game for two: plays against an opponent from both seats."""
    environment: Any = result.environment
    me = result.player(str(arguments.run_dir), simulations=arguments.simulations, member=arguments.member)
    opponent = arguments.opponent or "random"
    name = parse_name(opponent)
    if name:
        other = _load(name, environment, arguments.trust).player(opponent, simulations=name.simulations, step=name.step)
    else:
        other = players.player(environment, opponent)
    played = matches.play(environment, me, other, arguments.episodes, arguments.seed)
    if arguments.json:
        counts = {name: played.counts(seat) for name, seat in (("all", None), ("first", 0), ("second", 1))}
        print(json.dumps({"mean": played.mean, "interval": played.interval, "won_drawn_lost": counts}))
    else:
        print(played)
    return 0


@dataclasses.dataclass(frozen=True)
class EloArguments:
    """Rate runs of a game for two, next to random and tactical play, and draw their ratings.

    Attributes:
      run_dirs: run directories of one game, for each snapshot of each; or RUN_DIR@STEP[:SIMULATIONS].
      games: games of each match; every player plays the one before it, and tactical.
      simulations: simulations of every policy's search; 0 for the network's move alone.
      seed: seed of the matches.
      json: print JSON instead of words.
      output: file of the picture of runs with snapshots; elo.png if None, in the run's directory if there is one.
      trust: import the modules of the runs' environments, which runs their code.
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    games: int = 200
    simulations: int | None = None
    seed: int = 0
    json: bool = False
    output: Annotated[pathlib.Path | None, tyro.conf.arg(aliases=["-o"])] = None
    trust: bool = False


def rate(argv: list[str]) -> int:
    arguments = parse(EloArguments, argv, "podracer elo")
    if not arguments.run_dirs:
        raise InputError("elo needs one or more run directories.")
    entrants: dict[str, players.Player] = {}
    histories: dict[str, dict[str, int]] = {}  # steps of a run's players, by their names
    environment: Any = None
    for text in arguments.run_dirs:
        name = parse_name(text) or Name(pathlib.Path(text), None, False, None)
        result = _load(name, environment, arguments.trust)
        environment = result.environment
        is_specific = name.simulations is not None or name.step is not None or name.best
        simulations = arguments.simulations if name.simulations is None else name.simulations
        player = result.player(simulations=simulations)
        steps = [name.step] if is_specific else result.snapshots() or [None]
        for step in steps:
            called = text if is_specific or step is None else f"{name.directory}@{step}"
            if called in entrants:
                raise InputError(f"{called} is there twice.")
            entrants[called] = player._replace(name=called, params=result.actor_params(step=step))
            if not is_specific and step is not None:
                histories.setdefault(str(name.directory), {})[called] = step
    if arguments.output and not histories:
        raise InputError("--output: a picture is of the snapshots of run directories, and none of these has any.")
    random, tactical = (players.player(environment, name) for name in ("random", "tactical"))
    pairs = [(tactical, random), *((player, tactical) for player in entrants.values())]
    pairs += [(later, earlier) for earlier, later in itertools.pairwise(entrants.values())]
    largest = MAX_SEED + 1 - len(pairs)
    if not 0 <= arguments.seed <= largest:
        raise InputError(f"--seed {arguments.seed}: must be 0 to {largest:,}, because each match has the next one.")
    played = []
    for i, (a, b) in enumerate(pairs):
        played.append(matches.play(environment, a, b, arguments.games, arguments.seed + i))
        console.say(str(played[-1]))
    ratings = elo.elo(played)
    if arguments.json:
        print(json.dumps([rating._asdict() for rating in ratings]))
    else:
        width = max(len(rating.name) for rating in ratings)
        for rating in ratings:
            low, high = rating.interval
            print(f"{rating.name:{width}}  {rating.elo:6.0f}  ({low:.0f} to {high:.0f})")
    if histories:
        by_name = {rating.name: rating for rating in ratings}
        curves = {run: [(step, by_name[name]) for name, step in steps.items()] for run, steps in histories.items()}
        directory = pathlib.Path(next(iter(curves))) if len(curves) == 1 else pathlib.Path()
        levels = [by_name["tactical"], by_name["random"]]
        path = arguments.output or directory / "elo.png"
        console.say(f"picture: {plots.elo_curve(curves, levels, path, title=environment.spec.name)}")
    return 0
