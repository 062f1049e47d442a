"""A generation of population based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846).

Members that do badly copy the weights and the tunable numbers of better ones, "exploit", and vary the numbers,
"explore". Two rules say who copies whom: `truncation` is Jaderberg's, `impala` is that of IMPALA (Espeholt et al. 2018,
appendix E).

All is decided by the state itself, so the calls that a run is cut into, and a stop in between, change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from podracer.population.config import PBT
from podracer.replay.ring import LEAST_PRIORITY, Ring
from podracer.types import ArrayTree, EpisodeStats, LearnerState

KEY_OF_EVOLUTION = 0x504254
"""A number that is folded into the key of a run, for draws that no other part of the run makes."""

Limits = Mapping[str, tuple[float, float]]
"""The least and the largest value of each number, by name."""


class Evolution(NamedTuple):
    """The part of a run's state that decides the next generation.

    Attributes:
      episodes: [P]; sums over the episodes that ended since the member last took part in a generation.
      generation: int32 [P]; generations so far, the same for all.
    """

    episodes: EpisodeStats
    generation: jax.Array

    @classmethod
    def start(cls, episodes: ArrayTree, population: int) -> Evolution:
        """The first state, without episodes; `episodes` has the shapes and dtypes of one member's."""
        zeros = jax.tree.map(lambda x: jnp.zeros((population, *x.shape), x.dtype), episodes)
        return cls(zeros, jnp.zeros(population, jnp.int32))

    def add(self, episodes: EpisodeStats) -> Evolution:
        """Adds the episodes [P] of an update."""
        return self._replace(episodes=jax.tree.map(jnp.add, self.episodes, episodes))


class Lineage(NamedTuple):
    """The record of a generation, [P] each.

    Attributes:
      parent: int32; the member whose weights and numbers it goes on with, itself if it copied nobody.
      copied: bool; it goes on with those of another one.
      ready: bool; it took part.
      fitness: float32; -inf for a member that has diverged, or had no episodes.
      count: float32; episodes that ended since it last took part.
      hyper_before: the numbers that vary, by name, as they were.
      hyper_after: as they are from now on.
    """

    parent: jax.Array
    copied: jax.Array
    ready: jax.Array
    fitness: jax.Array
    count: jax.Array
    hyper_before: dict[str, jax.Array]
    hyper_after: dict[str, jax.Array]


class EvolvingState(Protocol):
    """A run's state, as far as a generation looks at it: leading dims [P].

    Attributes:
      learner: the members'.
      actors: their lanes and what they remember; () if there is nothing to mend.
      evolution: the statistics.
    """

    learner: LearnerState
    actors: Any
    evolution: Any

    def _replace(self, **parts: Any) -> Any: ...


S = TypeVar("S", bound=EvolvingState)


def limits_of(config: Any, names: Sequence[str]) -> Limits:
    """The limits of an agent's tunable numbers, by the fields of its config."""
    fields = {field.name: field.metadata for field in dataclasses.fields(config)}
    ends = {name: (fields[name].get("low"), fields[name].get("high")) for name in names}
    return {n: (-jnp.inf if low is None else low, jnp.inf if high is None else high) for n, (low, high) in ends.items()}


def evolve(pbt: PBT, limits: Limits, state: S, seed: jax.Array | int) -> tuple[S, Lineage]:
    """Ends a generation and begins the next.

    Copied are parameters, the optimiser's state, normalisers and targets, and the tunable numbers. Lanes, their keys
    and memory, the replay and all counters stay a member's own: its memory is stale for one rollout, as that of
    IMPALA's actors is.

    Args:
      pbt: the settings.
      limits: of the numbers that vary.
      state: of the run; the replay may be left out (`mended_replay`).
      seed: int32 []; of the run.

    Returns:
      The state, and the record of what was done.
    """
    learner, evolution = state.learner, state.evolution
    population = evolution.generation.shape[0]
    choice, variation = draws(seed, evolution.generation[0], population, len(pbt.hyper))
    # Fitness, step 3 of Jaderberg's algorithm 1 ("eval"), of the episodes in training.
    fitness, count, ready = measure(pbt, evolution.episodes, is_finite(learner.params, population))
    # Exploit: whom to copy.
    parent = (impala if pbt.rule == "impala" else truncation)(pbt, fitness, ready, choice)
    copied = parent != jnp.arange(population)
    take = lambda tree: jax.tree.map(lambda x: x[parent], tree)  # noqa: E731
    hyper = take(learner.hyper)
    # Explore: IMPALA varies the numbers of all, Jaderberg those of copies.
    varies = ready if pbt.rule == "impala" else copied
    new = {name: explore(pbt, hyper[name], limits[name], variation[:, i], varies) for i, name in enumerate(pbt.hyper)}
    before = {name: learner.hyper[name] for name in pbt.hyper}
    learner = learner._replace(
        params=take(learner.params), opt_state=take(learner.opt_state), aux=take(learner.aux), hyper=hyper | new
    )
    episodes = jax.tree.map(lambda x: jnp.where(_column(ready, x), 0, x), evolution.episodes)
    evolution = Evolution(episodes, evolution.generation + 1)
    actors = mended(state.actors, copied & jnp.isneginf(fitness))
    lineage = Lineage(parent, copied, ready, fitness, count, before, new)
    return state._replace(learner=learner, actors=actors, evolution=evolution), lineage


def draws(
    seed: jax.Array | int, generation: jax.Array | int, population: int, numbers: int
) -> tuple[jax.Array, jax.Array]:
    """The uniform numbers of a generation: float32 [P] to choose a parent by, and [P, numbers] to vary by."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), KEY_OF_EVOLUTION), generation)
    choice, variation = jax.random.split(key)
    return jax.random.uniform(choice, (population,)), jax.random.uniform(variation, (population, numbers))


def is_finite(params: ArrayTree, population: int) -> jax.Array:
    """True for members all of whose parameters are finite numbers, bool [P]."""
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.isfinite(x).reshape(population, -1).all(1) for x in leaves]), axis=0)


def measure(pbt: PBT, episodes: EpisodeStats, finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The fitness of members, [P] each.

    Args:
      pbt: the settings.
      episodes: sums [P], or [P, K] over each of K tasks.
      finite: bool [P]; a member that has diverged counts as the worst.

    Returns:
      Fitness, the number of episodes, and True for those that take part: whoever has enough of them, and some of each
      task, or has diverged.
    """
    counts = episodes.count.reshape(finite.shape[0], -1)
    means = episodes.return_sum.reshape(counts.shape) / jnp.maximum(counts, 1)
    if pbt.score is not None:
        # The mean capped normalised score (IMPALA, appendix B), with the score's own ends.
        low, high = jnp.array(pbt.score).reshape(-1, 2).T[:, None]
        means = jnp.minimum(1.0, (means - low) / (high - low))
    fitness, count = jnp.mean(means, axis=1), jnp.sum(counts, axis=1)
    played = jnp.all(counts > 0, axis=1)
    sound = finite & jnp.isfinite(fitness)
    return jnp.where(sound & played, fitness, -jnp.inf), count, ~sound | (played & (count >= pbt.min_episodes))


def impala(pbt: PBT, fitness: jax.Array, ready: jax.Array, choice: jax.Array) -> jax.Array:
    """Parents int32 [P] by IMPALA's appendix E: a random other member, if its score is better by the threshold."""
    population = fitness.shape[0]
    own = jnp.arange(population, dtype=jnp.int32)
    other = (own + 1 + jnp.floor(choice * (population - 1)).astype(jnp.int32)) % population
    copies = ready & ready[other] & (fitness[other] > fitness + pbt.threshold)
    return jnp.where(copies, other, own)


def truncation(pbt: PBT, fitness: jax.Array, ready: jax.Array, choice: jax.Array) -> jax.Array:
    """Parents int32 [P] by Jaderberg's truncation: the worst members copy random ones of the best.

    Members of equal fitness are ordered by number, and copy each other too: only copies vary their numbers.
    """
    population = fitness.shape[0]
    own = jnp.arange(population, dtype=jnp.int32)
    some = max(1, round(pbt.fraction * population))
    order = jnp.lexsort((own, fitness, ~ready))  # those that are ready first, from worst to best
    rank, num_ready = jnp.argsort(order), jnp.sum(ready.astype(jnp.int32))
    best = jnp.floor(choice * jnp.minimum(some, num_ready).astype(jnp.float32)).astype(jnp.int32)
    other = order[jnp.maximum(num_ready - 1 - best, 0)].astype(jnp.int32)
    copies = ready & (rank < some) & (fitness[other] >= fitness) & jnp.isfinite(fitness[other])
    return jnp.where(copies, other, own)


def explore(pbt: PBT, value: jax.Array, limits: tuple[float, float], draw: jax.Array, varies: jax.Array) -> jax.Array:
    """A number [P] multiplied by `factor` or 1 / `factor`, as probable as each other, and cut to its limits."""
    p = pbt.chance
    factor = jnp.where(draw < p / 2, pbt.factor, jnp.where(draw < p, 1.0 / pbt.factor, 1.0))
    return jnp.where(varies, jnp.clip(value * factor, *limits), value)


def mended(actors: ArrayTree, replaced: jax.Array) -> ArrayTree:
    """Lanes with 0 for numbers that are not finite, of members bool [P] that had diverged.

    They may be in a member's memory, and would spoil the weights that it has copied.
    """

    def mend(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(_column(replaced, x) & ~jnp.isfinite(x), 0, x)

    return jax.tree.map(mend, actors)


def mended_replay(ring: Ring, replaced: jax.Array) -> Ring:
    """A replay [P, ...] with 0 for numbers that are not finite, and the least priority for such ones.

    Args:
      ring: of all members.
      replaced: bool [P]; those that had diverged.
    """
    # Not 0, which stands for a start without a sequence: of those alone nothing can be drawn.
    broken = _column(replaced, ring.priority) & ~jnp.isfinite(ring.priority)
    return mended(ring._replace(priority=jnp.where(broken, LEAST_PRIORITY, ring.priority)), replaced)  # type: ignore


def _column(flags: jax.Array, x: jax.Array) -> jax.Array:
    return flags.reshape(-1, *[1] * (x.ndim - 1))
