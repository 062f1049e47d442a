"""`podracer train` and `podracer resume`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import envs_jax
import podracer
from podracer import atari, configs, environments
from podracer.agents import registry
from podracer.agents.registry import AGENTS
from podracer.cli.arguments import InputError, asks_for_help, parse
from podracer.environments import imports, wrapping
from podracer.evaluation.rendering import check_rendering
from podracer.pod.settings import Pod
from podracer.population import config as population
from podracer.population.config import PBT
from podracer.remote.settings import Remote
from podracer.run import rundir
from podracer.run.config import SEBULBA
from podracer.system import console
from podracer.training import presets
from podracer.training.resolve import stored_options

WRAP = "wrappers of a pure-JAX environment, in order, as sticky_actions=0.25 time_limit=500 (docs/environments.md)"
"""The help of `--wrap`."""

REMOTE = dataclasses.make_dataclass(
    "Remote",
    [(name, hint, getattr(Remote(), name)) for name, hint in typing.get_type_hints(Remote).items()],
    namespace={"__doc__": Remote.__doc__},
    frozen=True,
)
"""`Remote` without its checks: settings that were not typed may be in a run's directory."""

EVOLUTION = dataclasses.make_dataclass(
    "Evolution",
    [
        (field.name, int | None if field.name == "interval" else hint, getattr(PBT, field.name, None))
        for field, hint in zip(dataclasses.fields(PBT), typing.get_type_hints(PBT).values())
    ],
    namespace={"__doc__": PBT.__doc__},
    frozen=True,
)
"""`PBT` without its checks: an interval asks for it."""


def train(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        if not argv or asks_for_help(argv):
            print("usage: podracer train AGENT ENV [options]; add --help after AGENT and ENV to see the options,")
            print("and --arch sebulba to see those of Sebulba, which host environments have anyway")
            own = ", ".join(envs_jax.names())
            print(f"agents: {', '.join(AGENTS)}\nenvironments: {own}; pgx:GAME, envpool:TASK, gymnasium:ID")
            return 0
        if argv[0].startswith("-") or argv[0] in AGENTS:
            raise InputError("train needs an agent and an environment: podracer train AGENT ENV [options].")
    agent, environment, arguments, typed, hyper = _parse(argv)
    if len(arguments.seeds) > 1 and arguments.remote.listen:
        raise InputError("--seeds with --remote.listen: workers go home when the first run ends; train one at a time.")
    if arguments.gif:
        check_rendering(environments.make(environment, **vars(arguments.env)))
    if arguments.seeds and "seed" in typed.run:
        raise InputError("--seed with --seeds: a run has one of the seeds each; leave --seed out.")
    finals = []
    seeds = arguments.seeds or (arguments.run.seed,)
    for seed in seeds:
        directory = arguments.run_dir
        if directory and arguments.seeds:
            directory = directory.with_name(f"{directory.name}-{seed}")
        with _directory(directory, arguments, agent, environment, seed) as run_dir:
            result, stopped_by = _result(
                podracer.train,
                agent,
                environment,
                run_dir=run_dir,
                resume=arguments.resume,
                hyper=hyper,
                progress=not arguments.quiet,
                topology=_topology(arguments),
                remote=_remote(arguments, argv),
                pbt=_pbt(arguments, argv),
                pbt_dir=arguments.pbt_dir,
                trust=arguments.trust,
                **{**_keywords(arguments, typed), "seed": seed},
            )
        code = _conclude(result, arguments.gif, arguments.quiet)
        if code:
            return code
        if stopped_by and seed != seeds[-1]:
            return 128 + stopped_by  # this seed is complete, and the next are not to begin
        finals.append(result.summary["eval_return_mean"])
    if len(finals) > 1 and not arguments.quiet:
        spread = f"{min(finals):.3f} to {max(finals):.3f}"
        console.write(sys.stdout, f"{len(finals)} seeds: mean {np.mean(finals):.3f} ({spread})\n")
    return 0


def _keywords(arguments: Any, typed: presets.Settings) -> dict[str, Any]:
    """The settings of `podracer.train` that decide a run's result, but for the tunable numbers."""
    names = {name: getattr(arguments, name) for name in ("wrap", "preset", "protocol", "init_from")}
    return {"config": typed.agent, "env_options": typed.env, **names, **typed.run}


def parsed(argv: list[str]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """The settings of `podracer.train` for the arguments of a run, its tunable numbers, and True for `--quiet`.

    Raises:
      ValueError: for arguments that `podracer train` would refuse.
    """
    _, _, arguments, typed, hyper = _parse(argv)
    return {**_keywords(arguments, typed), "trust": arguments.trust}, hyper, arguments.quiet


def _directory(
    requested: pathlib.Path | None, arguments: Any, agent: str, environment: str, seed: int
) -> contextlib.AbstractContextManager[pathlib.Path]:
    """The run directory: as typed, or one in runs/; process 0 of a pod makes it for all, once they have met."""
    if requested is None and not arguments.resume and _topology(arguments) == "local":
        return rundir.new_default(agent, environment, seed)
    return contextlib.nullcontext(requested or rundir.default(agent, environment, seed, resume=arguments.resume))


def _parse(argv: list[str]) -> tuple[str, str, Any, presets.Settings, dict[str, Any]]:
    """The agent, the environment, all arguments, those of them that were typed, and the tunable numbers."""
    agent, environment, *rest = argv if len(argv) > 1 else (*argv, "")
    if agent not in AGENTS:
        if environment in AGENTS:
            raise InputError(f"unknown agent {agent!r}; did you mean: podracer train {environment} {agent}?")
        raise InputError(registry.unknown(agent))
    options = environments.options(environment)
    config, env, run = _defaults(agent, environment, options, rest)
    tunables = configs.tunables(config)
    flags = [*_flags("--hyper.", tunables), *_flags("--", vars(run)), *_flags("--agent.", vars(config))]
    flags += _flags("--pbt.", vars(EVOLUTION()))
    boxes = {
        "sebulba": _wants_sebulba(environment, rest),
        "pod": any(w.startswith(("--topology", "--pod.")) for w in rest),
        "remote": any(w.startswith("--remote.") for w in rest) or environment.startswith(environments.REMOTE),
    }
    boxes["pbt"] = not boxes["sebulba"] or any(w.startswith("--pbt") for w in rest)
    cls = _train_arguments(agent, config, env, run, boxes)
    arguments: Any = parse(cls, rest, f"podracer train {agent} {environment}", flags)
    run_settings = _typed(rest, "--", vars(run), vars(arguments.run) | vars(arguments.sebulba))
    env_options = _typed(rest, "--env.", vars(env), vars(arguments.env))
    hyper = {name: list(values) for name, values in vars(arguments.hyper).items() if values}
    hyper = {name: values if len(values) > 1 else values[0] for name, values in hyper.items()}
    agent_config = _typed(rest, "--agent.", vars(config), vars(arguments.agent))
    return agent, environment, arguments, presets.Settings(agent_config, run_settings, env_options), hyper


def settings(argv: list[str]) -> dict[str, Any]:
    """The settings that decide the result of `podracer train` with these arguments, in JSON's types; nothing is made or
    compiled.

    Raises:
      ValueError: for arguments that it would refuse.
    """
    agent, environment, arguments, typed, hyper = _parse(argv)
    merged = presets.merge(agent, environment, arguments.preset, arguments.protocol, typed)
    optional = {"wrap": wrapping.texts(arguments.wrap)} if arguments.wrap else {}
    pbt = population.of(_pbt(arguments, argv))
    optional |= {"pbt": configs.to_json(pbt)} if pbt else {}
    run = configs.to_json(configs.from_json(podracer.RunConfig, merged.run))
    return optional | {
        "agent": agent,
        "preset": arguments.preset,
        "protocol": merged.names.get("protocol"),
        "agent_config": configs.to_json(configs.from_json(AGENTS[agent][0], merged.agent)),
        "env_options": configs.to_json(environments.options(environment)(**merged.env)),
        "run": run | {"reset_pool": run["reset_pool"] or 0},  # None and 0 give equal results
        "hyper": configs.to_json(hyper),
        "init_from": None if arguments.init_from is None else str(arguments.init_from),
    }


@dataclasses.dataclass(frozen=True)
class ResumeArguments:
    """Continue a run that was stopped, with the settings of its directory.

    Attributes:
      run_dir: the run directory.
      total_steps: steps to train, if more than before.
      gif: write an animation of the trained policy.
      quiet: print no progress and no report.
      topology: "local", or "pod" for many processes.
      pod: address of a pod's processes, if no cluster has it.
      remote: address for workers that step the environments; the run's own settings by default.
      trust: import the module of the environment that the run names, which runs its code.
    """

    run_dir: tyro.conf.Positional[pathlib.Path]
    total_steps: int | None = None
    gif: pathlib.Path | None = None
    quiet: bool = False
    topology: Literal["local", "pod"] = "local"
    pod: Pod = dataclasses.field(default_factory=Pod)
    remote: REMOTE = dataclasses.field(default_factory=REMOTE)  # type: ignore[valid-type]
    trust: bool = False


def resume(argv: list[str]) -> int:
    arguments = parse(ResumeArguments, argv, "podracer resume")
    if arguments.gif:
        stored = rundir.read(arguments.run_dir)
        # Else that is what is wrong, or the workers'.
        if "environment" not in stored["own"] and not stored["env"].startswith(environments.REMOTE):
            imports.check_name(arguments.run_dir, stored, arguments.trust)
            check_rendering(environments.make(stored["env"], **stored_options(stored["env"], stored["env_options"])))
    result, _ = _result(
        podracer.resume,
        arguments.run_dir,
        total_steps=arguments.total_steps,
        progress=not arguments.quiet,
        topology=_topology(arguments),
        remote=_remote(arguments, argv),
        trust=arguments.trust,
    )
    return _conclude(result, arguments.gif, arguments.quiet)


def _result(function: Callable[..., podracer.Result], *arguments: Any, **named: Any) -> tuple[podracer.Result, int]:
    """Calls `function`; returns the result, also of a run that a signal stopped, and the signal's number, or 0."""
    try:
        return function(*arguments, **named), 0
    except podracer.Interrupted as error:
        return error.result, signal.Signals[error.signal]


def _conclude(result: podracer.Result, gif: pathlib.Path | None, quiet: bool) -> int:
    """Writes the animation and a report; returns the exit code, which is a shell's if a signal stopped the run."""
    if not result.summary["complete"]:
        return 128 + signal.Signals[result.summary["stopped_by"]]
    if jax.process_index():
        return 0  # of a pod, process 0 speaks
    if gif:
        result.animate(gif)
    if not quiet:
        lines = [f"run directory: {result.run_dir} (curve.png, metrics.jsonl, summary.json, checkpoints/)"]
        lines += [f"animation: {gif}"] if gif else []
        console.write(sys.stdout, "\n".join(lines) + "\n")
    return 0


def _topology(arguments: Any) -> Any:
    """The topology of the arguments; any setting of a pod asks for a pod."""
    return arguments.pod if arguments.pod != Pod() else arguments.topology


def _remote(arguments: Any, argv: list[str]) -> dict[str, Any] | None:
    """The settings of remote environments that were typed, or None."""
    return _typed(argv, "--remote.", vars(Remote()), vars(arguments.remote)) or None


def _pbt(arguments: Any, argv: list[str]) -> dict[str, Any] | None:
    """The settings of population based training that were typed, or None."""
    return _typed(argv, "--pbt.", vars(EVOLUTION()), vars(arguments.pbt)) or None


def _flags(prefix: str, settings: Iterable[str]) -> list[str]:
    return [prefix + re.sub("_(?!$)", "-", name) for name in settings]


def _wants_sebulba(environment: str, argv: list[str]) -> bool:
    """Returns True if help should list Sebulba's settings: they apply to this run, or one of them was typed."""
    words = {part.replace("_", "-") for word in argv for part in word.split("=")}
    flags = [*_flags("--", SEBULBA), *_flags("--no-", SEBULBA)]
    return ":" in environment or not words.isdisjoint(["sebulba", *flags])


def _typed(argv: list[str], prefix: str, defaults: Mapping[str, Any], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a user typed; some may equal the values that help shows."""
    plain = lambda flag: flag.replace("_", "-")  # noqa: E731
    typed = {plain(word.partition("=")[0]) for word in argv}
    was_typed = lambda name: not typed.isdisjoint({plain(f"{prefix}{name}"), plain(f"{prefix}no-{name}")})  # noqa: E731
    return {name: value for name, value in parsed.items() if value != defaults[name] or was_typed(name)}


def _defaults(agent: str, environment: str, options: type, argv: list[str]) -> tuple[Any, Any, Any]:
    """The defaults of all other flags: settings of a preset and protocol, if any, or of the agent, environment and
    run."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--preset", nargs="?")
    flags.add_argument("--protocol", nargs="?")
    named = flags.parse_known_args(argv)[0]  # what is wrong with others is said with all that is wrong
    merged = presets.merge(agent, environment, named.preset, named.protocol, presets.Settings())
    return AGENTS[agent][0](**merged.agent), options(**merged.env), podracer.RunConfig(**merged.run)


def _run_settings(run: podracer.RunConfig, of_sebulba: bool) -> type:
    """`RunConfig`'s fields without prefix: those of Sebulba alone, in a box of their own, or the others."""
    hints, without = typing.get_type_hints(podracer.RunConfig), tyro.conf.arg(prefix_name=False)
    chosen = {name: value for name, value in vars(run).items() if (name in SEBULBA) == of_sebulba}
    return dataclasses.make_dataclass(
        "RunSettings",
        [(name, Annotated[hints[name], without], value) for name, value in chosen.items()],
        namespace={"__doc__": podracer.RunConfig.__doc__},
        frozen=True,
    )


def _one_of(names: Iterable[str]) -> Any:
    return Literal[tuple(names)] | None if names else None  # type: ignore[valid-type]


def _train_arguments(
    agent: str, agent_config: Any, env_options: Any, run: podracer.RunConfig, boxes: Mapping[str, bool]
) -> type:
    """The dataclass of `podracer train`'s options: run settings without prefix, `--agent.` and `--env.` with one."""
    arg = tyro.conf.arg
    own, sebulba = _run_settings(run, False), _run_settings(run, True)
    box = arg(help="Settings of the run that only Sebulba has.") if boxes["sebulba"] else tyro.conf.Suppress
    pod = arg(help="Where the processes of a pod meet, if no cluster says so.") if boxes["pod"] else tyro.conf.Suppress
    remote = arg(help="Where workers connect that step the environments.") if boxes["remote"] else tyro.conf.Suppress
    pbt = arg(help="Population based training (docs/populations.md).") if boxes["pbt"] else tyro.conf.Suppress
    path, preset, protocol = pathlib.Path | None, _one_of(presets.names(agent)), _one_of(atari.PROTOCOLS)
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
            ("run", Annotated[own, arg(name="")], own()),
            ("run_dir", Annotated[path, arg(help="directory of the run; a new one in runs/ if None")], None),
            ("resume", Annotated[bool, arg(help="continue the run in it, or train it further")], False),
            ("seeds", Annotated[tuple[int, ...], arg(help="a run for each, one after the other, in RUN_DIR-SEED")], ()),
            ("init_from", Annotated[path, arg(help="directory of a run whose weights to begin with")], None),
            ("trust", Annotated[bool, arg(help="import the module that the run of init_from names")], False),
            ("gif", Annotated[path, arg(help="write an animation of the trained policy")], None),
            ("quiet", Annotated[bool, arg(help="no progress and no report")], False),
            (
                "preset",
                Annotated[preset, arg(help="settings to begin with (podracer/training/presets.py)")],
                None,
            ),
            (
                "protocol",
                Annotated[protocol, arg(help="how a game of Atari is played (podracer/atari/protocols.py)")],
                None,
            ),
            ("wrap", Annotated[tuple[str, ...], arg(help=WRAP)], ()),
            ("agent", type(agent_config), agent_config),
            ("env", type(env_options), env_options),
            ("sebulba", Annotated[sebulba, box], sebulba()),
            ("hyper", hyper, hyper()),
            ("topology", Annotated[Literal["local", "pod"], arg(help="of one process, or of many")], "local"),
            ("pod", Annotated[Pod, pod], Pod()),
            ("remote", Annotated[REMOTE, remote], REMOTE()),
            ("pbt", Annotated[EVOLUTION, pbt], EVOLUTION()),
            ("pbt_dir", Annotated[path, arg(help="directory in which runs of Sebulba are the members")], None),
        ],
        kw_only=True,
    )
