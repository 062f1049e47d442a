"""Why code of the user's own cannot be traced: the error, the user's own line, and what to write instead."""

from __future__ import annotations

import pathlib
import re
import sysconfig
import traceback

import jax
import numpy as np

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

_HERE = pathlib.Path(__file__).parent
_OURS = tuple(
    str(path) for path in (_HERE, _HERE.parent / "envs_jax" / "testing.py", _HERE.parent / "envs_jax" / "play.py")
)
_JAX = tuple(str(pathlib.Path(str(module.__file__)).parent) for module in (jax, np))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def explain(error: BaseException) -> str:
    """`ErrorType: reason, in FILE, line N, `source`: what to do`, without a full stop."""
    reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    said = f"{type(error).__name__}: {reason}"
    remedy = next((f": {text}" for pattern, text in REMEDIES.items() if re.search(pattern, said)), "")
    return f"{said}{_line(error)}{remedy}"


def _line(error: BaseException) -> str:
    """The innermost line that is the user's own, as text to append; one that is installed only if there is no other."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line]
    for others in ((*_OURS, *_JAX, *_INSTALLED, "<frozen"), (*_OURS, *_JAX)):
        own = [frame for frame in frames if not frame.filename.startswith(others)]
        if own:
            return f", in {own[-1].filename}, line {own[-1].lineno}, `{own[-1].line}`"
    return ""
