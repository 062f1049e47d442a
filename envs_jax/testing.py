"""A conformance suite for pure-JAX environments: run it on your own before training on it.

    from envs_jax.testing import check_environment
    check_environment(MyEnvironment())

`validate_protocol` is the part that only traces: it takes milliseconds, and the training driver calls it before it
compiles anything. `check_environment` also plays, and raises `ConformanceError` with one sentence on the mistake and
its place. `check_game` checks the further rules of two-player games.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from envs_jax.games import check_game
from envs_jax.play import COMPILE_QUICKLY, KEY_NAMES, PREFIX, ConformanceError, check_briefly, check_play
from podracer import errors, spaces
from podracer.environments import gate
from podracer.types import Environment, EnvSpec, Transition, check_metric_names

_TRANSITION_DTYPES = {"reward": np.dtype(np.float32), "discount": np.dtype(np.float32), "last": np.dtype(np.bool_)}
__all__ = ["ConformanceError", "check_briefly", "check_environment", "check_game", "validate_protocol"]

# Two programs of one function may fuse, and so round, differently.
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


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
            raise TypeError(f"{PREFIX}: {name}.{method} is missing (expected a method of podracer.types.Environment).")
    key = jax.eval_shape(lambda: jax.random.key(0))

    state = _trace(env.reset, f"{name}.reset", key)
    _check_state(state, f"{name}.reset")
    _check_observation(env, name, state, "reset")

    action = jax.eval_shape(env.spec.action_space.sample, key)
    result = _trace(env.step, f"{name}.step", state, action, key)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{PREFIX}: {name}.step returned {_describe(result)} (expected a pair: state, Transition).")
    new_state, transition = result
    _check_state(new_state, f"{name}.step")
    _check_same_structure(name, state, new_state)
    _check_transition(name, transition, env.spec.metrics)

    if callable(getattr(env, "render", None)):
        image = _trace(env.render, f"{name}.render", state)  # pyright: ignore[reportAttributeAccessIssue] - optional
        if not _is_array(image) or image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[-1] != 3:
            raise TypeError(f"{PREFIX}: {name}.render returned {_describe(image)} (expected uint8 [H, W, 3]).")


def check_environment(
    env: Environment, *, episodes: int = 8, steps: int | None = None, seed: int = 0, plain: bool = True
) -> None:
    """Plays `env` at random and checks its whole contract.

    Types and shapes are promoted by JAX's default rules, whatever the caller has set: stricter rules are those of a
    code base (`with jax.numpy_dtype_promotion("strict"): validate_protocol(env)`), not of the contract.

    Args:
      env: the environment.
      episodes: number of lanes, played in parallel; each starts a new episode when one ends.
      steps: steps of each; by default one more than `spec.max_episode_steps`, within 1000, or 200 if there is no limit.
      seed: of the play.
      plain: False leaves out calls that are not compiled, which take minutes for a physics engine.

    Raises:
      ConformanceError: with the first breach found.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _check_environment(env, episodes, steps, seed, plain)


def _check_environment(env: Environment, episodes: int, steps: int | None, seed: int, plain: bool) -> None:
    try:
        validate_protocol(env)
    except (TypeError, ValueError) as error:
        raise ConformanceError(str(error)) from error
    _check_leaks(env)
    if steps is None:
        steps = min(env.spec.max_episode_steps or 199, 999) + 1
    play_key, probe_key = jax.random.split(jax.random.key(seed))
    states = check_play(env, episodes, steps, play_key)
    with jax.debug_key_reuse(False):  # calling a function twice with the same key is the point
        _check_agreement(env, states, episodes, probe_key, plain)
    _check_leaks(env)


def _check_spec(env: Any, name: str) -> None:
    spec = getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        raise TypeError(f"{PREFIX}: {name}.spec is {_describe(spec)} (expected a podracer.types.EnvSpec).")
    if not isinstance(spec.name, str) or not spec.name:
        raise ValueError(f"{PREFIX}: {name}.spec.name is {spec.name!r} (expected a non-empty string).")
    if not isinstance(spec.observation_space, spaces.Space):
        raise TypeError(
            f"{PREFIX}: {name}.spec.observation_space is {_describe(spec.observation_space)} "
            "(expected a space of podracer.spaces)."
        )
    if not isinstance(spec.action_space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box):
        raise TypeError(
            f"{PREFIX}: {name}.spec.action_space is {_describe(spec.action_space)} "
            "(expected podracer.spaces.Discrete, MultiDiscrete or Box)."
        )
    for what, space in (("action_space", spec.action_space), ("observation_space", spec.observation_space)):
        _check_starts(space, f"{PREFIX}: {name}.spec.{what}")
    try:
        gate.check_dtypes(spec)
    except ValueError as error:
        raise ValueError(f"{PREFIX}: {error}") from None
    limit = spec.max_episode_steps
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"{PREFIX}: {name}.spec.max_episode_steps is {limit!r} (expected None or an int >= 1).")
    check_metric_names(spec.metrics, f"{PREFIX}: {name}.spec.metrics")
    if spec.num_players not in (1, 2):
        raise ValueError(f"{PREFIX}: {name}.spec.num_players is {spec.num_players!r} (expected 1 or 2).")


def _check_starts(space: spaces.Space, where: str) -> None:
    if isinstance(space, spaces.Dict):
        for name, item in space.items:
            _check_starts(item, f"{where}[{name!r}]")
    elif not isinstance(space, spaces.Box) and space.start:
        raise ValueError(f"{where} is {space} (expected choices that begin at 0, as all in JAX do).")


def _trace(function: Any, where: str, *args: Any) -> Any:
    """Returns the shapes of the results of `function`, or raises one clear line if it cannot be traced."""
    try:
        return jax.eval_shape(function, *args)
    except Exception as error:
        raise TypeError(f"{PREFIX}: {where} cannot be traced: {errors.explain(error)}.") from error


def _check_state(state: Any, where: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{PREFIX}: {where} returned a random key in state{jax.tree_util.keystr(path)} (expected none, "
                "as a search over states must not foresee chance: draw from the key that step receives)."
            )
        name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        if leaf.dtype == np.uint32 and leaf.shape == (2,) and KEY_NAMES.search(name):
            raise TypeError(
                f"{PREFIX}: {where} returned state{jax.tree_util.keystr(path)} uint32 [2], a random key by its name "
                "(expected none: draw from the key that step receives; or another name, if it is none)."
            )


def _check_observation(env: Environment, name: str, state: Any, origin: str) -> None:
    observation = _trace(env.observe, f"{name}.observe", state)
    _check_against_space(env.spec.observation_space, observation, f"{name}.observe (after {origin})", "observation")


def _check_against_space(space: spaces.Space, value: Any, where: str, what: str) -> None:
    if isinstance(space, spaces.Dict):
        names = [item_name for item_name, _ in space.items]
        if not isinstance(value, dict) or sorted(value) != names:
            found = sorted(value) if isinstance(value, dict) else _describe(value)
            raise TypeError(f"{PREFIX}: {where} returned {what} {found} (expected a dict of {names} as in the spec).")
        for item_name, item_space in space.items:
            _check_against_space(item_space, value[item_name], where, f"{what}[{item_name!r}]")
    elif not _is_array(value) or value.dtype != space.dtype or value.shape != space.shape:
        raise TypeError(
            f"{PREFIX}: {where} returned {what} {_describe(value)} "
            f"(expected {_describe_array(space.dtype, space.shape)} as in the spec)."
        )


def _check_same_structure(name: str, state: Any, new_state: Any) -> None:
    before, after = jax.tree.structure(state), jax.tree.structure(new_state)
    if before != after:
        raise TypeError(f"{PREFIX}: {name}.step returned a state of {after} (expected {before} as from reset).")
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new_state), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"{PREFIX}: {name}.step returned state{jax.tree_util.keystr(path)} {_describe(new)} "
                f"(expected {_describe(old)} as from reset)."
            )


def _check_transition(name: str, transition: Any, metrics: tuple[str, ...]) -> None:
    if not isinstance(transition, Transition):
        raise TypeError(
            f"{PREFIX}: {name}.step returned {_describe(transition)} second (expected a podracer.types.Transition)."
        )
    if not isinstance(transition.metrics, dict) or set(transition.metrics) != set(metrics):
        found = sorted(transition.metrics) if isinstance(transition.metrics, dict) else _describe(transition.metrics)
        raise TypeError(f"{PREFIX}: {name}.step returned metrics {found} (expected {sorted(metrics)} as in the spec).")
    values = [(field, getattr(transition, field), dtype) for field, dtype in _TRANSITION_DTYPES.items()]
    values += [(f"metrics[{key!r}]", value, np.dtype(np.float32)) for key, value in transition.metrics.items()]
    for field, value, dtype in values:
        if not _is_array(value) or value.dtype != dtype or value.shape != ():
            raise TypeError(
                f"{PREFIX}: {name}.step returned {field} {_describe(value)} (expected {_describe_array(dtype, ())})."
            )


def _check_agreement(env: Environment, states: Any, num_lanes: int, key: jax.Array, plain: bool) -> None:
    """Checks that reset and step, from first and later states, do the same under vmap, under jit and called plainly."""
    name = type(env).__name__

    def reset(key):
        state = env.reset(key)
        return {"state": state, "observation": env.observe(state)}

    def step(state, action, key):
        state, transition = env.step(state, action, key)
        return {"state": state, "transition": transition, "observation": env.observe(state)}

    reset_keys, action_keys, step_keys = jax.random.split(key, (3, 2 * num_lanes))
    first = _check_function(reset, f"{name}.reset", (reset_keys[:num_lanes],), plain)["state"]
    states = jax.tree.map(lambda *pair: jnp.concatenate(pair), first, states)
    actions = jax.jit(jax.vmap(env.spec.action_space.sample))(action_keys)
    _check_function(step, f"{name}.step", (states, actions, step_keys), plain)


def _check_function(function: Any, where: str, batch: tuple[Any, ...], with_plain: bool) -> Any:
    """Compares plain calls with each other, with jit and with vmap; returns the results of the batch."""
    batched = jax.jit(jax.vmap(function), compiler_options=COMPILE_QUICKLY)(*batch)
    compiled = jax.jit(function, compiler_options=COMPILE_QUICKLY)
    num_lanes = batch[-1].shape[0]
    lanes = [jax.tree.map(lambda x, i=i: x[i], (batch, batched)) for i in range(num_lanes)]
    for args, _ in (lanes[0], lanes[-1]) if with_plain else ():
        plain = _call_unchanged(function, args, where)
        again = function(*args)
        _check_equal(again, plain, f"{where} called twice with the same arguments differs", exact=True)
        _check_equal(compiled(*args), plain, f"{where} under jit differs from the plain call")
    for args, expected in lanes:
        _check_equal(compiled(*args), expected, f"{where} under vmap differs from a Python loop over lanes")
    return batched


def _call_unchanged(function: Any, args: tuple[Any, ...], where: str) -> Any:
    """Calls `function(*args)` and checks that its arguments stay unchanged."""
    leaves, structure = jax.tree.flatten(args)
    result = function(*args)
    leaves_after, structure_after = jax.tree.flatten(args)
    if structure != structure_after or any(x is not y for x, y in zip(leaves, leaves_after)):
        raise ConformanceError(f"{PREFIX}: {where} changed its arguments in place (expected new objects).")
    return result


def _check_equal(value: Any, expected: Any, problem: str, *, exact: bool = False) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(value), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        close = np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        if not close and x.dtype.kind == "f" and not exact:
            close = np.allclose(x, y, equal_nan=True, **_TOLERANCE)
        if not close:
            raise ConformanceError(
                f"{PREFIX}: {problem} in {jax.tree_util.keystr(path)} (expected a pure function of its arguments)."
            )


def _check_leaks(env: Environment) -> None:
    for attribute, value in getattr(env, "__dict__", {}).items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise ConformanceError(
                f"{PREFIX}: {type(env).__name__}.{attribute} kept a value of a traced call "
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
