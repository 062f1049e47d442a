"""Several tasks side by side: of the lanes of a run, k::K play the k-th of K environments (docs/tasks.md).

    podracer.train("vtrace", Tasks({"catch": make("catch"), "negated": scale_reward(-1.0)(make("catch"))}))

One network plays them all, so they have one observation space and one action space: those that they share, or with
`union="pad"` the least that hold all of them (`common_spec`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from podracer import configs, spaces
from podracer.topology import collectives
from podracer.types import ArrayTree, Environment, EnvSpec, HostEnvironments, Transition

Union = Literal["none", "pad"]

MOST_TASKS = 32
"""The most tasks in one program: each is compiled by itself."""

OBSERVATION, TASK = "observation", "task"
"""Members of observations that say which task a lane plays."""


@dataclasses.dataclass(frozen=True)
class TasksOptions:
    """Options of several tasks, beside those of each.

    Attributes:
      union: "pad" lets tasks differ. Observations that are vectors of floats are padded with zeros, Discrete actions
        are as many as those of the task with most, and one that a task does not have acts as its action 0. "none"
        refuses tasks that differ.
      task_input: True shows the network which task it plays, as a one-hot vector beside the observation.
    """

    union: Union = "none"
    task_input: bool = False

    def __post_init__(self):
        configs.check(self)


def common_spec(names: Sequence[str], specs: Sequence[EnvSpec], options: TasksOptions) -> EnvSpec:
    """The description of K tasks as one environment.

    Its metrics are those that all tasks have.

    Args:
      names: of the tasks; a name that is there twice is one task with twice the lanes.
      specs: of their environments.
      options: of the tasks.

    Raises:
      ValueError: for no task, a name that is no text or has a comma, a game for two, or spaces that differ and cannot
        be padded.
    """
    if not specs:
        raise ValueError("no tasks: give at least one environment.")
    for name, spec in zip(names, specs):
        if not isinstance(name, str) or not name or "," in name:
            raise ValueError(f"a task is called {name!r}; use a text without commas, which join the names of tasks.")
        if spec.num_players != 1:
            raise ValueError(f"{name} is a game for two, which cannot be one of several tasks; train it by itself.")
    limits = [spec.max_episode_steps for spec in specs]
    observation = _common("observe", names, [spec.observation_space for spec in specs], options.union, _padded)
    if options.task_input:
        observation = _with_task(observation, len(specs))
    return EnvSpec(
        ",".join(names),
        observation,
        _common("take actions in", names, [spec.action_space for spec in specs], options.union, _most_choices),
        None if None in limits else max(limits),  # type: ignore[type-var]
        tuple(name for name in specs[0].metrics if all(name in spec.metrics for spec in specs)),
        raw_scores=any(spec.raw_scores for spec in specs),
        tasks=tuple(names),
    )


def _common(
    what: str,
    names: Sequence[str],
    found: list[spaces.Space],
    union: Union,
    pad: Callable[[list[Any]], spaces.Space | None],
) -> spaces.Space:
    """The space of all tasks; `pad` makes it of those that differ, or None."""
    first = found[0]
    if all(space == first for space in found):
        return first
    if union == "pad" and (padded := pad(found)):
        return padded
    other = next(i for i, space in enumerate(found) if space != first)
    remedy = "union='pad' (--env.union pad) pads" if union == "none" else "union='pad' pads only"
    raise ValueError(
        f"{names[0]} and {names[other]} {what} {first} and {found[other]}, and one network has one space: {remedy} "
        "observations that are vectors of floats, and Discrete actions. The wrapper flatten makes vectors."
    )


def _most_choices(found: list[Any]) -> spaces.Space | None:
    """The choices of the task with most of them; None if one takes other actions."""
    if not all(isinstance(space, spaces.Discrete) for space in found):
        return None
    return spaces.Discrete(max(space.num_values for space in found))


def _padded(found: list[Any]) -> spaces.Space | None:
    """The least space of vectors that holds all, padded with zeros; None if one is no vector of floats."""
    if not all(map(_is_vector, found)):
        return None
    lows, highs = zip(*map(_bounds, found))
    size = max(map(len, lows))
    pad = lambda bounds: [np.pad(bound, (0, size - len(bound))) for bound in bounds]  # noqa: E731
    return spaces.Box(np.min(pad(lows), axis=0), np.max(pad(highs), axis=0), (size,))


def _is_vector(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32


def _bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of a vector, float64 [n]."""
    low, high = (np.broadcast_to(np.asarray(bound, float), space.shape) for bound in (space.low, space.high))
    return low, high


def _with_task(space: spaces.Space, num_tasks: int) -> spaces.Dict:
    """The space of observations that say which task they are of."""
    members = dict(space.items) if isinstance(space, spaces.Dict) else {OBSERVATION: space}
    if TASK in members:
        raise ValueError(f"task_input=True: observations have a member {TASK!r} already; leave it out.")
    return spaces.Dict({**members, TASK: spaces.Box(0.0, 1.0, (num_tasks,))})


class Task:
    """An environment in pure JAX as one of several tasks, with their spaces (see `podracer.types.Environment`).

    Attributes:
      environment: the one inside.
      spec: that of all tasks, under its own name and with its own limit of steps.
      costly_reset: its `costly_reset`.
    """

    def __init__(self, environment: Environment, name: str, common: EnvSpec, index: int, options: TasksOptions):
        limit = environment.spec.max_episode_steps
        self.environment, self.spec = environment, common._replace(name=name, max_episode_steps=limit, tasks=())
        self.costly_reset = getattr(environment, "costly_reset", False)
        self._code = np.eye(len(common.tasks), dtype=np.float32)[index] if options.task_input else None
        self._missing = missing_numbers(common, environment.spec)
        self._actions = fewer_actions(common, environment.spec)

    def reset(self, key: jax.Array) -> Any:
        """The first state of an episode."""
        return self.environment.reset(key)

    def step(self, state: Any, action: ArrayTree, key: jax.Array) -> tuple[Any, Transition]:
        """One transition."""
        if self._actions:
            action = jnp.where(action < self._actions, action, 0)
        state, transition = self.environment.step(state, action, key)
        return state, transition._replace(metrics={name: transition.metrics[name] for name in self.spec.metrics})

    def observe(self, state: Any) -> ArrayTree:
        """The observation of a state."""
        observation = self.environment.observe(state)
        if self._missing:
            observation = jnp.pad(observation, (0, self._missing))
        if self._code is None:
            return observation
        return {
            **(observation if isinstance(observation, dict) else {OBSERVATION: observation}),
            TASK: jnp.asarray(self._code),
        }

    def __getattr__(self, name: str) -> Any:
        # Looked up in vain: `render`, which is here only if the environment inside has it.
        if name != "render":
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return self.environment.render  # type: ignore[attr-defined]


def missing_numbers(common: EnvSpec, own: EnvSpec) -> int:
    """The numbers that a task's observation is padded with."""
    space, shown = own.observation_space, common.observation_space
    if not _is_vector(space):
        return 0
    shown = dict(shown.items)[OBSERVATION] if isinstance(shown, spaces.Dict) else shown
    return shown.shape[0] - space.shape[0]  # type: ignore[union-attr]


def fewer_actions(common: EnvSpec, own: EnvSpec) -> int:
    """The number of a task's actions if all tasks together have more, else 0."""
    if common.action_space == own.action_space or not isinstance(own.action_space, spaces.Discrete):
        return 0
    return own.action_space.num_values


class Tasks:
    """K environments in pure JAX for the lanes of one run; the k-th plays in lanes k::K.

    Attributes:
      spec: of all of them (`common_spec`).
      environments: K times `Task`.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment] | Sequence[Environment],
        *,
        union: Union = "none",
        task_input: bool = False,
    ):
        """Puts environments side by side.

        Args:
          environments: by name, or without names where those of their specs will do.
          union: as in `TasksOptions`.
          task_input: as in `TasksOptions`.

        Raises:
          ValueError: as in `common_spec`, and for more than 32 tasks or one that is not in pure JAX.
        """
        by_name = isinstance(environments, Mapping)
        found: list[Environment] = list(environments.values() if by_name else environments)  # type: ignore[union-attr]
        for environment in found:
            if not isinstance(environment, Environment):
                raise ValueError(f"{type(environment).__name__} is no environment in pure JAX, as all tasks must be.")
        if len(found) > MOST_TASKS:
            raise ValueError(
                f"{len(found)} tasks: a program holds at most {MOST_TASKS}, for each is compiled by itself. Make a "
                "family of tasks one environment whose parameters are drawn at reset (envs_jax.wrappers.randomise)."
            )
        names = list(environments) if by_name else names_of(found)
        options = TasksOptions(union, task_input)
        self.spec = common_spec(names, [environment.spec for environment in found], options)
        self.environments = tuple(
            Task(environment, name, self.spec, k, options) for k, (name, environment) in enumerate(zip(names, found))
        )

    def alone(self) -> dict[str, Environment]:
        """Each task by itself, by name."""
        return {name: self.environments[self.spec.tasks.index(name)] for name in dict.fromkeys(self.spec.tasks)}


def names_of(environments: Sequence[Any]) -> list[str]:
    """The names of environments; one that is there twice is one task with twice the lanes.

    Raises:
      ValueError: for two environments of one name.
    """
    named: dict[str, Any] = {}
    for environment in environments:
        if named.setdefault(environment.spec.name, environment) is not environment:
            raise ValueError(
                f"two tasks are called {environment.spec.name!r}; name them: Tasks({{'one': ..., 'other': ...}}), or "
                "give the same environment twice for twice its lanes."
            )
    return [environment.spec.name for environment in environments]


def parts(environment: Any) -> tuple[Environment, ...]:
    """The environments in pure JAX of the lanes k::K: those of `Tasks`, or the only one; () of host environments."""
    if isinstance(environment, Tasks):
        return environment.environments
    return () if isinstance(environment, HostEnvironments) else (environment,)


def alone(environment: Any) -> dict[str, Any]:
    """Each task of an environment, or of host environments, by itself and by name; a single environment itself.

    Raises:
      ValueError: for `EnvSpec.tasks` without `alone()`.
    """
    if environment.spec.tasks:
        if not hasattr(environment, "alone"):
            raise ValueError(
                f"{type(environment).__name__} has spec.tasks={environment.spec.tasks!r} and no alone(), which gives "
                "each task by itself for its evaluation; add it, or use Tasks or HostTasks."
            )
        return environment.alone()
    return {environment.spec.name: environment}


def of_task(tree: ArrayTree, k: int, num_tasks: int, axis: int = 0) -> ArrayTree:
    """The lanes k::K of a tree of [..., B, ...], whose lanes are at `axis`."""
    if num_tasks == 1:
        return tree
    at = (slice(None),) * axis + (slice(k, None, num_tasks),)
    return jax.tree.map(lambda x: x[at], tree)


def interleaved(trees: Sequence[ArrayTree]) -> ArrayTree:
    """Puts trees of [B / K, ...] together, the k-th as the lanes k::K of a tree of [B, ...]."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(len(x) * x[0].shape[0], *x[0].shape[1:]), *trees)


def summed(tree: ArrayTree, num_tasks: int) -> ArrayTree:
    """Sums a tree of [..., B] over all, [], or where there are several tasks, over all of each, [K].

    The first of the B lanes is one of task 0.
    """
    if num_tasks <= 1:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(collectives.local_sums(leaves))
    return jax.tree.map(lambda x: jnp.sum(x.reshape(-1, num_tasks), axis=0), tree)


def check_lanes(spec: EnvSpec, num_envs: int, lanes: int, where: str) -> None:
    """Checks that all tasks have equally many lanes in each part of a run.

    Args:
      spec: of the tasks.
      num_envs: lanes of the run.
      lanes: of each part.
      where: the part, in words.

    Raises:
      ValueError: if they do not divide.
    """
    K = len(spec.tasks)
    if K < 2 or lanes % K == 0:
        return
    unit = num_envs // lanes * K
    below, above = num_envs // unit * unit, -(-num_envs // unit) * unit
    raise ValueError(
        f"num_envs={num_envs}: {lanes} lanes of {where} do not divide among {K} tasks; use num_envs="
        f"{f'{below} or {above}' if below else above}."
    )
