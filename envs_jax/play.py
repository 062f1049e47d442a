"""Random play of a pure-JAX environment, checked against its contract (see `envs_jax.testing`)."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import Environment

PREFIX = "envs_jax conformance"
# Every program here runs once: most of the time is compilation, half of which is optimisation.
COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}

KEY_NAMES = re.compile(r"(^|_)(key|rng)s?$")
"""Names in states under which uint32 [2] are random keys."""

BRIEF_SECONDS = 0.5
"""The longest play of `check_briefly`, after compilation."""


class ConformanceError(AssertionError):
    """An environment breaks the contract of `podracer.types.Environment`."""


def check_play(env: Environment, episodes: int, steps: int, key: jax.Array) -> Any:
    """Checks the rows of a random policy; returns the states [B, ...] before the last steps of the play.

    Raises:
      ConformanceError: with the first breach found.
    """
    carry, play = _player(env, episodes)
    keys = jax.vmap(lambda key: jax.random.split(key, steps))(jax.random.split(key, episodes))
    (_, starts, _, _), record = play(carry, keys)
    _check_record(env, record)
    return starts


def check_briefly(env: Environment, *, episodes: int = 8, steps: int = 256, seed: int = 0) -> None:
    """Checks a user's environment before `podracer.train` compiles; a correct one takes a second.

    Args:
      env: the environment.
      episodes: number of episodes, played in parallel.
      steps: largest number of steps of each; one more than `spec.max_episode_steps` is enough.
      seed: seed of the play.

    Raises:
      ConformanceError: with the first breach found.
    """
    _check_purity(env)
    steps = min(steps, (env.spec.max_episode_steps or steps) + 1)
    chunk = min(32, steps)
    carry, play = _player(env, episodes)
    deadline = math.inf
    for key in jax.random.split(jax.random.key(seed), -(-steps // chunk)):
        carry, record = play(carry, jax.random.split(key, (episodes, chunk)))
        _check_record(env, record)
        deadline = min(deadline, time.monotonic() + BRIEF_SECONDS)
        if time.monotonic() > deadline:
            break


def _player(env: Environment, episodes: int) -> tuple[Any, Callable[..., Any]]:
    """Makes the first carry of a play, [B], and the jitted `(carry, keys [B, T]) -> (carry, record [B, T])`."""
    space = env.spec.observation_space

    def step(carry, key):
        state, _, over, length = carry
        reset_key, action_key, step_key = jax.random.split(key, 3)
        start = jax.tree.map(lambda fresh, old: jnp.where(over, fresh, old), env.reset(reset_key), state)
        length = jnp.where(over, 0, length) + 1
        state, transition = env.step(start, env.spec.action_space.sample(action_key), step_key)
        before, after = _inspect(space, env.observe(start)), _inspect(space, env.observe(state))
        return (state, start, transition.last, length), (transition, length, before, after)

    state = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0)))
    empty = jax.tree.map(lambda x: jnp.zeros((episodes, *x.shape), x.dtype), state)
    carry = empty, empty, jnp.ones(episodes, bool), jnp.zeros(episodes, jnp.int32)
    play = jax.vmap(lambda carry, keys: jax.lax.scan(step, carry, keys))
    return carry, jax.jit(play, compiler_options=COMPILE_QUICKLY)


def _check_record(env: Environment, record: Any) -> None:
    name, limit = type(env).__name__, env.spec.max_episode_steps
    transition, length, before, after = jax.device_get(record)  # each [B, T]
    reward, discount, last, metrics = transition
    _refuse(~np.isfinite(reward), f"{name}.step returned reward", reward, length, "a finite number")
    known, expected = ((0, 1), "0 or 1") if env.spec.num_players == 1 else ((-1, 0, 1), "-1, 0 or 1")
    _refuse(~np.isin(discount, known), f"{name}.step returned discount", discount, length, expected)
    for metric, values in metrics.items():
        _refuse(~np.isfinite(values), f"{name}.step returned metrics[{metric!r}]", values, length, "a finite number")
    terminated = discount == 0
    _refuse(terminated & ~last, f"{name}.step returned discount 0 and last", last, length, "True: the episode is over")
    if limit is not None:
        expected = f"True by step spec.max_episode_steps = {limit}"
        _refuse((length >= limit) & ~last, f"{name}.step returned last", last, length, expected)
    for inspected, num_steps in ((before, length - 1), (after, length)):
        for what, (outside, smallest, largest) in inspected.items():
            values = np.stack([smallest, largest], axis=-1)
            problem, expected = f"{name}.observe returned {what} with extremes", "finite values within the spec's space"
            _refuse(outside, problem, values, num_steps, expected)


def _inspect(space: spaces.Space, value: Any, what: str = "observation") -> dict[str, tuple[jax.Array, ...]]:
    """Inspects every array of an observation: True if it leaves its space or is not finite; minimum; maximum."""
    if isinstance(space, spaces.Dict):
        return {k: v for name, item in space.items for k, v in _inspect(item, value[name], f"{what}[{name!r}]").items()}
    if math.prod(space.shape) == 0:
        return {}
    low, high = _bounds(space)
    outside = ~jnp.all(jnp.isfinite(value) & (value >= low) & (value <= high))
    return {what: (outside, jnp.min(value), jnp.max(value))}


def _bounds(space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of a space in its own dtype."""
    if not isinstance(space, spaces.Box):
        num_values = np.asarray(space.num_values, space.dtype)
        return np.zeros_like(num_values), num_values - 1
    low, high = np.asarray(space.low, object), np.asarray(space.high, object)
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        low = np.vectorize(lambda x: math.ceil(max(x, limits.min)), otypes=[object])(low)
        high = np.vectorize(lambda x: math.floor(min(x, limits.max)), otypes=[object])(high)
    ones = (1,) * len(space.shape)
    return tuple(bound.reshape(bound.shape or ones).astype(space.dtype) for bound in (low, high))  # type: ignore[return-value]


def _refuse(bad: np.ndarray, problem: str, values: np.ndarray, num_steps: np.ndarray, expected: str) -> None:
    """Raises about the first True of `bad` [B, T]."""
    if bad.any():
        index = tuple(np.argwhere(bad)[0])
        raise ConformanceError(
            f"{PREFIX}: {problem} {values[index]} after {num_steps[index]} steps of an episode (expected {expected})."
        )


def _check_purity(env: Environment) -> None:
    """Checks that a second trace has the same constants: random numbers of NumPy would be frozen into a program."""
    name = type(env).__name__
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, action = jax.eval_shape(env.reset, key), jax.eval_shape(env.spec.action_space.sample, key)
    for method, function, args in (("reset", env.reset, (key,)), ("step", env.step, (state, action, key))):
        once, again = (_constants(jax.make_jaxpr(lambda *x, f=function: f(*x))(*args)) for _ in range(2))
        if len(once) != len(again) or not all(map(_same_bits, once, again)):
            raise ConformanceError(
                f"{PREFIX}: {name}.{method} is another function each time it is traced (expected all chance to come "
                "from its key, as that of numpy.random would be drawn once and then stay, and all that changes from "
                "its state)."
            )


def _constants(closed: Any) -> list[np.ndarray]:
    """Collects all constants of a jaxpr, those of inner ones too."""
    found = [_numbers(x) for x in getattr(closed, "consts", ())]
    jaxpr = getattr(closed, "jaxpr", closed)
    found += [_numbers(x.val) for x in jaxpr.outvars if hasattr(x, "val")]
    for equation in jaxpr.eqns:
        found += [_numbers(x.val) for x in equation.invars if hasattr(x, "val")]
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += _constants(part) if hasattr(part, "eqns") or hasattr(part, "jaxpr") else []
    return found


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns True for equal bits; NaN equals itself, because JAX's own functions hold it (`jax.random.choice`)."""
    return (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


def _numbers(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
