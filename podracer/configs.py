"""Typed, validated configuration: frozen dataclasses whose fields carry their own limits.

A config field is declared with `field(default, low=..., high=..., tunable=...)`; `check(config)` in `__post_init__`
then raises one clear ValueError for a wrong type or range. Fields marked `tunable` are numbers that live in
`LearnerState.hyper` as arrays, so that a population can vary them without compiling again.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def field(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    at_most: tuple[str, str] | None = None,
    tunable: bool = False,
) -> Any:
    """Declares a field with inclusive limits; `tunable` numbers may differ within a population.

    Args:
      default: its default.
      low: the least value.
      high: the largest value.
      at_most: another field whose value it does not exceed, and the end of the sentence that says so.
      tunable: the number lives in `LearnerState.hyper`.
    """
    metadata = {"low": low, "high": high, "at_most": at_most, "tunable": tunable}
    return dataclasses.field(default=default, metadata=metadata)


def require_defaults(config: Any, names: Iterable[str], why: str, error: type[ValueError] = ValueError) -> None:
    """Checks that some fields have their defaults, where other values would have no effect.

    Args:
      config: a dataclass.
      names: of the fields.
      why: the middle of the message, after the field and its value.
      error: the kind of error.

    Raises:
      error: naming the field and its value.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(config)}
    for name in names:
        if (value := getattr(config, name)) != defaults[name]:
            raise error(f"{name}={value!r} {why}; leave it out.")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check(config: Any) -> None:
    """Validates every field of a dataclass against its annotation and limits.

    Values that equal an allowed one become it: 1e5 an integer, 1 a float, a list a tuple, NumPy's numbers Python's.

    Raises:
      ValueError: naming the field, its value and its limits.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        expected = _hints(type(config))[item.name]
        where = f"{type(config).__name__}.{item.name}={value!r}"
        try:
            value = _exactly(value, expected)
        except TypeError:
            raise ValueError(f"{where}: expected {describe(expected)}.") from None
        object.__setattr__(config, item.name, value)
        _check_range(where, value, item.metadata.get("low"), item.metadata.get("high"))
    _check_order(config)


def _check_range(where: str, value: Any, low: float | None, high: float | None) -> None:
    values = np.asarray(value if isinstance(value, tuple) else [value])
    if values.dtype.kind not in "iuf" or not values.size:
        return
    if values.dtype.kind == "f" and np.any(np.isnan(values)):
        raise ValueError(f"{where}: must be a number, not NaN.")
    if low is not None and np.any(values < low):
        raise ValueError(f"{where}: must be at least {low}.")
    if high is not None and np.any(values > high):
        raise ValueError(f"{where}: must be at most {high}.")


def _check_order(config: Any) -> None:
    for item in dataclasses.fields(config):
        if item.metadata.get("at_most"):
            (other, why), value = item.metadata["at_most"], getattr(config, item.name)
            if value > (most := getattr(config, other)):
                raise ValueError(f"{item.name}={value} must be at most {other}={most}{why}; use {most}.")


def _exactly(value: Any, expected: Any) -> Any:
    """Converts a value to its annotated type.

    Raises:
      TypeError: if that would change the value.
    """
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            with contextlib.suppress(TypeError):
                return _exactly(value, arg)
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, tuple | list):
            return tuple(_exactly(item, args[0]) for item in value)
    elif expected in (int, float):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if whole or (isinstance(value, float | np.floating) and (expected is float or float(value).is_integer())):
            return expected(value)
    elif expected is Any or isinstance(value, expected):
        return value
    raise TypeError


def describe(expected: Any) -> str:
    """Describes a type annotation in words, for error messages."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple:
        return f"a tuple of {describe(args[0])}"
    if expected is type(None):
        return "None"
    return {int: "an integer", float: "a number", bool: "True or False", str: "a string"}.get(expected, str(expected))


def tunables(config: Any) -> dict[str, float]:
    """Returns the tunable numbers of a config, by name."""
    return {f.name: float(getattr(config, f.name)) for f in dataclasses.fields(config) if f.metadata.get("tunable")}


def members(population: int, overrides: Mapping[str, Any] | None) -> int:
    """Returns a run's number of members: `population`, or if that is 1, the number of values of an override."""
    sizes = [np.size(values) for values in (overrides or {}).values()]
    return max([1, *sizes]) if population == 1 else population


def population_hyper(
    config: Any, population: int, overrides: Mapping[str, Any] | None, used: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Returns the tunable numbers of every member: float32 [population] by name.

    Args:
      config: an agent's config, for the limits.
      population: number of members.
      overrides: numbers or sequences of length `population`, by field name.
      used: the tunable numbers that the agent uses, with their defaults; None for those of the config.

    Raises:
      ValueError: for a field that is not tunable or not used, a wrong length, or a value outside its limits.
    """
    of_config = tunables(config)
    defaults = of_config if used is None else used
    unused, limits = set(of_config) - set(defaults), {f.name: f.metadata for f in dataclasses.fields(config)}
    hyper = {name: np.full(population, value, np.float32) for name, value in defaults.items()}
    overrides = overrides or {}
    for name, values in overrides.items():
        where = f"hyper[{name!r}]"
        if name not in of_config:
            raise ValueError(f"{where}: not a tunable number of {type(config).__name__}; {suggest(name, of_config)}")
        if name in unused:
            raise ValueError(f"{where}: the agent does not use it with its settings; used: {', '.join(sorted(hyper))}.")
        array = np.asarray(values)
        if array.dtype.kind not in "iuf" or array.shape not in ((), (population,)):
            raise ValueError(f"{where}: give one number, or {population} numbers (one a member); got {values!r}.")
        _check_range(f"{where}={values!r}", tuple(array.ravel().tolist()), limits[name]["low"], limits[name]["high"])
        hyper[name] = np.broadcast_to(array, (population,)).astype(np.float32)
    for member in range(population if overrides else 0):
        numbers = {name: np.broadcast_to(values, population)[member].item() for name, values in overrides.items()}
        try:
            dataclasses.replace(config, **numbers)
        except ValueError as error:
            raise ValueError(f"hyper, member {member}: {error}") from None
    return hyper


OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "anneal_lr": ("learning_rate_schedule",),
    "buffer_size": ("replay_capacity",),
    "clip_coef": ("clip_epsilon",),
    "clip_eps": ("clip_epsilon",),
    "clip_range": ("clip_epsilon",),
    "ent_coef": ("entropy_cost",),
    "gae_lambda": ("gae_lambda", "trace_lambda"),
    "gamma": ("discount",),
    "learning_starts": ("replay_min_size",),
    "lr": ("learning_rate",),
    "lstm_size": ("core", "core_size"),
    "n_envs": ("num_envs",),
    "n_epochs": ("num_epochs",),
    "n_steps": ("rollout_length",),
    "net_arch": ("hidden_sizes",),
    "num_steps": ("rollout_length",),
    "update_epochs": ("num_epochs",),
    "vf_coef": ("value_cost",),
    # Of earlier versions:
    "adam_b2": ("optimizer_b2",),
    "adam_eps": ("optimizer_eps",),
    "baseline_cost": ("value_cost",),
    "learning_rate_decay": ("learning_rate_schedule",),
    "lambda_": ("trace_lambda", "gae_lambda"),
    "num_atoms": ("num_bins",),
    "policy_period": ("policy_interval",),
    "radam_eps": ("optimizer_eps",),
    "samples_per_row": ("replay_ratio",),
    "target_period": ("target_interval",),
    "target_update_interval": ("target_interval",),
    "update_period": ("replay_ratio",),
    "v_max": ("max_value",),
}
"""Names of settings in other libraries and in earlier versions, and the names here."""

OTHER_UNITS = {
    "anneal_lr": "'linear' for True and 'constant' for False",
    "learning_rate_decay": "'linear' for True and 'constant' for False",
    "target_period": "in updates, each of batch_size / replay_ratio rows",
    "update_period": "batch_size / update_period",
}
"""Values of settings in `OTHER_NAMES` whose unit is another here."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns 'did you mean ...? Known: ...' for an unknown name."""
    names = sorted(known)
    by_lower = {name.lower(): name for name in names}
    ours = [other for other in OTHER_NAMES.get(name, ()) if other in names]
    close = ours or [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.5)]
    unit = f", {OTHER_UNITS[name]}" if ours and name in OTHER_UNITS else ""
    hint = f"did you mean {' or '.join(repr(c) for c in close)}{unit}? " if close else ""
    return f"{hint}known: {', '.join(names)}."


def assignment(text: str, field: str = "settings") -> tuple[str, Any]:
    """Splits `name=value`, an element of an option called `field`; a value that is no Python literal is a string.

    Raises:
      ValueError: without a `=`.
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{field}={text!r}: write name=value.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def to_json(config: Any) -> dict[str, Any]:
    """Converts a dataclass to a JSON-able dict (non-finite numbers as strings)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        if isinstance(value, np.ndarray):
            return [plain(item) for item in value.tolist()]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    return plain(config)


def from_json(cls: type, values: Mapping[str, Any]) -> Any:
    """Inverts `to_json` for a flat config dataclass.

    Raises:
      ValueError: for a field that `cls` does not have, or a value that it refuses.
    """
    known = {f.name for f in dataclasses.fields(cls)}
    for name in values:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {name!r}; {suggest(name, known)}")
    return cls(**{name: _coerce(value, _hints(cls)[name]) for name, value in values.items()})


def _coerce(value: Any, expected: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if value in ("inf", "-inf") and (expected is float or float in typing.get_args(expected)):
        return float(value)
    return value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lists the differences between two JSON configs, one on a line, such as `agent.learning_rate: 0.1 -> 0.2`."""
    lines = []
    for key in sorted(set(old) | set(new)):
        before, after = old.get(key, "absent"), new.get(key, "absent")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} -> {after}")
    return lines
