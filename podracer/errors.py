"""Errors that users and other packages catch, and explanations of errors that JAX raised in a user's own code.

An error for callers of one module alone, such as `podracer.nets.NetworkError`, is defined there.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from podracer.system import own_code


class ActorError(RuntimeError):
    """An actor or an evaluation failed; the cause is chained."""


def failed(who: str, environment: str, error: BaseException) -> ActorError:
    """The error to raise for an error of an actor or an evaluation, with the user's own line in it; the cause is
    chained."""
    return ActorError(f"{who} failed in {environment}: {own_code.describe(error)}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; the message says where, and what to do."""


class Closed(Exception):  # noqa: N818 - not an error: how a thread learns that the run is over
    """The run is over: threads that wait for it end."""


class DisagreementError(ValueError):
    """The processes of a pod have different settings or versions."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP stopped a run in good order: with its checkpoint, if it has a run directory.

    It is a KeyboardInterrupt, so that a loop over runs ends with it and `except Exception` does not catch it.

    Attributes:
      result: the `podracer.Result` so far; its `summary` has the number of steps.
      signal: the signal's name, such as "SIGINT".
    """

    def __init__(self, result: Any, signal: str, then: str):
        super().__init__(f"stopped by {signal} at {result.summary['env_steps']:,} steps; {then}")
        self.result, self.signal = result, signal


LOST = 3
"""The exit code of a process that ends because of another one."""


class OutOfMemoryError(RuntimeError):
    """A device has too little memory for a run."""


class PeerError(RuntimeError):
    """Another process of the pod is gone, does not answer or has failed; the message names it.

    Attributes:
      said: True once it has been printed, which must happen before JAX ends this process.
    """

    def __init__(self, message: str, said: bool = False):
        super().__init__(message)
        self.said = said


class RemoteError(RuntimeError):
    """The run cannot continue without workers that are missing."""


class TrainingDivergedError(RuntimeError):
    """The loss, a gradient or another metric stopped being a finite number."""

    @classmethod
    def of(
        cls, metrics: dict[str, np.ndarray], env_steps: int, updates: int, culprit: str = ""
    ) -> TrainingDivergedError:
        """The error for metrics that are not finite; `culprit` names the environment's numbers that were not finite
        first."""
        broken = sorted(name for name, value in metrics.items() if not np.all(np.isfinite(value)))
        what = f"{', '.join(broken)} not finite after {env_steps} environment steps ({updates} updates)"
        if culprit:
            return cls(f"{culprit}, and so {what}; mend the environment, for no setting helps against that.")
        return cls(
            f"{what}; lower the learning rate or max_grad_norm, or check the environment's rewards and observations."
        )


PURE = "networks are pure functions, so use LayerNorm or GroupNorm instead of BatchNorm"

REMEDIES = {
    "TracerBoolConversionError": "use jnp.where or jax.lax.cond instead of if, while, and, or",
    "TracerArrayConversionError": "use jax.numpy instead of numpy",
    "TracerIntegerConversionError": (
        "index an array (jnp.asarray) instead of a list, and loop with jax.lax.fori_loop instead of range"
    ),
    "NonConcreteBooleanIndexError": "use jnp.where instead of indexing with a mask",
    "ConcretizationTypeError": "use .astype(...) instead of int() or float(), and shapes that depend on no array",
    "immutable|batch_stats|BatchNorm": PURE,
    "called with an RNG": "use hk.without_apply_rng(net).apply",
}
"""The remedy for an error whose type or text matches, the special before the general."""


def explain(error: BaseException) -> str:
    """`ErrorType: reason, in FUNCTION, FILE, line N, `source`: what to do`, without a full stop."""
    reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    problem = f"{type(error).__name__}: {reason}"
    remedy = next((f": {text}" for pattern, text in REMEDIES.items() if re.search(pattern, problem)), "")
    return f"{problem}{own_code.line(error)}{remedy}"
