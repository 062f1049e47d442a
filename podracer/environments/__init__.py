"""Environments by name: `catch` (envs_jax) and `pgx:hex` are pure JAX, `envpool:Pong-v5`, `gymnasium:...` are not."""

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
from podracer import configs
from podracer.types import Environment, EnvSpec, HostEnvironments

_KINDS = {
    "envpool": ("EnvPoolEnvironments", "EnvPoolOptions"),
    "gymnasium": ("GymnasiumEnvironments", "GymnasiumOptions"),
    "pgx": ("make", "PgxOptions"),
}
"""Prefix, which is also a module's name in `podracer.environments`, to what makes an environment there, and options."""


REMOTE = "remote:"
"""Prefix of a name that only workers know (docs/remote.md)."""


def options(name: str) -> type:
    """The frozen dataclass of the options of an environment, with their defaults.

    Raises:
      ValueError: for an unknown name, or a package that is not installed.
    """
    if name.startswith(REMOTE):
        return envs_jax.NoOptions
    prefix, task = _split(name)
    if not prefix:
        return envs_jax.options(name)
    module = _module(prefix)
    return module.options(task) if hasattr(module, "options") else getattr(module, _KINDS[prefix][1])


def make(name: str, **settings: Any) -> Environment | HostEnvironments:
    """Builds an environment, or what makes host environments.

    Args:
      name: one of `envs_jax.names()`, `pgx:GAME`, `envpool:TASK` or `gymnasium:ID`.
      **settings: fields of the environment's options dataclass; the others keep their defaults.

    Raises:
      ValueError: for an unknown name or option, a value that the options refuse, a package that is not installed, or
        a space that is not supported.
    """
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


ACCEPTED = (
    "a name (see podracer.environments.make), a podracer.types.Environment or HostEnvironments, a gymnasium.Env, or a "
    "class or function without arguments that makes one of these"
)
"""What can be given as an environment."""


def adopt(thing: Any, settings: Mapping[str, Any] | None = None) -> Environment | HostEnvironments:
    """The environment, or what makes host environments, that an object is or makes.

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
    made: Any = thing
    # A protocol's methods are also those of the class itself.
    if isinstance(thing, type) or (callable(thing) and not isinstance(thing, Environment | HostEnvironments)):
        made = _called(thing)
    if gymnasium := sys.modules.get("gymnasium"):  # without it, nothing is of its kind
        if isinstance(made, gymnasium.Env):
            if made is not thing:  # a look at it; of some environments there may be only one at a time
                made.close()
            module = _module("gymnasium")
            return module.GymnasiumEnvironments(thing, configs.from_json(module.GymnasiumOptions, settings or {}))
        if isinstance(made, gymnasium.vector.VectorEnv):
            raise TypeError(
                f"{type(made).__name__} is a batch of environments already; give the class of one, or a function that "
                "makes one."
            )
    if settings:
        raise ValueError("env_options belong to an environment given by name; set them on your environment instead.")
    # What is meant as an environment of this library is told what it lacks by `envs_jax.testing`.
    ours = hasattr(made, "observe") or isinstance(getattr(made, "spec", None), EnvSpec)
    if not ours and not isinstance(made, HostEnvironments):
        raise TypeError(f"{_describe(thing)} is no environment; give {ACCEPTED}.")
    return made


def _called(thing: Any) -> Any:
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
    """Every name that `make` knows here: our own, and those of EnvPool, Gymnasium and pgx where they are installed."""
    found = list(envs_jax.names())
    for prefix in _KINDS:
        with contextlib.suppress(ValueError):
            found += [f"{prefix}:{task}" for task in _module(prefix).tasks()]
    return found


def _suggest(name: str) -> str:
    """'did you mean ...? Known: ...' for an unknown name, from all registries."""
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
        for those in (envs_jax.names(), candidates):
            bare = {_bare(known): known for known in reversed(those)}
            same = same or [bare[close] for close in difflib.get_close_matches(_bare(name), bare, n=2)]
    hint = f"did you mean {' or '.join(map(repr, same))}? " if same else ""
    return (
        f"{hint}Known: {', '.join(envs_jax.names())}; `podracer envs PATTERN` searches EnvPool, Gymnasium and pgx too."
    )


def _bare(name: str) -> str:
    """A name without prefix, version and spelling."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^\w+:|-v\d+$", "", name).lower())


def module_of(name: str) -> str:
    """The module that is imported for `gymnasium:MODULE:ID`; "" for all other names."""
    prefix, _, task = name.partition(":")
    return task.rpartition(":")[0] if prefix == "gymnasium" else ""


def _split(name: str) -> tuple[str, str]:
    prefix, colon, task = name.partition(":")
    if not colon:
        if name not in envs_jax.names():
            raise ValueError(f"unknown environment {name!r}; {_suggest(name)}")
        return "", name
    if prefix not in _KINDS:
        raise ValueError(f"unknown kind of environment {prefix!r} in {name!r}; {configs.suggest(prefix, _KINDS)}")
    return prefix, task


def _module(prefix: str) -> Any:
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
