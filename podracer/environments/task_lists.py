"""Several tasks by name, joined by commas, or as a list of names and environments.

podracer train vtrace envpool:CartPole-v1,envpool:Acrobot-v1 --env.union pad
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from podracer import configs, environments
from podracer.environments import tasks, wrapping
from podracer.environments.host_tasks import HostTasks
from podracer.types import HostEnvironments

COMMA = ","
"""Joins the names of tasks."""


def text(environment: Any) -> Any:
    """Joins a list of names; returns all else as it is."""
    names = type(environment) in (list, tuple) and environment and all(isinstance(name, str) for name in environment)
    return COMMA.join(environment) if names else environment


def split(environment: Any) -> Sequence[Any] | None:
    """The tasks of a list, or of names with commas between them; None for a single environment."""
    if isinstance(environment, str):
        return environment.split(COMMA) if COMMA in environment else None
    # An environment of one's own may be a tuple with names.
    return environment if type(environment) in (list, tuple) else None


@functools.cache
def options(names: str) -> type:
    """The frozen dataclass of the options of tasks by name: those of each task, and `TasksOptions`.

    Raises:
      ValueError: as in `environments.options`.
    """
    classes = list(dict.fromkeys(environments.options(name) for name in names.split(COMMA)))
    # Of a class and one that it inherits from, the latter adds nothing.
    own = [cls for cls in classes if not any(cls is not other and issubclass(other, cls) for other in classes)]
    return dataclasses.make_dataclass("TasksOptions", [], bases=(tasks.TasksOptions, *own), frozen=True)


def make(things: Sequence[Any], settings: Mapping[str, Any], wrap: Sequence[str] = ()) -> Any:
    """Puts tasks side by side; of only one, makes it.

    Args:
      things: names or environments, as those of `podracer.train`; one that is there twice gets twice the lanes.
      settings: fields of `TasksOptions`, and of the options of tasks by name: each gets those that it has.
      wrap: wrappers of each environment (`wrapping.texts`).

    Raises:
      ValueError: for tasks that do not fit together, or a setting that none has.
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
