"""Wrappers by name: `sticky_actions=0.25`, as command lines and run directories have them.

The functions themselves are in `envs_jax.wrappers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from envs_jax import wrappers
from podracer import configs
from podracer.environments import tasks
from podracer.types import Environment

Wrap: TypeAlias = Mapping[str, Any] | Sequence[str]
"""Wrappers in the order in which they are applied: `{"sticky_actions": 0.25, "flatten": ()}`, or the same as texts,
`["sticky_actions=0.25", "flatten"]`. Several arguments are a sequence, and in a text have commas between them."""


def _integer(text: str) -> int:
    if not float(text).is_integer():
        raise ValueError
    return int(float(text))


_PARSERS: dict[str, tuple[Callable[[str], Any], ...]] = {
    "action_repeat": (_integer,),
    "clip_reward": (float, float),
    "flatten": (),
    "hide": (_integer,),
    "pick": (str,),
    "scale_reward": (float,),
    "sticky_actions": (float,),
    "time_limit": (_integer,),
}
"""Parsers of the arguments of each wrapper by name; that of `hide` is for each of its indices."""

_USAGE = {
    "action_repeat": "action_repeat=4",
    "clip_reward": "clip_reward=-1,1",
    "flatten": "flatten",
    "hide": "hide=1,3",
    "pick": "pick=image",
    "scale_reward": "scale_reward=0.1",
    "sticky_actions": "sticky_actions=0.25",
    "time_limit": "time_limit=500",
}


def texts(wrap: Wrap | str) -> list[str]:
    """Returns wrappers as texts, each in one way of writing it, for a run's files.

    Raises:
      ValueError: for a wrapper that there is not, or arguments that it refuses.
    """
    if isinstance(wrap, Mapping):
        wrap = [_joined(name, arguments) for name, arguments in wrap.items()]
    found = []
    for text in [wrap] if isinstance(wrap, str) else wrap:
        name, arguments = _parse(text)
        found.append(_joined(name, arguments))
    return found


def wrapped(environment: Any, wrap: Iterable[str]) -> Any:
    """Wraps an environment, the first wrapper innermost.

    Args:
      environment: an environment in pure JAX.
      wrap: from `texts`.

    Raises:
      ValueError: for wrappers of a host environment, or one that does not fit.
    """
    for text in wrap:
        if not isinstance(environment, Environment):
            name = getattr(getattr(environment, "spec", None), "name", "an environment that workers step")
            remedy = "set its options, --env.* (env_options)"
            if isinstance(environment, tasks.Tasks):
                remedy = "wrap each environment that Tasks is made of"
            elif not name.startswith("envpool:"):
                remedy = "use Gymnasium's own wrappers, in a function that makes the environment"
            raise ValueError(f"wrap={text!r}: wrappers are for environments in pure JAX, not for {name}; {remedy}.")
        name, arguments = _parse(text)
        make = getattr(wrappers, name)
        environment = (make(arguments) if name == "hide" else make(*arguments))(environment)
    return environment


def _parse(text: str) -> tuple[str, list[Any]]:
    """Splits a text into the name of a wrapper and its arguments, which the wrapper accepts."""
    name, equals, rest = str(text).partition("=")
    if name == "randomise":
        raise ValueError(f"wrap={text!r}: it takes functions; wrap the environment with envs_jax.wrappers in Python.")
    if name not in _PARSERS:
        raise ValueError(f"unknown wrapper {name!r}; {configs.suggest(name, _PARSERS)}")
    parsers = _PARSERS[name]
    words = [rest] if name == "pick" else rest.split(",") if equals else []
    if name == "hide":
        parsers = parsers * len(words)
    try:
        if len(words) != len(parsers) or (name in ("hide", "pick") and not rest):
            raise ValueError
        arguments = [parse(word) for parse, word in zip(parsers, words)]
    except (ValueError, OverflowError):
        raise ValueError(f"wrap={text!r}: write it as in {_USAGE[name]}.") from None
    make = getattr(wrappers, name)
    make(arguments) if name == "hide" else make(*arguments)  # which refuses values
    return name, arguments


def _joined(name: str, arguments: Any) -> str:
    """Writes a wrapper as a text."""
    several = arguments if isinstance(arguments, Sequence) and not isinstance(arguments, str) else [arguments]
    return f"{name}={','.join(map(str, several))}" if several else name
