"""The command line: `podracer train | resume | eval | plot | envs | agents | bench`.

Bad input gives one line on stderr and exit code 2; a run that fails gives one line and exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import jax
import tyro

import envs_jax
import podracer
from podracer import config as configs
from podracer import environments, metrics, plots, rundir
from podracer.bench import anakin, replay, sebulba
from podracer.experiment import AGENTS

Arguments = TypeVar("Arguments")

USAGE = """podracer: reinforcement learning on the accelerator

  podracer train AGENT ENV [options]      train; `podracer train ppo cartpole --help` lists the options
  podracer resume RUN_DIR [options]       continue a run that was stopped
  podracer eval RUN_DIR [options]         evaluate a trained policy
  podracer plot RUN_DIR... [-o FILE]      draw learning curves
  podracer envs | agents                  what there is
  podracer bench anakin|sebulba|replay    measure speed
  podracer --version"""


class InputError(ValueError):
    """What the user typed cannot be used."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its code."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Runs a command; returns 0, 1 for a run that failed, or 2 for bad input."""
    try:
        return _dispatch(argv)
    except (ValueError, TypeError) as error:
        return _complain(error, 2)
    except (podracer.TrainingDivergedError, podracer.ActorError, podracer.CheckpointError, OSError) as error:
        return _complain(error, 1)
    except jax.errors.JaxRuntimeError as error:  # out of memory on the device, above all
        return _complain(str(error).partition("\n")[0], 1)
    except KeyboardInterrupt:
        return _complain("interrupted; the newest checkpoint is intact.", 130)


def _dispatch(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"podracer {podracer.__version__}")
        return 0
    if command not in COMMANDS:
        raise InputError(f"unknown command {command!r}; {configs.suggest(command, COMMANDS)}")
    try:
        return COMMANDS[command](argv[1:])
    except SystemExit as exit_:  # tyro's way out of --help
        if exit_.code in (0, None):
            return 0
        raise


def _complain(error: object, code: int) -> int:
    print(f"podracer: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parse(cls: Callable[..., Arguments], argv: list[str], prog: str) -> Arguments:
    """Parses flags into a dataclass; tyro's box of an error becomes one line."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=argv, prog=prog)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise InputError(f"{_unbox(captured.getvalue())} (see {prog} --help)") from None


def _unbox(box: str) -> str:
    """What tyro's box says, without its title, borders and help: one line."""
    # Sections are separated by lines of box characters, or of hyphens where the terminal has no others.
    sections = [" ".join(section.split()) for section in re.split(r".*[─-]{5,}.*", re.sub("[│╭╮╰╯]", " ", box))]
    message, hints = sections[1], sections[2:]
    message = re.sub(r"^Error parsing (?:(--\S+): |\S+: )", lambda found: f"{found[1]}: " if found[1] else "", message)
    message = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not an integer", message)
    message = re.sub(r"could not convert string to float: ('.*')", r"\1 is not a number", message)
    flag = next((re.search(r"--\S+", hint) for hint in hints if hint.startswith("Perhaps you meant")), None)
    return f"{message}; did you mean {flag[0]}?" if flag else message


# train


def _train(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        if not argv or _asks_for_help(argv):
            print("usage: podracer train AGENT ENV [options]; add --help behind AGENT and ENV to see the options")
            print(
                f"agents: {', '.join(AGENTS)}\nenvironments: {', '.join(envs_jax.names())}; envpool:TASK, gymnasium:ID"
            )
            return 0
        raise InputError("train needs an agent and an environment: podracer train AGENT ENV [options].")
    agent, environment, *rest = argv
    if agent not in AGENTS:
        raise InputError(f"unknown agent {agent!r}; {configs.suggest(agent, AGENTS)}")
    options = environments.options(environment)
    config, env = _defaults(agent, environment, options, rest)
    arguments: Any = _parse(_train_arguments(config, env), rest, f"podracer train {agent} {environment}")
    directory = arguments.run_dir or rundir.default(agent, environment, arguments.run.seed, resume=arguments.resume)
    result = podracer.train(
        agent,
        environment,
        run_dir=directory,
        resume=arguments.resume,
        config=arguments.agent,
        env_options={f.name: getattr(arguments.env, f.name) for f in dataclasses.fields(options)},
        progress=not arguments.quiet,
        **{f.name: getattr(arguments.run, f.name) for f in dataclasses.fields(arguments.run)},
    )
    return _conclude(result, arguments.gif, arguments.quiet)


@dataclasses.dataclass(frozen=True)
class ResumeArguments:
    """Continue a run that was stopped, with the settings that are in its directory.

    Attributes:
      run_dir: what `podracer train` wrote.
      gif: write an animation of the trained policy.
      quiet: no progress and no report.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    gif: pathlib.Path | None = None
    quiet: bool = False


def _resume(argv: list[str]) -> int:
    arguments = _parse(ResumeArguments, argv, "podracer resume")
    result = podracer.resume(arguments.run_dir, progress=not arguments.quiet)
    return _conclude(result, arguments.gif, arguments.quiet)


def _conclude(result: podracer.Result, gif: pathlib.Path | None, quiet: bool) -> int:
    """What follows training."""
    if result.summary["complete"]:
        if gif:
            result.animate(gif)
        if not quiet:
            _report(result, gif)
    return 0


def _asks_for_help(argv: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(argv)


def _defaults(agent: str, environment: str, options: type, argv: list[str]) -> tuple[Any, Any]:
    """What the other flags change: the settings of a preset, if there is one, or of the agent and environment."""
    preset = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset.add_argument("--preset", nargs="?")
    if preset.parse_known_args(argv)[0].preset != "atari":  # what is wrong with others is said with all that is wrong
        return AGENTS[agent][0](), options()
    if environment.startswith("envpool:"):
        from podracer import atari  # which needs Gymnasium

        config, env = atari.preset(agent)
        if type(env) is options:
            return config, env
    raise InputError(f"--preset atari: {environment} is not a game of Atari, such as envpool:Pong-v5.")


def _train_arguments(agent_config: Any, env_options: Any) -> type:
    """The dataclass behind `podracer train`: run settings without prefix, `--agent.` and `--env.` with one."""
    arg = tyro.conf.arg
    path, preset = pathlib.Path | None, Literal["atari"] | None
    return dataclasses.make_dataclass(
        "TrainArguments",
        [
            ("run", Annotated[podracer.RunConfig, arg(name="")], podracer.RunConfig()),
            ("run_dir", Annotated[path, arg(help="directory of the run; a new one in runs/ if None")], None),
            ("resume", Annotated[bool, arg(help="continue the run in it")], False),
            ("gif", Annotated[path, arg(help="write an animation of the trained policy")], None),
            ("quiet", Annotated[bool, arg(help="no progress and no report")], False),
            ("preset", Annotated[preset, arg(help="settings to begin with: those of the agent's paper")], None),
            ("agent", type(agent_config), agent_config),
            ("env", type(env_options), env_options),
        ],
        kw_only=True,
    )


def _report(result: podracer.Result, gif: pathlib.Path | None) -> None:
    summary = result.summary
    print(
        f"{summary['agent']} on {summary['env']}: return {summary['eval_return_mean']:.3f} ± "
        f"{summary['eval_return_std']:.3f} over {summary['eval_episodes']} episodes after {summary['env_steps']:,} "
        f"steps ({summary['train_seconds']:.1f} s at {summary['steps_per_second']:,.0f} steps/s, "
        f"compiled in {summary['compile_seconds']:.1f} s)"
    )
    print(f"run directory: {result.run_dir} (curve.png, metrics.jsonl, summary.json, checkpoints/)")
    if gif:
        print(f"animation: {gif}")


# eval and plot


@dataclasses.dataclass(frozen=True)
class EvalArguments:
    """Evaluate a trained policy.

    Attributes:
      run_dir: what `podracer train` wrote.
      episodes: how many whole episodes to play.
      seed: of the episodes.
      member: of a population.
      gif: also write an animation of one episode.
      json: print JSON instead of words.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    episodes: int = 100
    seed: int = 0
    member: int = 0
    gif: pathlib.Path | None = None
    json: bool = False


def _eval(argv: list[str]) -> int:
    arguments = _parse(EvalArguments, argv, "podracer eval")
    result = podracer.load(arguments.run_dir)
    evaluation = result.evaluate(arguments.episodes, seed=arguments.seed, member=arguments.member)
    if arguments.json:
        figures = {"mean": evaluation.mean, "std": evaluation.std, "interval": evaluation.interval}
        print(json.dumps(figures | {"episodes": evaluation.episodes, "unfinished": evaluation.unfinished}))
    else:
        print(f"{result.agent.name} on {result.description['env']}: {evaluation}")
    if arguments.gif:
        print(
            f"animation: {result.animate(arguments.gif, seed=arguments.seed, member=arguments.member)}", file=sys.stderr
        )
    return 0


@dataclasses.dataclass(frozen=True)
class PlotArguments:
    """Draw learning curves.

    Attributes:
      run_dirs: what `podracer train` wrote.
      output: the picture; its suffix chooses the format.
      metric: what to draw; return if None.
    """

    run_dirs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    output: Annotated[pathlib.Path, tyro.conf.arg(aliases=["-o"])] = pathlib.Path("curve.png")
    metric: str | None = None


def _plot(argv: list[str]) -> int:
    arguments = _parse(PlotArguments, argv, "podracer plot")
    if not arguments.run_dirs:
        raise InputError("plot needs one or more run directories.")
    names = [directory.resolve().name for directory in arguments.run_dirs]
    histories = {}
    for directory, name in zip(arguments.run_dirs, names):
        if not (directory / "metrics.jsonl").exists():
            raise InputError(f"{directory} holds no run: there is no metrics.jsonl in it.")
        label = name if names.count(name) == 1 else str(directory)
        histories[label] = metrics.read(directory / "metrics.jsonl")
    print(plots.learning_curve(histories, arguments.output, metric=arguments.metric))
    return 0


# envs, agents, bench


def _envs(argv: list[str]) -> int:
    _refuse_arguments("envs", argv)
    for name in envs_jax.names():
        spec = envs_jax.make(name).spec
        fields = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(envs_jax.options(name)))
        print(f"{name:<14} {spec.action_space}   options: {fields or 'none'}")
    print("envpool:TASK   every task of EnvPool, such as envpool:Pong-v5 (pip install 'podracer[sebulba]')")
    print("gymnasium:ID   every environment that Gymnasium can make, such as gymnasium:Acrobot-v1")
    return 0


def _agents(argv: list[str]) -> int:
    _refuse_arguments("agents", argv)
    for name, (cls, make) in AGENTS.items():
        summary = (sys.modules[make.__module__].__doc__ or "").strip().splitlines()[0]
        print(f"{name:<8} {summary}  settings: podracer train {name} catch --help ({cls.__name__})")
    return 0


def _refuse_arguments(command: str, argv: list[str]) -> None:
    if argv and not _asks_for_help(argv):
        raise InputError(f"{command} takes no arguments, but got {' '.join(argv)}.")


def _bench(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print("usage: podracer bench anakin|sebulba|replay [options]; podracer bench anakin --help lists the options")
        return 0
    if not argv or argv[0] not in BENCHES:
        given = f", not {argv[0]!r}" if argv else ""
        raise InputError(f"bench needs what to measure: podracer bench anakin|sebulba|replay{given}.")
    arguments, main = BENCHES[argv[0]]
    return main(_parse(arguments, argv[1:], f"podracer bench {argv[0]}"))


BENCHES: dict[str, tuple[type, Callable[..., int]]] = {
    "anakin": (anakin.AnakinArguments, anakin.main),
    "sebulba": (sebulba.SebulbaArguments, sebulba.main),
    "replay": (replay.ReplayArguments, replay.main),
}

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "plot": _plot,
    "envs": _envs,
    "agents": _agents,
    "bench": _bench,
}
