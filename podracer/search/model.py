"""The contract of a model to search in: pure functions at the root and after an action."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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


class RootFn(Protocol):
    """Makes the roots of searches."""

    def __call__(self, variables: Any, observation: ArrayTree, /) -> Root:
        """Makes N roots from observations [N]."""
        ...


class StepFn(Protocol):
    """Computes the model's outputs after an action."""

    def __call__(self, variables: Any, embedding: ArrayTree, action: jax.Array, /) -> Step:
        """Computes them for states [N] and actions int32 [N]; after an episode's end, anything finite will do."""
        ...


class Model(NamedTuple):
    """A model to search in: pure functions of arrays, each lane independent of the others.

    Attributes:
      root: makes the roots of searches.
      step: computes the model's outputs after an action.
    """

    root: RootFn
    step: StepFn
