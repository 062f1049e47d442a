"""Environments by name: `catch` (envs_jax), `pgx:hex`, `gymnax:...` are JAX; `envpool:...`, `gymnasium:...` are not."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import envs_jax
from envs_jax import adapters
from podracer import configs
from podracer.types import Environment, EnvSpec, HostEnvironments

_KINDS = {
    "envpool": ("EnvPoolEnvironments", "EnvPoolOptions"),
    "gymnasium": ("GymnasiumEnvironments", "GymnasiumOptions"),
    "pgx": ("make", "PgxOptions"),
} | {prefix: ("make", f"{prefix.capitalize()}Options") for prefix in adapters.LIBRARIES}
"""Prefix, which is also a module's name here or in `envs_jax.adapters`, to the names of the maker of environments and
of the options there."""


REMOTE = "remote:"
"""Prefix of an environment that only workers have (docs/remote.md)."""


def options(name: str) -> type:
    """The frozen dataclass of the options of an environment, with their defaults.

    Raises:
      ValueError: for an unknown name, or a package that is not installed and that the options depend on.
    """
    if "," in name:
        return _module_of_tasks().options(name)
    if name.startswith(REMOTE):
        return envs_jax.NoOptions
    prefix, task = _split(name)
    if not prefix:
        return envs_jax.options(name)
    if prefix in adapters.LIBRARIES:  # the same for all environments of a library, which they do not need
        return getattr(importlib.import_module(f"envs_jax.adapters.{prefix}"), _KINDS[prefix][1])
    module = _module(prefix)
    return module.options(task) if hasattr(module, "options") else getattr(module, _KINDS[prefix][1])


def make(name: str, **settings: Any) -> Environment | HostEnvironments:
    """Builds an environment, or a maker of host environments; of several names with commas between them, all together.

    Args:
      name: one of `envs_jax.names()`, `pgx:GAME`, `envpool:TASK`, `gymnasium:ID`, or `PREFIX:ID` of another JAX library
        (`envs_jax.adapters.LIBRARIES`).
      **settings: fields of the environment's options dataclass; the others keep their defaults.

    Raises:
      ValueError: for an unknown name or option, a value that the options refuse, a package that is not installed, or
        a space that is not supported.
    """
    if "," in name:
        return _module_of_tasks().make(_module_of_tasks().split(name), settings)
    if name.startswith(REMOTE):
        raise ValueError(
            f"{name} is stepped by workers alone: train and resume need remote.listen (docs/remote.md), and what else "
            "plays it needs the environment itself, environment=..."
        )
    prefix, task = _split(name)
    if not prefix:
        return envs_jax.make(name, **settings)
    chosen = configs.from_json(options(name), settings)
    return getattr(_module(prefix), _KINDS[prefix][0])(task, chosen)


def _module_of_tasks() -> Any:
    return importlib.import_module("podracer.environments.task_lists")  # which imports this module


ACCEPTED = (
    "a name (see podracer.environments.make), a podracer.types.Environment or HostEnvironments, a gymnasium.Env, or a "
    "class or function without arguments that makes one of these"
)
"""The kinds of objects that can be given as an environment."""


def adopt(thing: Any, settings: Mapping[str, Any] | None = None) -> Environment | HostEnvironments:
    """Takes an object as an environment, or as a maker of environments.

        adopt(MyGymnasiumEnv)  # a class, or `lambda: MyGymnasiumEnv(size=5)`
        adopt(MyGymnasiumEnv(), {"vectorization": "async"})  # every lane is a copy

    Args:
      thing: an `Environment` or `HostEnvironments`; a `gymnasium.Env`; or a class or function without arguments that
        makes one of these.
      settings: fields of `GymnasiumOptions`, for an environment of Gymnasium.

    Raises:
      TypeError: for anything else, or an environment of Gymnasium that does not keep its interface.
      ValueError: for settings that it does not have, or a space that is not supported.
    """
    environment: Any = thing
    # A protocol's methods are also those of the class itself.
    if isinstance(thing, type) or (callable(thing) and not isinstance(thing, Environment | HostEnvironments)):
        environment = _call(thing)
    if gymnasium := sys.modules.get("gymnasium"):  # without it, nothing is of its kind
        if isinstance(environment, gymnasium.Env):
            if environment is not thing:  # made only to look at: some environments can exist only once
                environment.close()
            module = _module("gymnasium")
            return module.GymnasiumEnvironments(thing, configs.from_json(module.GymnasiumOptions, settings or {}))
        if isinstance(environment, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"{type(environment).__name__} is a batch of environments already; give the class of one, or a "
                "function that makes one."
            )
    if settings:
        raise ValueError("env_options belong to an environment given by name; set them on your environment instead.")
    # An incomplete environment of this library passes here: `envs_jax.testing` names its mistakes.
    ours = hasattr(environment, "observe") or isinstance(getattr(environment, "spec", None), EnvSpec)
    if not ours and not isinstance(environment, HostEnvironments):
        raise TypeError(f"{_describe(thing)} is no environment; give {ACCEPTED}.")
    return environment


def _call(thing: Any) -> Any:
    with contextlib.suppress(ValueError):  # of some built-in functions that have no signature
        try:
            inspect.signature(thing).bind()
        except TypeError as error:
            name = getattr(thing, "__qualname__", "the function")
            raise TypeError(f"{name} takes arguments ({error}); give a function without, that calls it.") from None
    return thing()


def _describe(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    return f"{name}()" if name else f"a {type(thing).__name__}"


def names() -> list[str]:
    """Returns our own names, and those of EnvPool, Gymnasium and pgx if installed."""
    found = list(envs_jax.names())
    for prefix in _KINDS:
        if prefix not in adapters.LIBRARIES:  # importing them all would take many seconds
            with contextlib.suppress(ValueError):
                found += names_of(prefix)
    return found


def names_of(prefix: str) -> list[str]:
    """Returns the names of one library.

    Raises:
      ValueError: for a library that there is no adapter of, or that cannot be used here.
    """
    _check_prefix(prefix, prefix)
    return [f"{prefix}:{task}" for task in _module(prefix).tasks()]


def _suggest(name: str) -> str:
    """'did you mean ...?' for an unknown name, from all registries, or the names of our own."""
    candidates = names()
    # The very name first, then newer versions before older ones; one of each registry.
    same = sorted((known for known in candidates if _bare(known) == _bare(name)), reverse=True)
    same.sort(key=lambda known: known.rpartition(":")[2].lower() != name.lower())
    best: dict[str, str] = {}
    for known in same:
        best.setdefault(known.rpartition(":")[0], known)
    same = list(best.values())
    if not same:
        # Our own first: among thousands of names, there is always one like it.
        for group in (envs_jax.names(), candidates):
            bare = {_bare(known): known for known in reversed(group)}
            same = same or [bare[close] for close in difflib.get_close_matches(_bare(name), bare, n=2)]
    if same:
        return f"did you mean {' or '.join(map(repr, same))}? `podracer envs PATTERN` searches for others."
    return (
        f"Known: {', '.join(envs_jax.names())}; `podracer envs PATTERN` searches EnvPool, Gymnasium and pgx too, "
        f"and `podracer envs PREFIX` lists those of {', '.join(adapters.LIBRARIES)}."
    )


def _bare(name: str) -> str:
    """Strips a name of prefix, version, case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^\w+:|-v\d+$", "", name).lower())


def modules_of(names: str) -> list[str]:
    """Returns the modules of names `gymnasium:MODULE:ID`, one name or several with commas between them."""
    split = [name.partition(":") for name in names.split(",")]
    modules = [task.rpartition(":")[0] for prefix, _, task in split if prefix == "gymnasium"]
    return [module for module in modules if module]


def _split(name: str) -> tuple[str, str]:
    prefix, colon, task = name.partition(":")
    if not colon:
        if name not in envs_jax.names():
            raise ValueError(f"unknown environment {name!r}; {_suggest(name)}")
        return "", name
    _check_prefix(prefix, name)
    return prefix, task


def _check_prefix(prefix: str, name: str) -> None:
    if prefix not in _KINDS:
        raise ValueError(f"unknown kind of environment {prefix!r} in {name!r}; {configs.suggest(prefix, _KINDS)}")


def _module(prefix: str) -> Any:
    if prefix in adapters.LIBRARIES:
        return adapters.module(prefix)
    needed = ("envpool", "gymnasium") if prefix == "envpool" else (prefix,)
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(
            f"{prefix}: environments need {' and '.join(missing)}, not installed here: pip install {' '.join(needed)}"
        )
    try:
        return importlib.import_module(f"podracer.environments.{prefix}")
    except ImportError as error:
        raise ValueError(f"{prefix}: environments cannot be used here ({error}).") from None
