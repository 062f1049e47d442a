"""State that lanes have besides their episodes: running statistics of observations, and random generators."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

STATISTICS = ("obs_rms", "observation_rms", "return_rms", "ret_rms", "reward_rms", "rew_rms")
"""Names of running statistics in Gymnasium and similar libraries."""

REMEDY = {
    "normalize_observations": "TransformObservation or RescaleObservation with fixed numbers",
    "normalize_rewards": "TransformReward with a fixed factor",
}
"""Settings of ppo with statistics in the policy, and wrappers for other agents."""

MASKS = ("action_mask", "action_masks", "legal_actions", "valid_actions", "available_actions", "avail_actions")
"""Names of entries of `info`, and of methods, for masks of legal actions."""

DEPTH, MOST = 3, 1000
"""Limits of the search for generators: levels below a layer, and objects of a layer."""


def check_statistics(environment: gymnasium.Env, name: str) -> None:
    """Checks that no layer of an environment keeps running statistics.

    Raises:
      ValueError: naming one that does, and the agent's own setting: its statistics would begin anew in every lane and
        in every evaluation, and the policy would be without them.
    """
    for layer in layers(environment):
        for attribute, value in _attributes(layer):
            if _is_statistics(layer, attribute, value) and not _is_frozen(layer):
                rewards = isinstance(layer, gymnasium.RewardWrapper) or attribute.startswith(("re", "rw"))
                setting = "normalize_rewards" if rewards else "normalize_observations"
                raise ValueError(
                    f"{name}: {type(layer).__name__} keeps running statistics ({attribute}), which begin anew in every "
                    f"lane and every evaluation and are no part of the policy; leave it out and use the agent's own "
                    f"{setting}=True (ppo), or {REMEDY[setting]}."
                )


def layers(environment: Any) -> Iterator[Any]:
    """Yields the wrappers of an environment from the outermost on, and itself."""
    while isinstance(environment, gymnasium.Wrapper):
        yield environment
        environment = environment.env
    yield environment


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return list(getattr(thing, "__dict__", {}).items())


def _is_statistics(layer: Any, attribute: str, value: Any) -> bool:
    """Returns True for a running mean and variance; outside wrappers, by the attribute's name alone."""
    if value is None or isinstance(value, bool | str):
        return False
    if attribute.lstrip("_") in STATISTICS:
        return True
    moments = getattr(value, "mean", None), getattr(value, "var", getattr(value, "std", None))
    # Numbers: a table or an array has methods of these names.
    described = not any(x is None or callable(x) for x in moments) and hasattr(value, "update")
    counted = any(hasattr(value, count) for count in ("count", "n", "_n", "num"))
    return isinstance(layer, gymnasium.Wrapper) and described and counted


def _is_frozen(layer: Any) -> bool:
    """Returns True for a layer that is set not to update its statistics."""
    return not getattr(layer, "update_running_mean", True) or not getattr(layer, "training", True)


def unseen_mask(space: gymnasium.Space, info: Mapping[str, Any], lane: gymnasium.Env | None) -> str | None:
    """Describes the place of a mask of actions that is in no observation; None without one."""
    if isinstance(space, gymnasium.spaces.Dict) and not set(MASKS).isdisjoint(space.spaces):
        return None
    if name := next((name for name in MASKS if name in info), None):
        return f"{name} in its info"
    inside = [] if lane is None else list(layers(lane))
    return next((f"a method {name}" for name in MASKS for x in inside if callable(getattr(x, name, None))), None)


def shared_generator(states: Sequence[Mapping[str, str]], observation: Any) -> str | None:
    """Names a generator with one state in all lanes, if their observations are equal too; None without one.

    Args:
      states: states of each lane's `generators`, after a reset with a seed of its own.
      observation: tree of [B, ...]; the lanes' first observations.
    """
    same = all(np.array_equal(x, np.broadcast_to(x[:1], x.shape)) for x in _arrays(observation))
    if not same or len(states) < 2:
        return None
    return next((name for name, state in states[0].items() if all(s.get(name) == state for s in states[1:])), None)


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, Mapping | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _arrays(item)
    else:
        yield np.asarray(tree)


def generators(environment: gymnasium.Env) -> dict[str, str]:
    """Returns the states of the random generators in an environment, its wrappers and their attributes, by name."""
    found: dict[str, str] = {}
    for layer in layers(environment):
        _search(layer, type(layer).__name__, DEPTH, found, set())
    return found


def _search(thing: Any, name: str, depth: int, found: dict[str, str], seen: set[int]) -> None:
    if id(thing) in seen or len(seen) > MOST:
        return
    seen.add(id(thing))
    state = _state(thing)
    if state is not None:
        found[name] = state
    elif depth:
        for key, value in _attributes(thing):
            if not isinstance(value, gymnasium.Env | gymnasium.Space | types.ModuleType | type):
                _search(value, f"{name}.{key}", depth - 1, found, seen)


def _state(thing: Any) -> str | None:
    """Returns the state of a generator of NumPy, Python or PyTorch, or of a key of JAX; None for other objects."""
    if isinstance(thing, np.random.Generator):
        return repr(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return repr([x.tolist() if isinstance(x, np.ndarray) else x for x in thing.get_state()])
    if isinstance(thing, random.Random):
        return repr(thing.getstate())
    if type(thing).__module__.startswith("torch") and hasattr(thing, "get_state"):
        return repr(thing.get_state().tolist())
    dtype, shape = str(getattr(thing, "dtype", "")), getattr(thing, "shape", None)
    return repr(thing) if dtype.startswith("key<") or (dtype == "uint32" and shape == (2,)) else None
