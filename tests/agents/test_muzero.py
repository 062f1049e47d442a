"""MuZero: targets against a loop, what gradients reach, and what is learnt behind the end of an episode."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import returns, spaces
from podracer.agents import muzero
from podracer.types import EnvSpec

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
A, GAMMA = 4, 0.9


def windows(K: int, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows [K+n+1, B] of windows whose first transition is real, with terminations, truncations and breaks."""
    rows = jax.tree.map(np.asarray, harness.timesteps(seed, 60, 8))
    length = K + n + 1
    starts = [(r, i) for i in range(8) for r in range(60 - length) if not rows.first[r + 1, i]]
    row, lane = (np.array(x) for x in zip(*starts))
    take = lambda x: x[row[None] + np.arange(length)[:, None], lane[None]]  # noqa: E731
    rng = np.random.default_rng(seed)
    shape = (length, len(starts))
    return {
        "reward": take(rows.reward),
        "discount": take(rows.discount),
        "first": take(rows.first),
        "policy": rng.dirichlet(np.ones(A), shape).astype(np.float32),
        "value": rng.normal(size=shape).astype(np.float32),
    }


@pytest.mark.parametrize(("K", "n"), [(5, 3), (2, 10), (1, 1)])
def test_targets_are_the_loops(K: int, n: int) -> None:
    x = windows(K, n)
    after = returns.Transitions(x["reward"][1:], GAMMA * x["discount"][1:], 1.0 - x["first"][1:].astype(np.float32))
    found = muzero.targets(*jax.tree.map(jnp.asarray, (after, x["discount"], x["policy"], x["value"])), K, n)
    kinds = set()
    for i in range(x["reward"].shape[1]):
        reached = True
        for k in range(K + 1):
            last = bool(x["first"][k + 1, i])
            assert float(found.valid[k, i]) == reached
            assert float(found.acted[k, i]) == (reached and not last)
            if reached:
                z, scale, row = 0.0, 1.0, k
                while row < k + n and not x["first"][row + 1, i]:
                    z += scale * x["reward"][row + 1, i]
                    scale *= GAMMA * x["discount"][row + 1, i]
                    row += 1
                z += scale * x["value"][row, i] * (row > k or x["discount"][row, i])
                assert float(found.value[k, i]) == pytest.approx(z, abs=1e-5)
                if k:
                    assert float(found.reward[k, i]) == x["reward"][k, i]
                kinds.add((last, bool(x["discount"][k, i]), row - k))
            reached = reached and not last
    assert {(True, False, 0), (True, True, 0), (False, True, n)} <= kinds, "ends of both kinds, and none"
    np.testing.assert_array_equal(found.policy, x["policy"][: K + 1])
