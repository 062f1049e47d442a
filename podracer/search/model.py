"""The contract of a model to search in: pure functions at the root and after an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from podracer.types import ArrayTree


class Root(NamedTuple):
    """The model's outputs at the roots of N searches.

    Attributes:
      logits: float [N, A]; the policy's.
      value: float [N].
      embedding: tree of [N, ...]; the input of `Model.step`.
      legal: bool [N, A]; None if all actions are legal.
    """

    logits: jax.Array
    value: jax.Array
    embedding: ArrayTree
    legal: jax.Array | None = None


class Step(NamedTuple):
    """The model's outputs after an action.

    Attributes:
      reward: float [N]; of the player who acted.
      discount: float [N]; 0 if the episode ended, negative if the other player moves next.
      logits: float [N, A]; the policy's in the next state.
      value: float [N]; of the next state, for the player to move.
      embedding: tree of [N, ...]; of the next state.
      legal: bool [N, A]; legal actions in the next state; None if the model does not know them.
    """

    reward: jax.Array
    discount: jax.Array
    logits: jax.Array
    value: jax.Array
    embedding: ArrayTree
    legal: jax.Array | None = None


class Model(NamedTuple):
    """A model to search in: pure functions of arrays, each lane independent of the others.

    Attributes:
      root: `(variables, observation [N]) -> Root`.
      step: `(variables, embedding [N], action int32 [N]) -> Step`. After an episode's end it may return anything
        finite.
    """

    root: Callable[[Any, ArrayTree], Root]
    step: Callable[[Any, ArrayTree, jax.Array], Step]
