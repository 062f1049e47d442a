"""Noisy networks (Fortunato et al. 2018): parameters drawn anew for every use."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from podracer.types import ArrayTree


def perturb(params: ArrayTree, key: jax.Array) -> ArrayTree:
    """Adds noise to the parameters of all layers that have a sigma (`layers.Dense`).

    Noise is factorised (equations 10 and 11): W + sigma f(e_in) f(e_out)' and b + sigma f(e_out), where e are standard
    normal numbers of a layer's inputs and outputs, and f(e) = sign(e) sqrt|e|. Gradients reach W, b and each sigma.

    Args:
      params: nested dicts of arrays.
      key: consumed.
    """
    numbers = itertools.count()

    def walk(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        if "kernel_sigma" not in part:
            return {name: walk(part[name]) for name in sorted(part)}
        inputs, outputs = part["kernel"].shape
        e = jax.random.normal(jax.random.fold_in(key, next(numbers)), (inputs + outputs,))
        f = jnp.sign(e) * jnp.sqrt(jnp.abs(e))
        kernel = part["kernel"] + part["kernel_sigma"] * jnp.outer(f[:inputs], f[inputs:])
        return {**part, "kernel": kernel, "bias": part["bias"] + part["bias_sigma"] * f[inputs:]}

    return walk(params)
