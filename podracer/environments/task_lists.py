"""Several tasks by name, joined by commas, or as a list of names and environments.

podracer train vtrace envpool:CartPole-v1,envpool:Acrobot-v1 --env.union pad
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracer import configs, environments
from podracer.environments import tasks, wrapping
from podracer.environments.host_tasks import HostTasks
from podracer.types import Environment, HostEnvironments

COMMA = ","
"""Joins the names of tasks."""


def text(environment: Any) -> Any:
    """Joins names, without the spaces around them; returns all else as it is."""
    names = split(environment)
    if not names or not all(isinstance(name, str) for name in names):
        return environment
    return COMMA.join(name.strip() for name in names)


def split(environment: Any) -> Sequence[Any] | None:
    """The tasks of a list, or of names with commas between them; None for a single environment.

    Raises:
      ValueError: for an empty name.
    """
    if isinstance(environment, str):
        if COMMA not in environment:
            return None
        names = [name.strip() for name in environment.split(COMMA)]
        if "" in names:
            raise ValueError(f"{environment!r} has an empty name between commas; leave the comma out.")
        return names
    # An environment of one's own may be a tuple with names.
    return environment if type(environment) in (list, tuple) else None


@functools.cache
def options(names: str) -> type:
    """The frozen dataclass of the options of tasks by name: those of each task, and `TasksOptions`.

    An option that several tasks have takes what any of them takes, and has the default of the first.

    Raises:
      ValueError: as in `environments.options`.
    """
    found: dict[str, list[tuple[Any, dataclasses.Field[Any]]]] = {}
    texts: dict[str, str] = {}
    for cls in dict.fromkeys((tasks.TasksOptions, *map(environments.options, split(names) or (names,)))):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, []).append((hints[field.name], field))
        texts = _texts(cls) | texts
    attributes = "".join(f"  {name}: {texts[name]}\n" for name in found if name in texts)
    return dataclasses.make_dataclass(
        "OptionsOfAllTasks",
        [(name, typing.Union[tuple(hint for hint, _ in same)], _field_of(same)) for name, same in found.items()],  # noqa: UP007
        namespace={"__post_init__": configs.check, "__doc__": f"Options of all tasks.\n\nAttributes:\n{attributes}"},
        frozen=True,
    )


def _field_of(same: Sequence[tuple[Any, dataclasses.Field[Any]]]) -> Any:
    """The field of an option that several tasks have; limits where all have the same, for each task checks its own."""
    first = same[0][1]
    metadata = first.metadata if all(field.metadata == first.metadata for _, field in same) else None
    if first.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=first.default_factory, metadata=metadata)
    return dataclasses.field(default=first.default, metadata=metadata)


def _texts(cls: type) -> dict[str, str]:
    """The descriptions of a dataclass's fields, as its docstring has them and those of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        found |= dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", attributes, re.MULTILINE))
    return found


def make(
    things: Sequence[Any],
    settings: Mapping[str, Any],
    wrap: Sequence[str] = (),
    validate: Callable[[Environment], None] = lambda environment: None,
) -> Any:
    """Puts tasks side by side; also a single one, which is then a run of one task.

    Args:
      things: names or environments, as those of `podracer.train`; one that is there twice gets twice the lanes.
      settings: fields of `TasksOptions`, and of the options of tasks by name: each gets those that it has.
      wrap: wrappers of each environment (`wrapping.texts`).
      validate: raises for an object in pure JAX that breaks the protocol (`envs_jax.testing.validate_protocol`).

    Raises:
      ValueError: for tasks that do not fit together, or a setting that none has.
      TypeError: for an object that is no environment.
    """
    ours = {field.name for field in dataclasses.fields(tasks.TasksOptions)}
    used, found = set(ours), {}
    for thing in things:
        key = thing if isinstance(thing, str) else id(thing)
        if key in found:
            continue
        own: dict[str, Any] = {}
        if isinstance(thing, str):
            fields = {field.name for field in dataclasses.fields(environments.options(thing))}
            own = {name: value for name, value in settings.items() if name in fields}
            used |= fields
        made = environments.make(thing, **own) if isinstance(thing, str) else environments.adopt(thing)
        if not isinstance(thing, str) and not isinstance(made, HostEnvironments | tasks.Tasks):
            validate(made)  # a mistake is its own, and not that of a wrapper
        found[key] = wrapping.wrapped(made, wrap)
    for name in settings:
        if name not in used:
            raise ValueError(f"no task has the option {name!r}; {configs.suggest(name, used)}")
    every = [found[thing if isinstance(thing, str) else id(thing)] for thing in things]
    if len({isinstance(one, HostEnvironments) for one in every}) > 1:
        raise ValueError("tasks in pure JAX and tasks of the host cannot be mixed; one driver steps them all.")
    chosen = configs.from_json(tasks.TasksOptions, {name: settings[name] for name in ours if name in settings})
    cls = HostTasks if every and isinstance(every[0], HostEnvironments) else tasks.Tasks
    return cls(every, **vars(chosen))
