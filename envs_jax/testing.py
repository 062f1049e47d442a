"""A conformance suite for pure-JAX environments: run it on your own before training on it.

    from envs_jax.testing import check_environment
    check_environment(MyEnvironment())

`validate_protocol` is the part that only traces: it takes milliseconds, and the training driver calls it before it
compiles anything. `check_environment` also plays, and raises `ConformanceError` with one sentence that says what is
wrong and where.
"""

from __future__ import annotations

import math
import os
import pathlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from podracer import spaces
from podracer.types import Environment, EnvSpec, Transition, check_metric_names

_PREFIX = "envs_jax conformance"
_TRANSITION_DTYPES = {"reward": np.dtype(np.float32), "discount": np.dtype(np.float32), "last": np.dtype(np.bool_)}
# Innermost frames here are not where a mistake is.
_NOT_THE_USERS = (*(str(pathlib.Path(str(m.__file__)).parent) + os.sep for m in (jax, np, spaces)), __file__)
# What JAX says of code that needs a value while it has a shape alone, the special before the general.
_REMEDIES = (
    (jax.errors.TracerBoolConversionError, "use jnp.where or jax.lax.cond instead of if, while, and, or"),
    (jax.errors.TracerArrayConversionError, "use jax.numpy instead of numpy"),
    (
        jax.errors.TracerIntegerConversionError,
        "index an array (jnp.asarray) instead of a list, and loop with jax.lax.fori_loop instead of range",
    ),
    (jax.errors.NonConcreteBooleanIndexError, "use jnp.where instead of indexing with a mask"),
    (
        jax.errors.ConcretizationTypeError,
        "use .astype(...) instead of int() or float(), and shapes that depend on no array",
    ),
)
# Two programs of one function may fuse, and so round, differently.
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
# Every program here runs once: compiling it is what takes the time, and half of that is optimisation.
_COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


class ConformanceError(AssertionError):
    """An environment breaks the contract of `podracer.types.Environment`."""


def validate_protocol(env: Environment) -> None:
    """Checks the shape of an environment by tracing it once; nothing is compiled or run.

    Raises:
      TypeError: a method is missing, fails when traced, or returns the wrong structure, shape or dtype.
      ValueError: `spec` holds a value that no environment can have.
    """
    name = type(env).__name__
    _check_spec(env, name)
    for method in ("reset", "step", "observe"):
        if not callable(getattr(env, method, None)):
            raise TypeError(f"{_PREFIX}: {name}.{method} is missing (expected a method of podracer.types.Environment).")
    key = jax.eval_shape(lambda: jax.random.key(0))

    state = _trace(env.reset, f"{name}.reset", key)
    _check_state(state, f"{name}.reset")
    _check_observation(env, name, state, "reset")

    action = jax.eval_shape(env.spec.action_space.sample, key)
    result = _trace(env.step, f"{name}.step", state, action, key)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{_PREFIX}: {name}.step returned {_describe(result)} (expected a pair: state, Transition).")
    new_state, transition = result
    _check_state(new_state, f"{name}.step")
    _check_same_structure(name, state, new_state)
    _check_transition(name, transition, env.spec.metrics)

    if callable(getattr(env, "render", None)):
        image = _trace(env.render, f"{name}.render", state)  # pyright: ignore[reportAttributeAccessIssue] - optional
        if not _is_array(image) or image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[-1] != 3:
            raise TypeError(f"{_PREFIX}: {name}.render returned {_describe(image)} (expected uint8 [H, W, 3]).")


def check_environment(env: Environment, *, episodes: int = 8, steps: int | None = None, seed: int = 0) -> None:
    """Plays `env` at random and checks everything that its contract promises.

    Types and shapes are promoted as JAX does by default, whatever is set where this is called: stricter rules are those
    of a code base (`with jax.numpy_dtype_promotion("strict"): validate_protocol(env)`), not of the contract.

    Args:
      env: the environment.
      episodes: how many are played side by side; each starts again when it ends.
      steps: of each; by default one more than `spec.max_episode_steps`, within 1000, or 200 if there is no limit.
      seed: of the play.

    Raises:
      ConformanceError: with the first breach found.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _check_environment(env, episodes, steps, seed)


def _check_environment(env: Environment, episodes: int, steps: int | None, seed: int) -> None:
    try:
        validate_protocol(env)
    except (TypeError, ValueError) as error:
        raise ConformanceError(str(error)) from error
    _check_leaks(env)
    if steps is None:
        steps = min(env.spec.max_episode_steps or 199, 999) + 1
    play_key, probe_key = jax.random.split(jax.random.key(seed))
    states = _check_play(env, episodes, steps, play_key)
    with jax.debug_key_reuse(False):  # calling a function twice with the same key is the point
        _check_agreement(env, states, episodes, probe_key)
    _check_leaks(env)


def _check_spec(env: Any, name: str) -> None:
    spec = getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        raise TypeError(f"{_PREFIX}: {name}.spec is {_describe(spec)} (expected a podracer.types.EnvSpec).")
    if not isinstance(spec.name, str) or not spec.name:
        raise ValueError(f"{_PREFIX}: {name}.spec.name is {spec.name!r} (expected a non-empty string).")
    if not isinstance(spec.observation_space, spaces.Space):
        raise TypeError(
            f"{_PREFIX}: {name}.spec.observation_space is {_describe(spec.observation_space)} "
            "(expected a space of podracer.spaces)."
        )
    if not isinstance(spec.action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box):
        raise TypeError(
            f"{_PREFIX}: {name}.spec.action_space is {_describe(spec.action_space)} "
            "(expected podracer.spaces.Discrete, MultiDiscrete or Box)."
        )
    limit = spec.max_episode_steps
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"{_PREFIX}: {name}.spec.max_episode_steps is {limit!r} (expected None or an int >= 1).")
    check_metric_names(spec.metrics, f"{_PREFIX}: {name}.spec.metrics")


def _trace(function: Any, where: str, *args: Any) -> Any:
    """The shapes that `function` returns, or one clear line about why it cannot be traced."""
    try:
        return jax.eval_shape(function, *args)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        remedy = next((f": {text}" for kinds, text in _REMEDIES if isinstance(error, kinds)), "")
        raise TypeError(
            f"{_PREFIX}: {where} cannot be traced: {type(error).__name__}: {reason}{_line(error)}{remedy}."
        ) from error


def _line(error: BaseException) -> str:
    """Where in the user's own files an error came from, as text to append."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS) and frame.line
    ]
    return f", in {frames[-1].filename}, line {frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def _check_state(state: Any, where: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{_PREFIX}: {where} returned a random key in state{jax.tree_util.keystr(path)} (expected none, "
                "as a search over states must not foresee chance: draw from the key that step receives)."
            )


def _check_observation(env: Environment, name: str, state: Any, origin: str) -> None:
    observation = _trace(env.observe, f"{name}.observe", state)
    _check_against_space(env.spec.observation_space, observation, f"{name}.observe (after {origin})", "observation")


def _check_against_space(space: spaces.Space, value: Any, where: str, what: str) -> None:
    if isinstance(space, spaces.Dict):
        names = [item_name for item_name, _ in space.items]
        if not isinstance(value, dict) or sorted(value) != names:
            found = sorted(value) if isinstance(value, dict) else _describe(value)
            raise TypeError(f"{_PREFIX}: {where} returned {what} {found} (expected a dict of {names} as in the spec).")
        for item_name, item_space in space.items:
            _check_against_space(item_space, value[item_name], where, f"{what}[{item_name!r}]")
    elif not _is_array(value) or value.dtype != space.dtype or value.shape != space.shape:
        raise TypeError(
            f"{_PREFIX}: {where} returned {what} {_describe(value)} "
            f"(expected {_describe_array(space.dtype, space.shape)} as in the spec)."
        )


def _check_same_structure(name: str, state: Any, new_state: Any) -> None:
    before, after = jax.tree.structure(state), jax.tree.structure(new_state)
    if before != after:
        raise TypeError(f"{_PREFIX}: {name}.step returned a state of {after} (expected {before} as from reset).")
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new_state), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"{_PREFIX}: {name}.step returned state{jax.tree_util.keystr(path)} {_describe(new)} "
                f"(expected {_describe(old)} as from reset)."
            )


def _check_transition(name: str, transition: Any, metrics: tuple[str, ...]) -> None:
    if not isinstance(transition, Transition):
        raise TypeError(
            f"{_PREFIX}: {name}.step returned {_describe(transition)} second (expected a podracer.types.Transition)."
        )
    if not isinstance(transition.metrics, dict) or set(transition.metrics) != set(metrics):
        found = sorted(transition.metrics) if isinstance(transition.metrics, dict) else _describe(transition.metrics)
        raise TypeError(f"{_PREFIX}: {name}.step returned metrics {found} (expected {sorted(metrics)} as in the spec).")
    values = [(field, getattr(transition, field), dtype) for field, dtype in _TRANSITION_DTYPES.items()]
    values += [(f"metrics[{key!r}]", value, np.dtype(np.float32)) for key, value in transition.metrics.items()]
    for field, value, dtype in values:
        if not _is_array(value) or value.dtype != dtype or value.shape != ():
            raise TypeError(
                f"{_PREFIX}: {name}.step returned {field} {_describe(value)} (expected {_describe_array(dtype, ())})."
            )


def _check_play(env: Environment, episodes: int, steps: int, key: jax.Array) -> Any:
    """Checks what a random policy meets; returns the states [B, ...] that the last steps of the play began in."""
    name, space, limit = type(env).__name__, env.spec.observation_space, env.spec.max_episode_steps

    def step(carry, key):
        state, _, over, length = carry
        reset_key, action_key, step_key = jax.random.split(key, 3)
        start = jax.tree.map(lambda fresh, old: jnp.where(over, fresh, old), env.reset(reset_key), state)
        length = jnp.where(over, 0, length) + 1
        state, transition = env.step(start, env.spec.action_space.sample(action_key), step_key)
        before, after = _inspect(space, env.observe(start)), _inspect(space, env.observe(state))
        return (state, start, transition.last, length), (transition, length, before, after)

    def play(key):
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.reset, key))
        carry = empty, empty, jnp.bool_(True), jnp.int32(0)
        (_, start, _, _), record = jax.lax.scan(step, carry, jax.random.split(key, steps))
        return start, record

    play_all = jax.jit(jax.vmap(play), compiler_options=_COMPILE_QUICKLY)
    starts, record = play_all(jax.random.split(key, episodes))
    transition, length, before, after = jax.device_get(record)  # each [B, T]
    reward, discount, last, metrics = transition
    _refuse(~np.isfinite(reward), f"{name}.step returned reward", reward, length, "a finite number")
    _refuse((discount != 0) & (discount != 1), f"{name}.step returned discount", discount, length, "0 or 1")
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
    return starts


def _inspect(space: spaces.Space, value: Any, what: str = "observation") -> dict[str, tuple[jax.Array, ...]]:
    """For every array of an observation: whether it leaves its space or is not finite, its minimum, its maximum."""
    if isinstance(space, spaces.Dict):
        return {k: v for name, item in space.items for k, v in _inspect(item, value[name], f"{what}[{name!r}]").items()}
    if math.prod(space.shape) == 0:
        return {}
    low, high = _bounds(space)
    outside = ~jnp.all(jnp.isfinite(value) & (value >= low) & (value <= high))
    return {what: (outside, jnp.min(value), jnp.max(value))}


def _bounds(space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of a space in its own dtype."""
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
            f"{_PREFIX}: {problem} {values[index]} after {num_steps[index]} steps of an episode (expected {expected})."
        )


def _check_agreement(env: Environment, states: Any, num_lanes: int, key: jax.Array) -> None:
    """Checks that reset and step, from first and later states, do the same under vmap, under jit and called plainly."""
    name = type(env).__name__

    def reset(key):
        state = env.reset(key)
        return {"state": state, "observation": env.observe(state)}

    def step(state, action, key):
        state, transition = env.step(state, action, key)
        return {"state": state, "transition": transition, "observation": env.observe(state)}

    reset_keys, action_keys, step_keys = jax.random.split(key, (3, 2 * num_lanes))
    first = _check_function(reset, f"{name}.reset", (reset_keys[:num_lanes],))["state"]
    states = jax.tree.map(lambda *pair: jnp.concatenate(pair), first, states)
    actions = jax.jit(jax.vmap(env.spec.action_space.sample))(action_keys)
    _check_function(step, f"{name}.step", (states, actions, step_keys))


def _check_function(function: Any, where: str, batch: tuple[Any, ...]) -> Any:
    """Compares plain calls with each other, with jit and with vmap; returns what `function` gives for the batch."""
    together = jax.jit(jax.vmap(function), compiler_options=_COMPILE_QUICKLY)(*batch)
    compiled = jax.jit(function, compiler_options=_COMPILE_QUICKLY)
    num_lanes = batch[-1].shape[0]
    lanes = [jax.tree.map(lambda x, i=i: x[i], (batch, together)) for i in range(num_lanes)]
    for args, _ in (lanes[0], lanes[-1]):
        plain = _call_unchanged(function, args, where)
        again = function(*args)
        _check_equal(again, plain, f"{where} called twice with the same arguments differs", exact=True)
        _check_equal(compiled(*args), plain, f"{where} under jit differs from the plain call")
    for args, expected in lanes:
        _check_equal(compiled(*args), expected, f"{where} under vmap differs from a Python loop over lanes")
    return together


def _call_unchanged(function: Any, args: tuple[Any, ...], where: str) -> Any:
    """`function(*args)`, which must leave its arguments as they were."""
    leaves, structure = jax.tree.flatten(args)
    result = function(*args)
    leaves_after, structure_after = jax.tree.flatten(args)
    if structure != structure_after or any(x is not y for x, y in zip(leaves, leaves_after)):
        raise ConformanceError(f"{_PREFIX}: {where} changed its arguments in place (expected new objects).")
    return result


def _check_equal(value: Any, expected: Any, problem: str, *, exact: bool = False) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(value), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        close = np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        if not close and x.dtype.kind == "f" and not exact:
            close = np.allclose(x, y, equal_nan=True, **_TOLERANCE)
        if not close:
            raise ConformanceError(
                f"{_PREFIX}: {problem} in {jax.tree_util.keystr(path)} (expected a pure function of its arguments)."
            )


def _check_leaks(env: Environment) -> None:
    for attribute, value in getattr(env, "__dict__", {}).items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise ConformanceError(
                f"{_PREFIX}: {type(env).__name__}.{attribute} kept a value of a traced call "
                "(expected everything that changes to be in the state)."
            )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _describe(value: Any) -> str:
    if _is_array(value):
        return _describe_array(value.dtype, value.shape)
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _describe_array(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
