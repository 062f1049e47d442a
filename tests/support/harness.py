"""Helpers for the tests of agents and programs: learners' axes on one device, and trajectories from NumPy rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np

import podracer
from podracer import topology, trajectories
from podracer.agents import registry
from podracer.anakin import program
from podracer.evaluation import evaluation
from podracer.sebulba import actor_program, learner_program
from podracer.topology import collectives
from podracer.training import resolve
from podracer.types import (
    Agent,
    Batch,
    Environment,
    EnvSpec,
    HostEnvironments,
    LearnerState,
    TimeStep,
    Trajectory,
    Transition,
)


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    for axis in reversed(collectives.DATA_AXES):
        function = jax.vmap(function, axis_name=axis)
    return function


def over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the learner's axes: arguments [D, S, ...], results [D, S, ...]."""
    return jax.jit(_mapped(function))  # one by one, hundreds of operations would be compiled


@functools.cache
def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the learner's axes with one shard on one device; arguments and results as without."""
    mapped = _mapped(function)

    @jax.jit  # the axes as well: outside, each shape of an argument would be a program of its own
    def compiled(args: Any) -> Any:
        return jax.tree.map(lambda x: x[0, 0], mapped(*jax.tree.map(lambda x: x[None, None], args)))

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return compiled(jax.tree.map(jnp.asarray, args))

    return wrapped


def over_shards(function: Callable[..., Any], state: Any, *sharded: Any) -> Any:
    """`function(state, *sharded)` with one `state` and arguments [S, ...] on one device; every shard must agree."""
    in_axes = (None,) + (0,) * len(sharded)
    shards = jax.vmap(function, in_axes=in_axes, axis_name="shard")
    devices = jax.vmap(shards, in_axes=in_axes, axis_name="data")

    @jax.jit
    def compiled(state: Any, *sharded: Any) -> Any:
        return jax.tree.map(lambda x: x[0], devices(state, *jax.tree.map(lambda x: x[None], sharded)))

    return compiled(state, *sharded)


def hyper(agent: Agent, **overrides: float) -> dict[str, jax.Array]:
    """An agent's tunable numbers as arrays, some of them replaced."""
    return {name: jnp.float32(value) for name, value in (agent.hyper | overrides).items()}


def ends(seed: int, T: int, B: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random `first`, `last` [T+1, B] and `discount` [T+1, B] with terminations, truncations and breaks."""
    rng = np.random.default_rng(seed)
    first, last = np.zeros((T + 1, B), bool), np.zeros((T + 1, B), bool)
    discount = np.ones((T + 1, B), np.float32)
    for lane in range(B):
        for row in range(T + 1):
            after_last = row > 0 and last[row - 1, lane]
            first[row, lane] = after_last or rng.random() < 0.1
            last[row, lane] = not first[row, lane] and rng.random() < 0.3
            discount[row, lane] = float(not (last[row, lane] and rng.random() < 0.5))
    return first, last, discount


def timesteps(seed: int, T: int, B: int, shape: tuple[int, ...] = (3,)) -> TimeStep:
    """Random rows [T+1, B] with observations float32 [*shape]; rewards are 0 on first rows."""
    rng = np.random.default_rng(seed)
    first, last, discount = ends(seed, T, B)
    observation = rng.normal(size=(T + 1, B, *shape)).astype(np.float32)
    reward = np.where(first, 0.0, rng.normal(size=(T + 1, B))).astype(np.float32)
    return TimeStep(*(jnp.asarray(x) for x in (observation, reward, discount, first, last)))


def windows(length: int, num_actions: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows [length, B] of windows whose first transition is real, with terminations, truncations and breaks."""
    rows = jax.tree.map(np.asarray, timesteps(seed, 60, 8))
    starts = [(r, i) for i in range(8) for r in range(60 - length) if not rows.first[r + 1, i]]
    row, lane = (np.array(x) for x in zip(*starts))
    take = lambda x: x[row[None] + np.arange(length)[:, None], lane[None]]  # noqa: E731
    rng = np.random.default_rng(seed)
    shape = (length, len(starts))
    return {
        "reward": take(rows.reward),
        "discount": take(rows.discount),
        "first": take(rows.first),
        "policy": rng.dirichlet(np.ones(num_actions), shape).astype(np.float32),
        "value": rng.normal(size=shape).astype(np.float32),
    }


def batch_of(agent: Agent, num_actions: int, least: int = 0, shape: tuple[int, ...] = (3,), seed: int = 0) -> Batch:
    """Windows as the replay of an agent that searches gives them, all that reach at least row `least`."""
    assert agent.replay is not None
    rng = np.random.default_rng(seed)
    x = windows(agent.replay.length, num_actions, seed)
    x = {name: value[:, ~x["first"][1 : least + 1].any(axis=0)] for name, value in x.items()}
    length, B = x["reward"].shape
    observation = rng.normal(size=(agent.replay.observation_rows, B, *shape)).astype(np.float32)
    if len(shape) == 3:
        observation = rng.integers(0, 256, observation.shape, np.uint8)
    rows = TimeStep(observation, x["reward"], x["discount"], x["first"], np.zeros((length, B), bool))  # type: ignore[arg-type]
    extras = {"policy": x["policy"][:-1], "value": x["value"][:-1]}
    actions = rng.integers(0, num_actions, (length - 1, B), np.int32)
    state = agent.start(jnp.zeros(B, jnp.int32), B)
    version: Any = np.zeros((length - 1, B), np.int32)
    trajectory = Trajectory(rows, actions, extras, state, version, version[0])
    weight, age = rng.random(B).astype(np.float32), rng.integers(1, 100_000, B, np.int32)
    return jax.tree.map(jnp.asarray, Batch(trajectory, weight, age))  # type: ignore[arg-type]


def taken(batch: Batch, at: np.ndarray) -> Batch:
    """Some samples."""
    take = lambda axis, x: jnp.asarray(np.take(np.asarray(x), at, axis=axis))  # noqa: E731
    return Batch(trajectories.by_lane(take, batch.trajectory), take(0, batch.weight), take(0, batch.age))


def moved(learner: LearnerState, by: float = 0.3) -> LearnerState:
    """A learner whose parameters are all a little elsewhere: heads that begin at 0 say something."""
    rng = np.random.default_rng(1)  # of NumPy: of JAX, each shape would be a program of its own
    elsewhere = lambda x: jnp.asarray(np.asarray(x) + np.float32(by) * rng.normal(size=x.shape).astype(x.dtype))  # noqa: E731
    return learner._replace(params=jax.tree.map(elsewhere, learner.params))


@functools.cache
def _begun(init: Callable[..., LearnerState], numbers: tuple[tuple[str, float], ...]) -> LearnerState:
    hyper = {name: jnp.float32(value) for name, value in numbers}
    return moved(jax.jit(init)(jax.random.key(0), hyper))


def learner_of(agent: Agent) -> LearnerState:
    """A learner as after `moved`, made once an agent."""
    return _begun(agent.init, tuple(agent.hyper.items()))


def record(agent: Agent, params: Any, state: Any, rows: TimeStep, key: jax.Array) -> tuple[Trajectory, Any]:
    """The trajectory that `agent.act` makes of given rows [T+1, B], and the agent's memory after row T - 1."""
    T, B = rows.reward.shape[0] - 1, rows.reward.shape[1]

    def step(memory: Any, now: tuple[TimeStep, jax.Array]) -> tuple[Any, Any]:
        action, extras, memory = agent.act(params, memory, *now, False)
        return memory, (action, extras)

    inputs = (jax.tree.map(lambda x: x[:-1], rows), jax.random.split(key, T))
    memory, (actions, extras) = jax.lax.scan(step, state, inputs)
    version = jnp.broadcast_to(params.version, (T, B))
    return Trajectory(rows, actions, extras, state, version, jnp.arange(B, dtype=jnp.int32)), memory


def make_program(
    agent: Agent,
    environment: Environment,
    *,
    num_envs: int,
    population: int = 1,
    num_shards: int = 1,
    reset_pool: int | None = None,
    lockstep: bool = False,
) -> program.Program:
    """The program of a run on the first device."""
    layout = topology.make(
        num_envs=num_envs,
        envs_per_device=1,
        num_shards=num_shards,
        population=population,
        devices=jax.local_devices()[:1],
    )
    settings = program.RolloutSettings(agent.config.rollout_length, reset_pool, lockstep)
    return program.make(agent, environment, layout, settings)


_AGENTS: dict[str, Agent] = {}
_PROGRAMS: dict[Any, Any] = {}
"""Programs that `shared_programs` keeps, for all files of tests that one process runs."""


def _identity(x: Any) -> Any:
    """A key for a part of a program: environments of ours are equal by kind and settings."""
    return (type(x), pickle.dumps(vars(x))) if type(x).__module__.startswith("envs_jax.") else x


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Inside, runs of equal agents by name in equal environments share what they trace and compile.

    The first of them makes it as ever; those after it differ in seed, directory and schedule, which no program knows.
    """
    make_agent, begin = registry.make_agent, evaluation.Evaluator.__init__
    is_shared = lambda agent: any(agent is shared for shared in _AGENTS.values())  # noqa: E731

    def agent_of(name: str, environment: Any, config: Any = None, network: Any = None, optimizer: Any = None) -> Agent:
        agent = make_agent(name, environment, config, network, optimizer)
        return agent if network else _AGENTS.setdefault(f"{name} {environment.spec} {agent.config} {optimizer}", agent)

    def keeping(module: Any) -> Any:
        make = module.make

        def once(agent: Agent, *parts: Any) -> Any:
            # A replay on the host has a state of its own. Arrays are here for their shapes alone.
            if "host" in parts or not is_shared(agent):
                return make(agent, *parts)
            shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)) if hasattr(x, "shape") else x, parts)
            key = (module.__name__, id(agent), *map(_identity, jax.tree.leaves(shapes)))
            if key not in _PROGRAMS:
                _PROGRAMS[key] = make(agent, *parts)
            return _PROGRAMS[key]

        return mock.patch.object(module, "make", once)

    def evaluator(self: Any, agent: Agent, environment: Any, episodes: int, *rest: Any, **named: Any) -> None:
        begin(self, agent, environment, episodes, *rest, **named)
        if not isinstance(environment, HostEnvironments) and is_shared(agent):
            bound = inspect.signature(begin).bind(self, agent, environment, episodes, *rest, **named)
            key = ("evaluator", id(agent), _identity(environment), episodes, bound.arguments.get("max_steps"))
            self._plays = _PROGRAMS.setdefault(key, self._plays)

    with (
        mock.patch.object(resolve, "make_agent", agent_of),
        mock.patch.object(evaluation.Evaluator, "__init__", evaluator),
        keeping(program),
        keeping(actor_program),
        keeping(learner_program),
    ):
        yield


def asked(request: Any, name: str) -> list[tuple[Any, ...]]:
    """Parameters of a test of a fixture's file, of all that this session runs: a fixture makes no more than they look at."""
    items = [item for item in request.session.items if item.path == request.path and item.originalname == name]
    return [tuple(item.callspec.params.values()) if hasattr(item, "callspec") else () for item in items]


def late_after(looks: int, patch: Any) -> None:
    """Lets the time for a checkpoint be over at so many looks at the clock after the last one."""
    from podracer.training.session import Session

    save, seen = Session._save, itertools.count()

    def saved(self: Any, *arguments: Any) -> None:
        nonlocal seen
        save(self, *arguments)
        seen = itertools.count()

    patch.setattr(Session, "_save", saved)
    patch.setattr(Session, "_is_late", lambda self: self._checkpoints is not None and next(seen) >= looks)


def initial(
    prog: program.Program, agent: Agent, seeds: list[int], overrides: Mapping[str, list[float]] | None = None
) -> program.RunState:
    """A run's first state: one member per seed."""
    numbers = {name: np.full(len(seeds), value, np.float32) for name, value in agent.hyper.items()}
    numbers |= {name: np.asarray(values, np.float32) for name, values in (overrides or {}).items()}
    return prog.init(jnp.asarray(seeds, jnp.int32), {name: jnp.asarray(value) for name, value in numbers.items()})


def assert_same(left: Any, right: Any) -> None:
    """Trees equal bit by bit."""
    chex.assert_trees_all_equal(numbers_of(left), numbers_of(right))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        inner = list(equation.params.values())
        for part in jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from equations(getattr(part, "jaxpr", part))


def as_a_tpu_rounds(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function whose products round their operands to bfloat16, unless they ask for the highest precision."""

    def run(jaxpr: Any, constants: Any, inputs: Any) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs]))
        read = lambda x: x.val if hasattr(x, "val") else known[x]  # noqa: E731
        for e in jaxpr.eqns:
            values = [read(x) for x in e.invars]
            inner = e.params.get("jaxpr", e.params.get("call_jaxpr"))
            if e.primitive.name == "dot_general" and e.params["precision"] != (jax.lax.Precision.HIGHEST,) * 2:
                values = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in values]
            outputs = run(inner.jaxpr, inner.consts, values) if inner else e.primitive.bind(*values, **e.params)
            several = inner or e.primitive.multiple_results
            known |= zip(e.outvars, outputs if several else [outputs])
        return [read(x) for x in jaxpr.outvars]

    def rounded(x: jax.Array) -> jax.Array:
        traced = jax.make_jaxpr(function)(x)
        (y,) = run(traced.jaxpr, traced.consts, [x])
        return y

    return jax.jit(rounded)


def numbers_of(tree: Any) -> Any:
    """A tree as NumPy, random keys as their data (and so a copy that outlives donation)."""

    def plain(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(plain, tree)


@dataclasses.dataclass(frozen=True)
class AfterTheEnd:
    """A counting environment: stepping a state that is over spoils everything that a step returns."""

    inner: Any

    @property
    def spec(self) -> EnvSpec:
        return self.inner.spec

    def reset(self, key: jax.Array) -> Any:
        return self.inner.reset(key)

    def observe(self, state: Any) -> Any:
        return self.inner.observe(state)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        over = state.step >= state.tag // 2 % 32
        new, (reward, discount, last, _) = self.inner.step(state, action, key)
        new = jax.tree.map(lambda x: jnp.where(over, -7, x), new)
        return new, Transition(
            jnp.where(over, jnp.nan, reward), jnp.where(over, jnp.float32(0.25), discount), last ^ over
        )


def return_on_catch(agent: str, network: Any, total_steps: int, after: int) -> float:
    """The mean return of the first evaluation of a run with a network of one's own, which then is stopped."""
    settings = {"total_steps": total_steps, "eval_every": after, "progress": False}
    found = podracer.train(
        agent, "catch", network=network, log=lambda steps, row: "eval/return_mean" in row, **settings
    )
    assert not found.summary["complete"]
    return found.summary["eval_return_mean"]


def guessing(search: Any) -> Any:
    """A search whose policies and actions are drawn, whatever it found."""

    @functools.wraps(search)
    def guess(model: Any, variables: Any, root: Any, key: jax.Array, config: Any, **how: Any) -> Any:
        found = search(model, variables, root, key, config, **how)
        legal = 1.0 if root.legal is None else root.legal.astype(jnp.float32)
        weights = jax.random.uniform(key, root.logits.shape) ** 4 * legal
        action = jnp.argmax(weights, axis=-1).astype(jnp.int32)
        return found._replace(policy=weights / jnp.sum(weights, axis=-1, keepdims=True), action=action)

    return guess
