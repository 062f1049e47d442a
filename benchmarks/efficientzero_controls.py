"""EfficientZero with one part broken: what learns all the same does not depend on that part."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.search import prefix_models
from podracer.types import Agent, EnvSpec

Part = Literal["dynamics", "actions", "policies"]


class Frozen(prefix_models.PrefixModel):
    """A model of vectors whose dynamics get no gradient."""

    def learning(self, function: Any, params: Any, *arguments: Any) -> Any:
        """As of any model."""
        layers = params["params"]
        stopped = {layer: jax.lax.stop_gradient(layers[layer]) for layer in ("g", "g_state")}
        return super().learning(function, {"params": layers | stopped}, *arguments)


class Blind(prefix_models._Vectors):
    """Vectors whose dynamics see no action: a search finds all actions of a state alike."""

    def advance(self, state: jax.Array, action: jax.Array) -> jax.Array:
        """As of the first action."""
        return super().advance(state, jnp.zeros_like(action))


def blind(model: prefix_models.PrefixModel) -> prefix_models.PrefixModel:
    """The same model, blind to actions."""
    fields = (field.name for field in dataclasses.fields(model.module) if field.name not in ("parent", "name"))
    return model._replace(module=Blind(**{name: getattr(model.module, name) for name in fields}))


def shuffled(said: Any, seen: Any, target: Any, *rest: Any) -> Any:
    """The loss, of the policies of other samples."""
    return efficientzero.loss(said, seen, target._replace(policy=jnp.roll(target.policy, 1, axis=1)), *rest)


def make(part: Part, spec: EnvSpec, config: EfficientZeroConfig) -> Agent:
    """The agent without gradients of its dynamics, without actions in them, or with the policies of other samples."""
    model = prefix_models.make(spec, config)
    network = {"dynamics": Frozen(*model), "actions": blind(model)}.get(part)
    return efficientzero.make(spec, config, network, shuffled if part == "policies" else efficientzero.loss)
