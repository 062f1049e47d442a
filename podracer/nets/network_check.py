"""A check of users' networks, by tracing them once when an agent is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer import distributions, errors, spaces
from podracer.nets.network import Inputs, Network, NetworkError
from podracer.nets.networks import num_actions
from podracer.types import ArrayTree, EnvSpec

T, B = 2, 3
"""Rows and lanes of the trace: different numbers, so that mixed up axes show."""

LIBRARIES = {
    "flax.linen": "nets.feed_forward(lambda key: module.init(key, observations), module.apply)",
    "flax.nnx": "nets.feed_forward(init, apply), where init returns nnx.state(module, nnx.Param) and apply merges",
    "equinox": "nets.feed_forward(init, apply), where init returns what eqx.partition finds and apply combines",
    "haiku": "nets.feed_forward(lambda key: net.init(key, observations), hk.without_apply_rng(net).apply)",
}
"""Network libraries, and the code that makes functions of parameters of their networks."""


def check(
    network: Any,
    spec: EnvSpec,
    agent: str,
    *,
    action_values: bool = False,
    num_bins: int = 1,
    outputs: tuple[int, str] | None = None,
) -> None:
    """Checks a user's own network; nothing is compiled or run.

    Args:
      network: the object to check.
      spec: the environment's, frames stacked (`stacked_spec`).
      agent: the agent's name.
      action_values: True for a network of action values, False for one of a policy.
      num_bins: K, numbers for the value of an action.
      outputs: P, the number of outputs, and their meaning; those of the action space's distribution if None.

    Raises:
      NetworkError: for an object that is no `Network`, a function that cannot be traced, parameters that cannot be
        learnt, or results of wrong shapes.
      ValueError: for an action space that the agent does not have.
    """
    if not isinstance(network, Network):
        raise NetworkError(_no_network(network))
    params = _trace("init", lambda key: _learnable(network.init(key)), jax.eval_shape(lambda: jax.random.key(0)))
    start = _trace("start", lambda: network.start(B))
    for path, leaf in jax.tree.leaves_with_path(start):
        if leaf.shape[:1] != (B,):
            where = f"state{jax.tree_util.keystr(path)}"
            raise NetworkError(f"the network's start({B}) returns {_show(leaf)} as {where}; it must be [{B}, ...].")

    def rows() -> Inputs:
        tile = lambda space: jax.tree.map(lambda x: jnp.broadcast_to(x, (T, B, *x.shape)), spaces.zeros(space))  # noqa: E731
        actions = tile(spec.action_space) if jax.tree.leaves(start) else ()
        return Inputs(tile(spec.observation_space), jnp.zeros((T, B)), jnp.ones((T, B), bool), actions)

    results = _trace("apply", network.apply, params, jax.eval_shape(rows), start)
    if not isinstance(results, tuple) or len(results) != 3:
        raise NetworkError(
            f"the network's apply returns {_show(results)}; it must return three things: outputs [T, B, P], values "
            "[T, B] and the state."
        )
    found, values, state = results
    if not _is_array(found) or found.shape[:-1] != (T, B) or not _is_array(values) or values.shape != (T, B):
        raise NetworkError(
            f"the network returns outputs {_show(found)} and values {_show(values)} for rows [{T}, {B}]; they must "
            f"be float32 [{T}, {B}, P] and [{T}, {B}]."
        )
    P, meaning = outputs or _outputs(spec, action_values, num_bins)
    if found.shape[-1] != P:
        raise NetworkError(
            f"{agent} on {_brief(spec.action_space)} needs P = {P} outputs: {meaning}; the network returns "
            f"{found.shape[-1]}."
        )
    if _types(state) != _types(start):
        raise NetworkError(
            f"the network's state is {_show(start)} at the start and {_show(state)} after apply; both must be of one "
            "structure, with arrays of the same shapes and dtypes."
        )


def check_critic(critic: Any, rows: Callable[[], Inputs], num_actions: int, agent: str, num_values: int = 1) -> None:
    """Checks a user's own critics (`nets.Critic`); nothing is compiled or run.

    Args:
      critic: the object to check.
      rows: makes inputs [1, B].
      num_actions: A, elements of an action.
      agent: the agent's name.
      num_values: K, numbers that stand for a value.

    Raises:
      NetworkError: for functions that cannot be traced, parameters that cannot be learnt, or values of a wrong shape.
    """
    params = _trace("critic.init", lambda key: _learnable(critic.init(key)), jax.eval_shape(lambda: jax.random.key(0)))
    action = jax.ShapeDtypeStruct((B, num_actions), jnp.float32)
    values = _trace("critic.apply", critic.apply, params, jax.eval_shape(rows), action)
    if not _is_array(values) or values.ndim != 3 or values.shape[1:] != (B, num_values):
        raise NetworkError(
            f"the critics return {_show(values)} for observations [1, {B}] and actions [{B}, {num_actions}]; {agent} "
            f"needs float32 [N, {B}, {num_values}], a value of each of N critics."
        )


def _outputs(spec: EnvSpec, action_values: bool, num_bins: int) -> tuple[int, str]:
    """Returns the required number of outputs and their meaning."""
    space = spec.action_space
    if action_values:
        P = num_actions(spec)
        meaning = "the value of each action" if num_bins == 1 else f"{num_bins} numbers for the value of each action"
        return P * num_bins, meaning
    P = distributions.for_space(space).num_outputs
    if isinstance(space, spaces.Box):
        return P, f"{P // 2} means and {P // 2} log standard deviations"
    if isinstance(space, spaces.MultiDiscrete):
        return P, f"the logits of {' + '.join(map(str, space.num_values))} choices"
    return P, "the logit of each action"


def _brief(space: spaces.Space) -> str:
    sizes = {spaces.Discrete: "num_values", spaces.MultiDiscrete: "num_values", spaces.Box: "shape"}
    size = getattr(space, sizes[type(space)])
    return f"{type(space).__name__}({', '.join(map(str, size)) if isinstance(size, tuple) else size})"


def _no_network(network: Any) -> str:
    """Returns the message for an object that is no `Network`: most are modules of a network library."""
    cls = network if isinstance(network, type) else type(network)
    modules = [base.__module__ for base in cls.__mro__]
    library = next((name for name in LIBRARIES if any(f"{m}.".startswith(f"{name}.") for m in modules)), "")
    wrap = f"wrap it: {LIBRARIES[library]}; see examples/networks" if library else "use nets.feed_forward(init, apply)"
    return f"network={cls.__name__} is no podracer.nets.Network; {wrap}."


def _learnable(params: ArrayTree) -> ArrayTree:
    """Returns the parameters after checking that they can be learnt.

    Raises:
      NetworkError: naming the first leaf that cannot be learnt.
    """
    is_statistic = lambda node: type(node).__name__ == "BatchStat"  # noqa: E731 - of NNX
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_statistic):
        where = f"the network's params{jax.tree_util.keystr(path)}"
        if is_statistic(leaf) or "batch_stats" in where:
            raise NetworkError(f"{where} is a running statistic, which learning does not update; {errors.PURE}.")
        if not isinstance(leaf, float) and not hasattr(leaf, "dtype"):
            raise NetworkError(
                f"{where} is {type(leaf).__name__}, not an array; let init return arrays only, and keep the rest "
                "outside, as eqx.partition(module, eqx.is_inexact_array) does."
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise NetworkError(
                f"{where} is {_show(leaf)}, which has no gradient; let init return floats only, and keep the rest "
                "outside, as nnx.split(module, nnx.Param, ...) does."
            )
    return params


def _trace(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the shapes of the results of a function of the network.

    Raises:
      NetworkError: if it fails, with the innermost line that is the user's own.
    """
    try:
        return jax.eval_shape(function, *args)
    except NetworkError:
        raise
    except Exception as error:
        raise NetworkError(f"the network's {name} cannot be traced: {errors.explain(error)}.") from error


def _is_array(x: Any) -> bool:
    """Returns True for floats of 32 bits or more, in which probabilities and their ratios are exact enough."""
    return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4


def _types(tree: Any) -> Any:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _show(tree: Any) -> str:
    """Shows a tree with dtypes and shapes instead of arrays."""
    return str(jax.tree.map(lambda x: f"{x.dtype} [{', '.join(map(str, x.shape))}]", tree))
