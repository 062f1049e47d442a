"""Environments of other JAX libraries: `gymnax:CartPole-v1` by name, `from_gymnax(env)` for an object of your own.

One module for each library, named after the prefix. It imports the library only where it makes one of its environments
by name. `convert` has what they share.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from types import ModuleType
from typing import NamedTuple

__all__ = ["LIBRARIES", "check", "module"]


class Library(NamedTuple):
    """A library that an adapter needs.

    Attributes:
      package: the name that the library is imported by.
      requirements: the words of `pip install`; the first one is the library itself, with its oldest version.
      also: further packages that it imports without declaring them.
    """

    package: str
    requirements: tuple[str, ...]
    also: tuple[str, ...] = ()


LIBRARIES = {
    "brax": Library("brax", ("brax>=0.14.2",)),
    "craftax": Library("craftax", ("craftax>=1.6.1",)),
    "gymnax": Library("gymnax", ("gymnax>=1.0", "six"), ("six",)),
    "jumanji": Library("jumanji", ("jumanji>=1.1",)),
    "navix": Library("navix", ("navix>=0.7.4",)),
    "playground": Library("mujoco_playground", ("playground>=0.2",)),
    "xminigrid": Library("xminigrid", ("xminigrid>=0.9.3",)),
}
"""The libraries by prefix, which is also the name of the adapter's module and of the extra that installs it."""

TOO_OLD = {"gymnax": ", where a time limit counts as a termination"}
"""Reasons against older versions, beside that nobody has tried them."""


def module(prefix: str) -> ModuleType:
    """Imports a library and its adapter.

    Raises:
      ValueError: for a library that is not installed, is too old or cannot be imported.
    """
    check(prefix)
    from envs_jax.adapters import convert  # which needs JAX

    with convert.making(f"{prefix}: environments"):
        importlib.import_module(LIBRARIES[prefix].package)
    return importlib.import_module(f"{__name__}.{prefix}")


def check(prefix: str) -> None:
    """Checks that a library is installed, in a version that the adapter can use.

    Raises:
      ValueError: if not; it says how to install it.
    """
    library = LIBRARIES[prefix]
    install = " ".join(f"'{each}'" if ">" in each else each for each in library.requirements)
    missing = [name for name in (library.package, *library.also) if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"{prefix}: environments need {' and '.join(missing)}, not installed here: pip install {install}"
        )
    distribution, _, oldest = library.requirements[0].partition(">=")
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return  # a source tree
    if _numbers(found) < _numbers(oldest):
        raise ValueError(
            f"{prefix}: environments need {distribution} {oldest} or later, but {found} is installed"
            f"{TOO_OLD.get(prefix, '')}: pip install -U {install}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
