"""Common parts of the adapters of other JAX libraries: states without keys, spaces, and one rule for ends of episodes.

An adapter gives `Adapted` three functions of the library's own states, which do not reset by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.play import KEY_NAMES
from podracer import configs, errors, spaces
from podracer.types import ArrayTree, EnvSpec, Transition

MOST_CHOICES = 1024
"""The largest number of values of a choice in observations: a network sees it as that many inputs."""


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """Sets JAX's default promotion of dtypes and ranks, on which other libraries rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def making(what: str) -> Iterator[None]:
    """Runs a library's code that makes an environment, whose errors become one line, and whose warnings none.

    Raises:
      ValueError: for any error.
    """
    try:
        with default_promotion(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} cannot be used here ({reason[:300]}).") from error


def check_known(prefix: str, name: str, known: Sequence[str]) -> None:
    """Checks that a library has an environment.

    Raises:
      ValueError: with the nearest name.
    """
    if name not in known:
        raise ValueError(f"{prefix} has no environment {name!r}; {configs.suggest(name, known)}")


def check_bare(env: Any, name: str) -> None:
    """Checks by the names of classes that an environment does not reset itself, count its steps or run in a batch.

    Raises:
      ValueError: naming the wrapper that does.
    """
    inner = env
    while inner is not None:
        kind = type(inner).__name__
        if any(re.search(r"AutoReset|Vmap|^(Episode|Eval|Log)Wrapper$", base.__name__) for base in type(inner).__mro__):
            raise ValueError(
                f"{name} is wrapped in {kind}: resets, time limits and batches are added here; give the environment "
                "inside of it."
            )
        members = getattr(inner, "__dict__", {})
        inner = members.get("env", members.get("_env"))


class State(NamedTuple):
    """The state of an adapted environment.

    Attributes:
      inner: the library's state, with None for its random keys.
      steps: int32 []; transitions of the episode so far.
    """

    inner: Any
    steps: jax.Array


class Step(NamedTuple):
    """The result of a library's step.

    Attributes:
      state: the library's state.
      reward: a number [].
      terminated: [], true or above 0 where the task itself has ended.
      truncated: [], true where the library ended the episode for another reason.
    """

    state: Any
    reward: Any
    terminated: Any
    truncated: Any = False


class Adapted:
    """An environment of another library, with the interface of `podracer.types.Environment`.

    The library's functions are traced under JAX's default promotion, and with exact products of matrices, whatever the
    learner's. States keep the dtypes and shapes that a reset gives them. They hold no keys: the key of a step is put in
    their place before it.

    Reward: the library's. Discount: 0 where the task ended, also on the step of the time limit; else 1.
    An observation or a reward that is not finite ends the episode: both are 0 then, and `episode/not_finite` counts it.

    Attributes:
      spec: the environment's spec.
      costly_reset: True where a reset costs much more than a step.
    """

    def __init__(
        self,
        name: str,
        reset: Callable[[jax.Array], Any],
        step: Callable[[Any, jax.Array, jax.Array], Step],
        observe: Callable[[Any], Any],
        action_space: spaces.Space,
        *,
        declared: Any = None,
        max_steps: int | None = None,
        costly_reset: bool = False,
    ):
        """Adapts an environment.

        Args:
          name: its name.
          reset: makes a state of the library from a key.
          step: (state, action, key) to the library's next state, reward and end.
          observe: reads the observation of a state of the library.
          action_space: the actions.
          declared: the library's own description of its observations, for their bounds; or None.
          max_steps: T, at which episodes are truncated; None for no limit of ours.
          costly_reset: see above.

        Raises:
          ValueError: for a limit below 1, functions that cannot be traced, observations that are not supported, or a
            number that is whole in the state of a reset and not in that of a step.
        """
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: an episode of {name} has at least 1 step.")
        self._reset, self._step, self._observe, self._limit = reset, step, observe, max_steps
        self.costly_reset = costly_reset
        try:
            with _exactly():
                key = jax.eval_shape(lambda: jax.random.key(0))
                inner, action = jax.eval_shape(reset, key), jax.eval_shape(action_space.sample, key)
                observation = jax.eval_shape(lambda state: named(observe(state)), inner)
                stepped = jax.eval_shape(lambda *args: step(*args).state, inner, action, key)
        except Exception as error:
            raise ValueError(f"{name} cannot be traced: {errors.explain(error)}.") from error
        paths, self._structure = jax.tree.flatten_with_path(inner)
        self._leaves = [leaf for _, leaf in paths]
        self._keys = [_is_key(path, leaf) for path, leaf in paths]
        _check_numbers(name, inner, stepped)
        floats = any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(observation))
        self.spec = EnvSpec(
            name=name,
            observation_space=observation_space(observation, declared),
            action_space=action_space,
            max_episode_steps=max_steps,
            metrics=("not_finite",) if floats else (),
        )

    def reset(self, key: jax.Array) -> State:
        """Starts an episode."""
        with _exactly():
            return State(self._without_keys(self._reset(key)), jnp.int32(0))

    def step(self, state: State, action: ArrayTree, key: jax.Array) -> tuple[State, Transition]:
        """Makes one transition."""
        inner_key, key = jax.random.split(key)
        with _exactly():
            result = self._step(self._with_keys(state.inner, inner_key), action, key)
            inner, reward = self._without_keys(result.state), jnp.asarray(result.reward, jnp.float32)
            finite = jnp.isfinite(reward) & _all_finite(self._seen(inner))
        steps = state.steps + 1
        terminated = jnp.asarray(result.terminated).astype(bool) | ~finite
        last = terminated | jnp.asarray(result.truncated).astype(bool)
        if self._limit is not None:
            last |= steps >= self._limit
        metrics = {name: 1.0 - finite.astype(jnp.float32) for name in self.spec.metrics}
        reward, discount = jnp.where(finite, reward, 0.0), 1.0 - terminated.astype(jnp.float32)
        return State(inner, steps), Transition(reward, discount, last, metrics)

    def observe(self, state: State) -> ArrayTree:
        """The observation, of the library's members by name; 0 where it is not finite."""
        with _exactly():
            seen = self._seen(state.inner)
            finite = _all_finite(seen)
        return jax.tree.map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), seen)

    def _seen(self, inner: Any) -> ArrayTree:
        """The observation of a state without keys, cast to its space."""
        return _cast(named(self._observe(inner)), self.spec.observation_space)

    def _without_keys(self, inner: Any) -> Any:
        """Takes the random keys out of a state, and gives the other leaves the dtypes and shapes of a reset."""
        leaves, structure = jax.tree.flatten(inner)
        if structure != self._structure:
            raise TypeError(f"{self.spec.name}.step returned a state of {structure}, and reset of {self._structure}")
        kept = [
            None if is_key else jnp.asarray(leaf, like.dtype).reshape(like.shape)
            for leaf, like, is_key in zip(leaves, self._leaves, self._keys)
        ]
        return jax.tree.unflatten(structure, kept)

    def _with_keys(self, inner: Any, key: jax.Array) -> Any:
        """Puts keys, all drawn from one, into a state."""
        kept, places = iter(jax.tree.leaves(inner)), sum(self._keys)
        keys = iter(jax.random.split(key, places) if places else ())
        leaves = [_like(next(keys), like) if is_key else next(kept) for like, is_key in zip(self._leaves, self._keys)]
        return jax.tree.unflatten(self._structure, leaves)


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
    with default_promotion(), jax.default_matmul_precision("highest"):
        yield


def _check_numbers(name: str, first: Any, stepped: Any) -> None:
    """Checks that no number of a state is whole after a reset and has a fraction after a step, which would be lost."""
    for (path, old), new in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(stepped)):
        whole = old.dtype == jnp.bool_ or jnp.issubdtype(old.dtype, jnp.integer)
        if whole and jnp.issubdtype(new.dtype, jnp.inexact):
            raise ValueError(
                f"{name}: state{jax.tree_util.keystr(path)} is {old.dtype} from a reset and {new.dtype} from a step, "
                "whose fraction would be lost; let reset begin with a float, such as 0.0."
            )


def _is_typed(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_key(path: Any, leaf: Any) -> bool:
    """True for a random key of a state, or an array of them."""
    name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
    return _is_typed(leaf) or (leaf.dtype == jnp.uint32 and leaf.shape[-1:] == (2,) and bool(KEY_NAMES.search(name)))


def _like(key: jax.Array, like: Any) -> jax.Array:
    """Makes keys of the form and shape of others from one."""
    shape = like.shape if _is_typed(like) else like.shape[:-1]
    keys = jax.random.split(key, shape) if shape else key
    return keys if _is_typed(like) else jax.random.key_data(keys)


def named(value: Any) -> Any:
    """Converts mappings, named tuples and dataclasses of arrays to nested dicts.

    Raises:
      TypeError: for other tuples, and lists.
    """
    if isinstance(value, Mapping):
        members = dict(value)
    elif hasattr(value, "_asdict"):
        members = value._asdict()
    elif dataclasses.is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple | list):
        raise TypeError(f"observations are a {type(value).__name__}, whose parts have no names; return a dict")
    else:
        return jnp.asarray(value)
    return {str(key): named(member) for key, member in members.items()}


def _cast(value: Any, space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _cast(value[name], item) for name, item in space.items}
    return value.astype(space.dtype)


def _all_finite(observation: ArrayTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(observation) if jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in floats], jnp.asarray(True))


def observation_space(shapes: Any, declared: Any = None) -> spaces.Space:
    """Makes the space of observations.

    Args:
      shapes: nested dicts of arrays' shapes and dtypes, as they are traced.
      declared: the library's own space or spec, of which the bounds are taken; or None.
    """
    if isinstance(shapes, dict):
        return spaces.Dict({name: observation_space(item, _member(declared, name)) for name, item in shapes.items()})
    shape, dtype, limits = shapes.shape, shapes.dtype, bounds(declared)
    if dtype == jnp.bool_:
        return spaces.Box(0, 1, shape, np.uint8)
    if jnp.issubdtype(dtype, jnp.floating):
        # Bounds that differ between elements are often only near the truth.
        low, high = (
            bound.flat[0] if np.all(bound == bound.flat[0]) else np.nan for bound in limits or (np.zeros(1),) * 2
        )
        shared = limits is not None and np.isfinite([low, high]).all() and low < high < np.finfo(np.float32).max
        return spaces.Box(float(low), float(high), shape) if shared else spaces.Box(-np.inf, np.inf, shape)
    kind = np.iinfo(dtype if dtype.itemsize <= 4 else np.int32)
    low, high = (
        (kind.min, kind.max) if limits is None else (max(limits[0].min(), kind.min), min(limits[1].max(), kind.max))
    )
    choice = any(hasattr(declared, name) for name in ("n", "num_values"))
    if choice and shape == () and low == 0 and high < MOST_CHOICES:
        return spaces.Discrete(int(high) + 1)
    return spaces.Box(int(low), int(high), shape, kind.dtype)


def action_space(declared: Any, name: str) -> spaces.Space:
    """Converts a library's space or spec of actions.

    Raises:
      ValueError: for one that is not supported.
    """
    counts = np.asarray(getattr(declared, "num_values", getattr(declared, "n", None)))
    from_zero = not np.any(getattr(declared, "start", 0))
    if from_zero and counts.dtype.kind in "iu" and counts.ndim == 0:
        return spaces.Discrete(int(counts))
    if from_zero and counts.dtype.kind in "iu" and counts.ndim == 1:
        return spaces.MultiDiscrete(tuple(counts.tolist()))
    limits = bounds(declared)
    floats = jnp.issubdtype(getattr(declared, "dtype", np.int32), jnp.floating)
    if limits and floats and all(np.isfinite(bound).all() for bound in limits):
        low, high = (np.broadcast_to(bound, tuple(declared.shape)) for bound in limits)
        return spaces.Box(low, high, tuple(declared.shape))
    raise ValueError(
        f"{name} takes actions in {' '.join(repr(declared).split())}, which is not supported; discrete ones from 0, "
        "multi-discrete ones of one axis and a Box of floats with finite bounds are."
    )


def bounds(declared: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Reads the smallest and largest values of a library's space or spec; None where it has none."""
    for low, high in (("low", "high"), ("minimum", "maximum")):
        if hasattr(declared, low) and hasattr(declared, high):
            return np.asarray(getattr(declared, low)), np.asarray(getattr(declared, high))
    count = np.asarray(getattr(declared, "n", None))
    return (np.asarray(0), count - 1) if count.dtype.kind in "iu" and count.ndim == 0 else None


def _member(declared: Any, name: str) -> Any:
    members = getattr(declared, "spaces", declared)
    return members.get(name) if isinstance(members, Mapping) else getattr(members, name, None)
