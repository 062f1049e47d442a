"""The settings of a search: those of the search itself, and those that agents with a search share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from podracer import configs
from podracer.search import mctx_engine

EmbeddingDtype = Literal["float32", "bfloat16", "float16"]

Engine = Literal["podracer", "mctx"]
"""The code that grows trees: our own, or DeepMind's, as a check of ours or to compare with."""

RootValue = Literal["mean", "action", "mixed"]
"""The value of a root: V, the mean over all simulations; Q of the selected action; or the network's value mixed with
the Q of visited actions, weighted by the prior (Danihelka et al. 2022, appendix D)."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """The settings of a search.

    Attributes:
      algorithm: "puct" or "gumbel".
      simulations: S; calls of the model's step.
      max_depth: D; a path ends at this depth and its last edge is evaluated again. None: S.
      c_init: weight of the prior in PUCT (1.25).
      c_base: number of visits over which that weight grows (19652).
      bounds: (low, high) of returns, which scale Q to [0, 1]; (-1, 1) on boards. None: the range of values at the node.
      epsilon: smallest range to scale by (mctx: `min_value_range`); .01 for learned values.
      dirichlet_alpha: of PUCT's noise at the root. None: 10 / legal actions, at most 1.
      dirichlet_fraction: share of that noise in the prior (.25).
      considered: largest number of actions that Gumbel considers at the root (mctx: `max_num_considered_actions`; 16).
      value_scale: weight of Q relative to the logits, Gumbel's c_scale (.1).
      visit_offset: Gumbel's c_visit (50).
      embedding_dtype: dtype of stored floating-point embeddings, such as "bfloat16"; `Model.step` gets its own dtype
        back. Embeddings of one number a root, [N], are stored unchanged.
      root_value: `SearchResult.value` (see `RootValue`); None for "mean" with PUCT and "mixed" with Gumbel.
      engine: the code that grows the trees (see `podracer.search.mctx_engine`).
    """

    algorithm: Literal["puct", "gumbel"] = "puct"
    simulations: int = configs.field(50, low=1, high=2**24 - 2)
    max_depth: int | None = configs.field(None, low=1)
    c_init: float = configs.field(1.25, low=0.0)
    c_base: float = configs.field(19652.0, low=1.0)
    bounds: tuple[float, ...] | None = None
    epsilon: float = configs.field(1e-8, low=1e-30)
    dirichlet_alpha: float | None = configs.field(None, low=1e-3)
    dirichlet_fraction: float = configs.field(0.25, low=0.0, high=1.0)
    considered: int = configs.field(16, low=1)
    value_scale: float = configs.field(0.1, low=0.0)
    visit_offset: float = configs.field(50.0, low=0.0)
    embedding_dtype: EmbeddingDtype | None = None
    root_value: RootValue | None = None
    engine: Engine = "podracer"

    def __post_init__(self):
        configs.check(self)
        if self.bounds is not None and not (len(self.bounds) == 2 and self.bounds[0] < self.bounds[1]):
            raise ValueError(f"SearchConfig.bounds={self.bounds}: expected (low, high) with low below high.")
        if self.engine == "mctx":
            mctx_engine.check(self)


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """The settings that agents with a search share.

    Attributes:
      search: "puct" (Silver et al. 2018), or "gumbel" (Danihelka et al. 2022), which improves a policy with few
        simulations.
      simulations: S, states that a search adds to its tree.
      max_depth: greatest depth of a search's tree, None for the number of simulations.
      dirichlet_fraction: share of noise in the prior at the root, with puct (Silver et al.: 0.25).
      dirichlet_alpha: of that noise (Silver et al.: 0.3 in chess, 0.03 in Go); None for min(1, 10 / legal actions).
      considered: actions that gumbel considers at the root (Danihelka et al.: 16).
      value_scale: weight of completed values in gumbel's policy (mctx: 0.1).
      embedding_dtype: dtype in which trees store a model's states, "float32", "bfloat16" or "float16"; None for the
        model's own.
      root_value: the search's value, as a bootstrap of value targets: "mean" over all simulations; "action", Q of the
        selected action; or "mixed", the network's value and the Q of visited actions, weighted by the prior (with puct:
        noise included). None for "mean" with puct (paper), and "mixed" with gumbel, which at first visits bad actions
        as often as good ones.
      engine: the code that searches: "podracer", or "mctx", which is slower and finds the same, to check or compare.
    """

    search: Literal["puct", "gumbel"] = "puct"
    simulations: int = configs.field(16, low=1)
    max_depth: int | None = configs.field(None, low=1)
    dirichlet_fraction: float = configs.field(0.25, low=0.0, high=1.0)
    dirichlet_alpha: float | None = configs.field(0.3, low=1e-3)
    considered: int = configs.field(16, low=1)
    value_scale: float = configs.field(0.1, low=0.0)
    embedding_dtype: EmbeddingDtype | None = None
    root_value: RootValue | None = None
    engine: Engine = "podracer"


def settings(config: Any, **others: Any) -> SearchConfig:
    """Takes a search's settings from an agent's config: the fields of the same names, and `search` as the algorithm."""
    shared = {field.name for field in dataclasses.fields(SearchConfig)} & {
        field.name for field in dataclasses.fields(config)
    }
    return SearchConfig(algorithm=config.search, **{name: getattr(config, name) for name in shared}, **others)
