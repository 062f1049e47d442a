"""Seeds of host environments: every lane of every use of every run has its own."""

from __future__ import annotations

from typing import Literal

import numpy as np

Use = Literal["training", "evaluation"]


def first_seed(seed: int, use: Use, restart: int = 0) -> int:
    """The seed of lane 0; lane i adds i (global index, below 2**30), so seeds stay below 2**31.

    Args:
      seed: of the run.
      use: training and evaluation see different episodes.
      restart: a resumed run whose environments could not be saved must not see its first episodes again.
    """
    return int(np.random.SeedSequence([seed, use == "evaluation", restart]).generate_state(1)[0] % 2**30)
