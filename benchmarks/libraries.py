"""Prints what docs/adr/0030-libraries.md says of rlax, chex and mctx: import times and differences to our functions.

python benchmarks/libraries.py          # the installed versions; seconds
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rlax

from podracer import returns
from podracer.learning import value_distributions
from podracer.learning.bins import Bins

K, B = 51, 4096
REPEATS = 5


def import_seconds(module: str) -> tuple[float, int]:
    """The least CPU seconds of several imports after JAX's own, and how many modules each brings."""
    code = (
        "import jax, sys, time; before, start = len(sys.modules), time.process_time(); "
        f"import {module}; print(time.process_time() - start, len(sys.modules) - before)"
    )
    outputs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(REPEATS)]
    found = [output.stdout.split() for output in outputs]
    return min(float(seconds) for seconds, _ in found), int(found[0][1])


def pairs() -> dict[str, tuple[Callable[[], jax.Array], Callable[[], jax.Array]]]:
    """Functions that should be the same, ours and rlax's, of the same random numbers."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    bins, x = Bins(K, 100.0), 30 * normal(B)
    z = np.linspace(-10, 10, K, dtype=np.float32)
    probs, R, G = jax.nn.softmax(normal(B, K)), normal(B), jnp.full(B, 0.97)
    predicted, target = normal(B, K), normal(B, K)
    tau = jnp.asarray((np.arange(K) + 0.5) / K, jnp.float32)
    limit = float(bins.positions[-1])
    quantile = value_distributions.quantile(K).errors
    rlaxs_quantile = jax.vmap(lambda p, t: rlax.quantile_regression_loss(p, tau, t, 1.0))
    return {
        "huber_loss": (lambda: value_distributions.huber(3 * x), lambda: rlax.huber_loss(3 * x)),
        "categorical_l2_project": (
            lambda: value_distributions.project(probs, z, R, G),
            lambda: jax.vmap(lambda p, r, g: rlax.categorical_l2_project(r + g * z, p, jnp.asarray(z)))(probs, R, G),
        ),
        "quantile_regression_loss": (
            lambda: quantile(predicted, target, jnp.zeros(B), jnp.ones(B))[0],
            lambda: rlaxs_quantile(predicted, target),
        ),
        "transform_to_2hot": (
            lambda: bins.two_hot(x),
            lambda: rlax.transform_to_2hot(returns.rescale(x), -limit, limit, K),
        ),
        "transform_to_2hot of the bins": (
            lambda: bins.two_hot(returns.unrescale(jnp.asarray(bins.positions))),
            lambda: rlax.transform_to_2hot(jnp.asarray(bins.positions), -limit, limit, K),
        ),
        "signed_parabolic": (lambda: returns.unrescale(x / 1e3), lambda: rlax.signed_parabolic(x / 1e3)),
    }


def refused(function: Callable[[], Any]) -> bool:
    """True where a function mixes dtypes or ranks, which the tests of this library forbid."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        try:
            jax.eval_shape(function)
        except Exception:
            return True
    return False


def main() -> None:
    """Prints two tables."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "chex", "rlax", "mctx", "optax", "flax")}
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {v}' for name, v in versions.items())}\n")
    print("| import after JAX | CPU seconds | modules |\n|---|---|---|")
    for module in ("chex", "mctx", "rlax", "podracer.training.train"):
        seconds, modules = import_seconds(module)
        print(f"| `{module}` | {seconds:.2f} | {modules} |")
    print("\n| function of rlax | largest difference to ours | bit for bit | strict promotion |\n|---|---|---|---|")
    for name, (ours, theirs) in pairs().items():
        x, y = (np.asarray(jax.jit(function)()) for function in (ours, theirs))
        strict = "refused" if refused(theirs) else "passes"
        print(f"| `{name}` | {np.abs(x - y).max():.1e} | {'yes' if np.array_equal(x, y) else 'no'} | {strict} |")


if __name__ == "__main__":
    main()
