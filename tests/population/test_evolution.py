"""A generation of population based training: against NumPy, and on the toy problem of Jaderberg's figure 2."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, configs, topology
from podracer.agents import PPOConfig, VTraceConfig
from podracer.learning.learner import require_room_for_all
from podracer.population import config, evolution
from podracer.population.config import PBT
from podracer.population.evolution import Evolution
from podracer.replay.ring import Ring
from podracer.types import EpisodeStats, LearnerState
from tests.support import counting

STATES = 200
"""The number of random states in each of the five cases."""

SCORE = (-1.0, 1.0)


class State(NamedTuple):
    """A run's state as far as a generation sees it."""

    learner: LearnerState
    actors: Any
    evolution: Evolution


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a stub agent, whose learning rates are those of a toy problem."""

    h0: float = configs.field(1.0, low=1e-3, high=5.0, tunable=True)
    h1: float = configs.field(1.0, low=1e-3, high=5.0, tunable=True)


LIMITS = evolution.limits_of(Config(), ("h0", "h1"))


def make_state(params: Any, hyper: dict[str, Any], episodes: EpisodeStats, generation: Any) -> State:
    count = jnp.zeros(episodes.count.shape[0], jnp.int32)
    learner = LearnerState({"t": params}, params + 1.0, {**hyper, "other": hyper["h0"] + 7.0}, count, -params)
    return State(learner, {"memory": params}, Evolution(episodes, count + generation))


# Against NumPy.


def random_states(rng: np.random.Generator, population: int, tasks: tuple[int, ...]) -> State:
    """States with ties, members that are not ready, and parameters that are not finite."""
    shape = (STATES, population, *tasks)
    count = rng.integers(0, 30, shape).astype(np.float32)
    total = count * rng.integers(-3, 4, shape).astype(np.float32) / 2.0  # few different means
    params = rng.normal(size=(STATES, population, 2)).astype(np.float32)
    params[rng.random((STATES, population)) < 0.1, 1] = np.nan
    hyper = {name: rng.uniform(1e-3, 5.0, (STATES, population)).astype(np.float32) for name in ("h0", "h1")}
    episodes = EpisodeStats(total, 0 * count, count, {"x": count})  # type: ignore[arg-type]
    generation = rng.integers(0, 99, (STATES, 1), np.int32)
    return jax.vmap(make_state)(*jax.tree.map(jnp.asarray, (params, hyper, episodes, generation)))


def by_hand(pbt: PBT, state: State, choice: np.ndarray, variation: np.ndarray) -> tuple[list[int], dict[str, list]]:
    """Parents, and the numbers afterwards, member by member."""
    count, total = (np.asarray(x, float) for x in (state.evolution.episodes.count, state.evolution.episodes.return_sum))
    P = len(count)
    count, total = count.reshape(P, -1), total.reshape(P, -1)
    fitness, ready = [], []
    for i in range(P):
        means = [total[i, k] / count[i, k] if count[i, k] else -np.inf for k in range(count.shape[1])]
        if pbt.score:
            means = [min(1.0, (m - low) / (high - low)) for m, low, high in zip(means, pbt.score[::2], pbt.score[1::2])]
        diverged = not np.isfinite(state.learner.params["t"][i]).all()
        fitness.append(-np.inf if diverged else sum(means) / len(means))
        ready.append(diverged or (min(count[i]) > 0 and sum(count[i]) >= pbt.min_episodes))
    parents = list(range(P))
    if pbt.rule == "impala":
        for i in range(P):
            others = [(i + n) % P for n in range(1, P)]
            j = others[int(choice[i] * len(others))]
            if ready[i] and ready[j] and fitness[j] > fitness[i] + pbt.threshold:
                parents[i] = j
    else:
        some = max(1, round(pbt.fraction * P))
        ranked = sorted((i for i in range(P) if ready[i]), key=lambda i: fitness[i])
        best = list(reversed(ranked[-some:]))
        for i in ranked[:some]:
            j = best[int(choice[i] * len(best))]
            if fitness[j] >= fitness[i] and np.isfinite(fitness[j]):
                parents[i] = j
    after = {name: [float(x[j]) for j in parents] for name, x in state.learner.hyper.items()}
    for n, name in enumerate(pbt.hyper):
        for i in range(P):
            if ready[i] if pbt.rule == "impala" else parents[i] != i:
                draw, p = variation[i, n], np.float32(pbt.chance)
                change = pbt.factor if draw < p / 2 else 1 / pbt.factor if draw < p else 1.0
                after[name][i] = min(5.0, max(1e-3, after[name][i] * change))
    return parents, after


CASES = {
    "truncation": (5, (), PBT(1, probability=0.5, hyper=("h0", "h1"))),
    "truncation-half-2": (2, (), PBT(1, fraction=0.5, hyper=("h0", "h1"))),
    "impala": (5, (), PBT(1, rule="impala", score=SCORE, threshold=0.3, hyper=("h0", "h1"))),
    "impala-2": (2, (), PBT(1, rule="impala", score=SCORE, min_episodes=1, hyper=("h1",))),
    "truncation-tasks": (7, (3,), PBT(1, score=SCORE * 3, hyper=("h0",), min_episodes=40)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_generation_is_what_numpy_makes_of_it(name: str) -> None:
    population, tasks, pbt = CASES[name]
    states = random_states(np.random.default_rng(len(name)), population, tasks)
    seeds = jnp.arange(STATES, dtype=jnp.int32)

    @jax.jit
    @jax.vmap
    def run(state: State, seed: jax.Array) -> Any:
        uniform = evolution.draws(seed, state.evolution.generation[0], population, len(pbt.hyper))
        return evolution.evolve(pbt, LIMITS, state, seed), uniform

    (after, lineage), uniform = jax.tree.map(np.asarray, run(states, seeds))
    states = jax.tree.map(np.asarray, states)
    log_factors = []
    for i in range(STATES):
        of = functools.partial(jax.tree.map, operator.itemgetter(i))
        before, new, line = of(states), of(after), of(lineage)
        parents, hyper = by_hand(pbt, before, *of(uniform))
        np.testing.assert_array_equal(line.parent, parents)
        np.testing.assert_array_equal(line.copied, line.parent != np.arange(population))
        for number in hyper:
            np.testing.assert_allclose(new.learner.hyper[number], hyper[number], rtol=1e-6)
        # Everything that is learnt moves with the parent; counters stay.
        taken = (before.learner.params["t"], before.learner.opt_state, before.learner.aux)
        made = (new.learner.params["t"], new.learner.opt_state, new.learner.aux)
        for old, now in zip(taken, made):
            np.testing.assert_array_equal(now, old[parents])
        np.testing.assert_array_equal(new.learner.num_updates, before.learner.num_updates)
        np.testing.assert_array_equal(new.evolution.generation, before.evolution.generation + 1)
        for old, now in zip(jax.tree.leaves(before.evolution.episodes), jax.tree.leaves(new.evolution.episodes)):
            np.testing.assert_array_equal(now[~line.ready], old[~line.ready])
            assert not now[line.ready].any()
        memory = new.actors["memory"]
        assert np.isfinite(memory[line.copied]).all()
        np.testing.assert_array_equal(memory[~line.copied], before.actors["memory"][~line.copied])
        for number in pbt.hyper:  # numbers in the middle, which no limit cuts
            old = before.learner.hyper[number][parents]
            changes = np.log(new.learner.hyper[number] / old)[(old > 0.01) & (old < 4)]
            log_factors += [x for x in changes if abs(x) > 1e-3]
    assert np.isclose(np.abs(log_factors), np.log(1.2), rtol=1e-4).all()
    assert abs(np.mean(log_factors)) < 3 * np.std(log_factors) / np.sqrt(len(log_factors))  # unbiased
    assert lineage.copied.mean() > 0.05


def test_the_replay_of_a_member_that_was_replaced_has_finite_numbers_and_can_be_drawn_from() -> None:
    nan = jnp.full((2, 1, 3), jnp.nan)
    ring = Ring(nan, nan, (), jnp.ones((2, 1, 3), int), (), jnp.ones((2, 1), int), nan.at[:, :, 0].set(0), nan[..., 0])
    mended = evolution.mended_replay(ring, jnp.array([True, False]))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[1]), mended, ring)
    assert all(np.isfinite(x[0]).all() for x in jax.tree.leaves(mended))
    np.testing.assert_array_equal(mended.priority[0, 0] > 0, [False, True, True])
    assert float(mended.largest[0, 0]) == 0, "which stands for 1"


def test_draws_are_new_ones_in_every_generation_and_run() -> None:
    places = [(0, 0), (0, 1), (1, 0)]
    found = [np.concatenate([np.ravel(x) for x in evolution.draws(*place, 4, 2)]) for place in places]
    assert len(np.unique(found)) == 3 * (4 + 4 * 2)


# The toy of Jaderberg's figure 2.


@functools.partial(jax.jit, static_argnums=0)
def best_of_the_toy(pbt: PBT, seeds: jax.Array) -> jax.Array:
    """The best Q of each seed after 400 steps, with a generation every 8."""
    P = 24
    one = lambda n: jnp.where(jnp.arange(P) % 2 == n, 1.0, 0.02)  # noqa: E731
    none = EpisodeStats(*(jnp.zeros(P),) * 3)
    objective = lambda t: 1.2 - jnp.sum(t**2, axis=-1)  # noqa: E731

    def run(seed: jax.Array) -> jax.Array:
        state = make_state(jnp.full((P, 2), 0.9), {"h0": one(0), "h1": one(1)}, none, 0)

        def generation(state: State, _: None) -> tuple[State, None]:
            # Each step climbs Q^, which knows of a parameter only as far as h lets it.
            h = jnp.stack([state.learner.hyper["h0"], state.learner.hyper["h1"]], axis=-1)
            t = state.learner.params["t"]
            for _ in range(8):
                t = t - 0.02 * h * t
            state = state._replace(learner=state.learner._replace(params={"t": t}))
            episodes = none._replace(return_sum=objective(t), count=jnp.ones(P))
            state = state._replace(evolution=state.evolution.add(episodes))
            return evolution.evolve(pbt, LIMITS, state, seed)[0], None

        state, _ = jax.lax.scan(generation, state, length=50)
        return jnp.max(objective(state.learner.params["t"]))

    return jax.vmap(run)(seeds)


def test_both_rules_solve_jaderbergs_toy() -> None:
    seeds = jnp.arange(20, dtype=jnp.int32)
    toy = functools.partial(PBT, 1, min_episodes=1, hyper=("h0", "h1"))
    impala = functools.partial(toy, rule="impala", score=(0.0, 1.2))
    best = {
        "nothing": best_of_the_toy(impala(threshold=9.0, probability=0.0), seeds),
        "explore only": best_of_the_toy(impala(threshold=9.0), seeds),
        "impala": best_of_the_toy(impala(threshold=0.0), seeds),
        "truncation": best_of_the_toy(toy(), seeds),
    }
    worst, most = ({name: float(f(q)) for name, q in best.items()} for f in (jnp.min, jnp.max))
    assert worst["impala"] >= 1.1
    assert worst["truncation"] >= 1.1
    assert most["nothing"] <= 0.62
    assert most["explore only"] <= 1.05


# Settings.


def test_milestones_begin_after_the_burn_in() -> None:
    assert [PBT(100).generations(steps) for steps in (0, 99, 100, 199, 200)] == [0, 0, 1, 1, 2]
    late = PBT(100, burn_in=250)
    assert [late.generations(steps) for steps in (249, 250, 349, 350)] == [0, 1, 1, 2]
    assert [late.milestone(n) for n in range(3)] == [250, 350, 450]


def test_the_papers_settings() -> None:
    pbt = PBT.impala(1_000_000, (0.0, 1.0), burn_in=10)
    assert (pbt.rule, pbt.threshold, pbt.factor, pbt.chance, pbt.burn_in) == ("impala", 0.05, 1.2, 0.33, 10)
    assert pbt == config.of(configs.to_json(pbt))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "impala"}, "absolute threshold"),
        ({"score": (1.0, 1.0)}, "low < high"),
        ({"score": (0.0, 1.0, 2.0)}, "low < high"),
        ({"hyper": ()}, "must name tunable numbers"),
        ({"interval": 0}, "must be at least 1"),
        ({"interval": None}, "needs an interval"),
        ({"fraction": 0.6}, "must be at most 0.5"),
        ({"intervals": 3}, "no field 'intervals'"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.of({"interval": 10} | settings)


def test_a_rate_that_follows_the_divergence_does_not_evolve() -> None:
    spec = counting.CountingEnvironment().spec
    follows = PPOConfig(hidden_sizes=(8,), learning_rate_schedule="constant", target_kl=0.01)
    with pytest.raises(ValueError, match="target_kl=0.01 sets the learning rate itself, .* use target_kl=None"):
        config.check(PBT(100), agents.ppo.make(spec, follows), spec, 4, 40)


@pytest.mark.parametrize(
    ("pbt", "fields", "population", "message"),
    [
        (PBT(100), {}, 4, "learning_rate_schedule='constant'"),
        (PBT(100, hyper=("entropy",)), {}, 4, "did you mean 'entropy_cost'"),
        (PBT(100, hyper=("discount",)), {}, 1, "nobody to copy"),
        (PBT(10, hyper=("discount",)), {}, 4, "at least the 40 steps of an update"),
        (PBT(100, hyper=("discount",), score=(0.0, 1.0, 0.0, 1.0)), {}, 4, "each of the 1 task"),
        (PBT(100), {"learning_rate_schedule": "constant"}, 4, None),
        (PBT(100, hyper=("optimizer_eps", "entropy_cost")), {}, 4, None),
    ],
)
def test_runs_that_cannot_evolve_are_refused(pbt: PBT, fields: dict[str, Any], population: int, message: str) -> None:
    spec = counting.CountingEnvironment().spec
    agent = agents.vtrace.make(spec, VTraceConfig(hidden_sizes=(8,), **fields))
    if message is None:
        return config.check(pbt, agent, spec, population, 40)
    with pytest.raises(ValueError, match=message):
        config.check(pbt, agent, spec, population, 40)


def test_a_number_that_begins_at_0_is_refused() -> None:
    with pytest.raises(ValueError, match="entropy_cost begins at 0, which no factor moves"):
        config.check_start(PBT(100, hyper=("entropy_cost",)), {"entropy_cost": np.array([0.1, 0.0])})


def test_members_that_do_not_fit_on_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"params": jax.ShapeDtypeStruct((16, 2**22), jnp.float32)}  # a quarter of a GiB
    monkeypatch.setattr(topology, "memory_limit", lambda devices: 2**28 - 1)
    with pytest.raises(ValueError, match="all members need 0.2 GiB"):
        require_room_for_all(members, ["a device"])
    monkeypatch.setattr(topology, "memory_limit", lambda devices: 2**28)
    require_room_for_all(members, ["a device"])
