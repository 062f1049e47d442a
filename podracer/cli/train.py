"""`podracer train` and `podracer resume`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
from typing import Annotated, Any, Literal

import tyro

import envs_jax
import podracer
from podracer import config as configs
from podracer import environments
from podracer.cli.arguments import InputError, asks_for_help, parse
from podracer.run import rundir
from podracer.run.experiment import AGENTS


def train(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        if not argv or asks_for_help(argv):
            print("usage: podracer train AGENT ENV [options]; add --help behind AGENT and ENV to see the options")
            print(
                f"agents: {', '.join(AGENTS)}\nenvironments: {', '.join(envs_jax.names())}; envpool:TASK, gymnasium:ID"
            )
            return 0
        if argv[0].startswith("-") or argv[0] in AGENTS:
            raise InputError("train needs an agent and an environment: podracer train AGENT ENV [options].")
    agent, environment, *rest = argv if len(argv) > 1 else (*argv, "")
    if agent not in AGENTS:
        swapped = f"did you mean: podracer train {environment} {agent}?" if environment in AGENTS else ""
        raise InputError(f"unknown agent {agent!r}; {swapped or configs.suggest(agent, AGENTS)}")
    options = environments.options(environment)
    config, env = _defaults(agent, environment, options, rest)
    flags = [*_flags("--", podracer.RunConfig), *_flags("--agent.", config)]
    arguments: Any = parse(_train_arguments(config, env), rest, f"podracer train {agent} {environment}", flags)
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


def resume(argv: list[str]) -> int:
    arguments = parse(ResumeArguments, argv, "podracer resume")
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


def _flags(prefix: str, cls: Any) -> list[str]:
    return [prefix + re.sub("_(?!$)", "-", field.name) for field in dataclasses.fields(cls)]


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
