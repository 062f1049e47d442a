"""`podracer envs` and `podracer agents`: lists of both."""

from __future__ import annotations

import dataclasses
import sys
import warnings

import numpy as np

import envs_jax
from envs_jax.adapters import LIBRARIES
from podracer import environments, spaces
from podracer.agents.registry import AGENTS
from podracer.cli.arguments import InputError, asks_for_help, refuse_arguments

FEW = 20
"""The most environments in a list with their spaces, which have to be made for that."""


def envs(argv: list[str]) -> int:
    if len(argv) > 1 and not asks_for_help(argv):
        raise InputError(f"envs takes one pattern at most, but got {' '.join(argv)}.")
    if argv and not asks_for_help(argv):
        return _search(argv[0])
    for name in envs_jax.names():
        fields = [(f.name, str(f.default)) for f in dataclasses.fields(envs_jax.options(name))]
        options = ", ".join(f"{option}={value if len(value) < 30 else '...'}" for option, value in fields)
        print(f"{name:<14} {_spaces(name)}; options: {options or 'none'}")
    print("pgx:GAME       Go, chess, shogi, hex and other games of pgx (pip install pgx), such as pgx:go_9x9")
    print(f"PREFIX:ID      other JAX libraries, each of which podracer envs PREFIX lists: {', '.join(LIBRARIES)}")
    print(
        "envpool:TASK   every task of EnvPool (pip install envpool gymnasium); podracer envs pong finds envpool:Pong-v5"
    )
    print(
        "gymnasium:ID   every environment that Gymnasium (pip install gymnasium) can make, such as gymnasium:Acrobot-v1"
    )
    return 0


def _search(pattern: str) -> int:
    prefix = pattern.partition(":")[0]
    if pattern in LIBRARIES:
        print("\n".join(environments.names_of(pattern)))
        return 0
    names = environments.names_of(prefix) if prefix in LIBRARIES else environments.names()
    found = [name for name in names if pattern.lower() in name.lower()]
    if not found:
        raise InputError(f"no environment that is installed here has {pattern!r} in its name.")
    width = max(map(len, found))
    for name in found:
        print(f"{name:<{width}}  {_spaces(name)}" if len(found) <= FEW else name)
    return 0


def _spaces(name: str) -> str:
    """The spaces of an environment in a few words, or the reason why it cannot be made."""
    try:
        with warnings.catch_warnings():  # of versions that have successors
            warnings.simplefilter("ignore")
            spec = environments.make(name).spec
    except (ValueError, TypeError) as error:
        return f"cannot be used here: {error}"
    return f"observation {_brief(spec.observation_space)}; action {_brief(spec.action_space)}"


def _brief(space: spaces.Space) -> str:
    match space:
        case spaces.Discrete():
            return f"1 of {space.num_values}"
        case spaces.MultiDiscrete():
            return "1 of each of " + ", ".join(map(str, space.num_values))
        case spaces.Box():
            # Some say that they have no bounds with the largest number there is, some with the smallest.
            plain = all(
                np.all((np.abs(x) < 1e9) & ((np.abs(x) > 1e-9) | (x == 0)))
                for x in map(np.asarray, (space.low, space.high))
            )
            return f"{space.dtype} {list(space.shape)}" + (f" in [{space.low}, {space.high}]" if plain else "")
        case spaces.Dict():
            return "{" + ", ".join(f"{name}: {_brief(item)}" for name, item in space.items) + "}"


def agents(argv: list[str]) -> int:
    refuse_arguments("agents", argv)
    for name, (cls, make) in AGENTS.items():
        summary = (sys.modules[make.__module__].__doc__ or "").strip().splitlines()[0]
        print(f"{name:<8} {summary}  settings: podracer train {name} catch --help ({cls.__name__})")
    return 0
