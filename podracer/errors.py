"""Why code of the user's own cannot be traced: the error, the user's own line, and what to write instead."""

from __future__ import annotations

import re

from podracer import own_code

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
"""What to do about an error whose type or text matches, the special before the general."""


def explain(error: BaseException) -> str:
    """`ErrorType: reason, in FUNCTION, FILE, line N, `source`: what to do`, without a full stop."""
    reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    said = f"{type(error).__name__}: {reason}"
    remedy = next((f": {text}" for pattern, text in REMEDIES.items() if re.search(pattern, said)), "")
    return f"{said}{own_code.line(error)}{remedy}"
