"""`podracer train` and `podracer resume`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import signal
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import envs_jax
import podracer
from podracer import config as configs
from podracer import environments
from podracer.cli.arguments import InputError, asks_for_help, parse
from podracer.run import presets, rundir
from podracer.run.evaluation import check_rendering
from podracer.run.experiment import AGENTS, stored_options


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
    config, env, run = _defaults(agent, environment, options, rest)
    flags = [*_flags("--", podracer.RunConfig), *_flags("--agent.", config)]
    arguments: Any = parse(_train_arguments(config, env, run), rest, f"podracer train {agent} {environment}", flags)
    hyper = {name: list(values) for name, values in vars(arguments.hyper).items() if values}
    env_options = {f.name: getattr(arguments.env, f.name) for f in dataclasses.fields(options)}
    if arguments.gif:
        check_rendering(environments.make(environment, **env_options))
    finals = []
    for seed in arguments.seeds or (arguments.run.seed,):
        directory = arguments.run_dir
        if directory and arguments.seeds:
            directory = directory.with_name(f"{directory.name}-{seed}")
        result = podracer.train(
            agent,
            environment,
            run_dir=directory or rundir.default(agent, environment, seed, resume=arguments.resume),
            resume=arguments.resume,
            config=arguments.agent,
            env_options=env_options,
            hyper={name: values if len(values) > 1 else values[0] for name, values in hyper.items()},
            init_from=arguments.init_from,
            progress=not arguments.quiet,
            **{f.name: getattr(arguments.run, f.name) for f in dataclasses.fields(arguments.run)} | {"seed": seed},
        )
        code = _conclude(result, arguments.gif, arguments.quiet)
        if code:
            return code
        finals.append(result.summary["eval_return_mean"])
    if len(finals) > 1 and not arguments.quiet:
        print(f"{len(finals)} seeds: mean {np.mean(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})")
    return 0


@dataclasses.dataclass(frozen=True)
class ResumeArguments:
    """Continue a run that was stopped, with the settings that are in its directory.

    Attributes:
      run_dir: what `podracer train` wrote.
      total_steps: to train it further than it was to be.
      gif: write an animation of the trained policy.
      quiet: no progress and no report.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    total_steps: int | None = None
    gif: pathlib.Path | None = None
    quiet: bool = False


def resume(argv: list[str]) -> int:
    arguments = parse(ResumeArguments, argv, "podracer resume")
    if arguments.gif:
        stored = rundir.read(arguments.run_dir)
        if "environment" not in stored["own"]:  # else that is what is wrong
            check_rendering(environments.make(stored["env"], **stored_options(stored["env"], stored["env_options"])))
    result = podracer.resume(arguments.run_dir, total_steps=arguments.total_steps, progress=not arguments.quiet)
    return _conclude(result, arguments.gif, arguments.quiet)


def _conclude(result: podracer.Result, gif: pathlib.Path | None, quiet: bool) -> int:
    """What follows training; returns the exit code, which for a run that a signal stopped is a shell's."""
    if not result.summary["complete"]:
        return 128 + signal.Signals[result.summary["stopped_by"]]
    if gif:
        result.animate(gif)
    if not quiet:
        print(f"run directory: {result.run_dir} (curve.png, metrics.jsonl, summary.json, checkpoints/)")
        if gif:
            print(f"animation: {gif}")
    return 0


def _flags(prefix: str, cls: Any) -> list[str]:
    return [prefix + re.sub("_(?!$)", "-", field.name) for field in dataclasses.fields(cls)]


def _defaults(agent: str, environment: str, options: type, argv: list[str]) -> tuple[Any, Any, Any]:
    """What the other flags change: the settings of a preset, if there is one, or of the agent, environment and run."""
    flag = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flag.add_argument("--preset", nargs="?")
    name = flag.parse_known_args(argv)[0].preset  # what is wrong with others is said with all that is wrong
    chosen = presets.find(name, agent, environment) if name in presets.NAMES else presets.Preset()
    return AGENTS[agent][0](**chosen.agent), options(**chosen.env), podracer.RunConfig(**chosen.run)


def _train_arguments(agent_config: Any, env_options: Any, run: podracer.RunConfig) -> type:
    """The dataclass behind `podracer train`: run settings without prefix, `--agent.` and `--env.` with one."""
    arg = tyro.conf.arg
    path, preset = pathlib.Path | None, Literal[presets.NAMES] | None  # type: ignore[valid-type]
    hyper = dataclasses.make_dataclass(
        "Hyper",
        [
            (name, Annotated[tuple[float, ...], arg(help="of all members, or one for each")], ())
            for name in configs.tunables(agent_config)
        ],
        frozen=True,
    )
    return dataclasses.make_dataclass(
        "TrainArguments",
        [
            ("run", Annotated[podracer.RunConfig, arg(name="")], run),
            ("run_dir", Annotated[path, arg(help="directory of the run; a new one in runs/ if None")], None),
            ("resume", Annotated[bool, arg(help="continue the run in it, or train it further")], False),
            ("seeds", Annotated[tuple[int, ...], arg(help="a run for each, one after the other, in RUN_DIR-SEED")], ()),
            ("init_from", Annotated[path, arg(help="directory of a run whose weights to begin with")], None),
            ("gif", Annotated[path, arg(help="write an animation of the trained policy")], None),
            ("quiet", Annotated[bool, arg(help="no progress and no report")], False),
            (
                "preset",
                Annotated[preset, arg(help="settings to begin with (podracer/run/presets.py)")],
                None,
            ),
            ("agent", type(agent_config), agent_config),
            ("env", type(env_options), env_options),
            ("hyper", hyper, hyper()),
        ],
        kw_only=True,
    )
