"""Environments by name: `catch` is pure JAX (envs_jax); `envpool:Pong-v5` and `gymnasium:...` run on the host."""

from __future__ import annotations

import importlib
from typing import Any

import envs_jax
from podracer import config as configs
from podracer.types import Environment, HostEnvironments

_HOSTS = {"envpool": "EnvPool", "gymnasium": "Gymnasium"}
"""Prefix, which is also the module's name in `podracer.environments`, to what its classes begin with."""


def options(name: str) -> type:
    """The frozen dataclass of the options of an environment, with their defaults.

    Raises:
      ValueError: for an unknown name, or a package that is not installed.
    """
    prefix, task = _split(name)
    if not prefix:
        return envs_jax.options(name)
    module = _module(prefix)
    return module.options(task) if hasattr(module, "options") else getattr(module, f"{_HOSTS[prefix]}Options")


def make(name: str, **settings: Any) -> Environment | HostEnvironments:
    """Builds an environment, or what makes host environments.

    Args:
      name: one of `envs_jax.names()`, `envpool:TASK` or `gymnasium:ID`.
      **settings: fields of the environment's options dataclass; the others keep their defaults.

    Raises:
      ValueError: for an unknown name or option, a value that the options refuse, a package that is not installed, or
        a space that is not supported.
    """
    prefix, task = _split(name)
    if not prefix:
        return envs_jax.make(name, **settings)
    chosen = configs.from_json(options(name), settings)
    return getattr(_module(prefix), f"{_HOSTS[prefix]}Environments")(task, chosen)


def _split(name: str) -> tuple[str, str]:
    prefix, colon, task = name.partition(":")
    if not colon:
        return "", name
    if prefix not in _HOSTS:
        raise ValueError(f"unknown kind of environment {prefix!r} in {name!r}; {configs.suggest(prefix, _HOSTS)}")
    return prefix, task


def _module(prefix: str) -> Any:
    try:
        return importlib.import_module(f"podracer.environments.{prefix}")
    except ImportError as error:
        raise ValueError(
            f"{prefix}: environments need it installed ({error}); pip install 'podracer[sebulba]'."
        ) from None
