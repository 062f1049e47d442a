"""Seeds: their limits, and those of host environments, distinct for every run, use and lane."""

from __future__ import annotations

from typing import Literal

import numpy as np

Use = Literal["training", "evaluation"]

MAX_SEED = 2**31 - 1
"""The largest seed. JAX's keys of larger ones repeat those of smaller ones."""


def check_seed(seed: int) -> None:
    """Checks a seed.

    Raises:
      ValueError: if it is negative, or above `MAX_SEED`.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed}: must be 0 to {MAX_SEED:,}.")


def first_seed(seed: int, use: Use, restart: int = 0) -> int:
    """Computes the seed of lane 0; lane i adds i (global index, below 2**30), so seeds stay below 2**31.

    Args:
      seed: the run's seed.
      use: training and evaluation get different episodes.
      restart: a number of what begins anew, so that it gets new episodes: the rollouts before it, where a run goes on
        without its environments' state; another one for environments that take the place of others; 0 at first.
    """
    return int(np.random.SeedSequence([seed, use == "evaluation", restart]).generate_state(1)[0] % 2**30)
