"""Settings of EfficientZero: those that are refused, its optimizers and its schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, spaces
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.search import prefix_models
from podracer.types import EnvSpec
from tests.support import harness
from tests.support.harness import learner_of
from tests.support.small_efficientzero import SMALL, SPEC, A, Table, learn, learning, made


def test_bad_settings_are_one_sentence() -> None:
    wrong: Any = {"num_bins": (40, "must be odd"), "horizon": (0, "at least 1"), "norm": ("group", "norm")}
    wrong |= {"embedding_dtype": ("float64", "expected one of 'float32', 'bfloat16', 'float16' or None")}
    for name, (value, words) in wrong.items():
        with pytest.raises(ValueError, match=words):
            EfficientZeroConfig(**{name: value})
    for name in ("target_interval", "refresh_interval"):
        with pytest.raises(ValueError, match=f"reanalyse_group=4 must divide {name}=10, so that"):
            EfficientZeroConfig(**({"target_interval": 8, "reanalyse_group": 4} | {name: 10}))
    with pytest.raises(ValueError, match="termination_cost=2: network= predicts no terminations; use 0"):
        agents.efficientzero.make(
            SPEC, EfficientZeroConfig(termination_cost=2.0), prefix_models.make(SPEC, EfficientZeroConfig())
        )
    with pytest.raises(ValueError, match="Discrete ones: use ppo"):
        agents.efficientzero.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))
    with pytest.raises(ValueError, match="efficientzero cannot play against itself"):
        agents.efficientzero.make(SPEC._replace(num_players=2))


def test_clipped_lars_needs_heads_by_name() -> None:
    config = EfficientZeroConfig(**SMALL, optimizer="clipped_lars")
    agent = efficientzero.make(SPEC, config, prefix_models.PrefixModel(Table(), 1))
    with pytest.raises(ValueError, match=r"needs parameters \[head\]\['last'\]\['kernel'\] .* policy, prefix, value"):
        jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent))


@pytest.mark.parametrize("l2_cost", [0.0, 5e-4])
@pytest.mark.parametrize("name", ["sgd", "clipped_lars"])
def test_decay_is_behind_the_clip(name: Any, l2_cost: float) -> None:
    """With a gradient of zero, the decay shrinks parameters by its full amount, and the norm is 0."""
    config = EfficientZeroConfig(optimizer=name, l2_cost=l2_cost)
    rule = efficientzero._optimizer(config)
    params = {"params": {head: {"last": {"kernel": jnp.full((3, 3), 200.0)}} for head in ("policy", "prefix", "value")}}
    nothing, hyper = jax.tree.map(jnp.zeros_like, params), {"learning_rate": jnp.float32(0.5), "max_grad_norm": 1e-3}
    packed, restore = rule.pack(params)
    state, gradient = rule.init(params, hyper), rule.pack(nothing)[0]
    new, _, norm = rule.step(gradient, state, packed, learning_rate=hyper["learning_rate"], hyper=hyper)
    new = restore(new)
    assert float(norm) == 0.0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, (1 - l2_cost) * y, rtol=1e-6), new, params)


@pytest.mark.slow
def test_steps_of_clipped_lars_are_sorted_by_their_dims() -> None:
    """In the network for Atari biases, scales and offsets are vectors, and nothing else is; heads begin at 0."""
    spec = EnvSpec("atari", spaces.Box(0, 255, (96, 96, 12), np.uint8), spaces.Discrete(6), None)
    agent = agents.efficientzero.make(spec, EfficientZeroConfig(norm="batch", optimizer="clipped_lars"))
    learner = jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent))
    for path, x in jax.tree_util.tree_leaves_with_path(learner.params):
        name = jax.tree_util.keystr(path)
        assert (x.ndim == 1) == name.endswith(("['bias']", "['scale']")), name
    small = made(optimizer="clipped_lars", lars_start=0, unroll_length=1)
    batch = harness.taken(harness.batch_of(small, A), np.arange(8))
    begin = jax.jit(small.init)(jax.random.key(0), harness.hyper(small))
    assert not bool(learn(small, batch, begin)[0].opt_state.active)
    assert bool(learn(small, batch, learner_of(small))[0].opt_state.active)


@pytest.mark.slow
def test_the_learning_rate_warms_up_and_falls_behind_the_last_step() -> None:
    """The first steps of SGD are as large as the learning rate says."""
    agent = learning()
    batch, begun = harness.batch_of(agent, A), learner_of(agent)

    def step(num_updates: int, progress: float) -> float:
        learner = begun._replace(num_updates=jnp.full_like(begun.num_updates, num_updates))
        after, *_ = harness.alone(agent.learn)(learner, batch, jnp.float32(progress), jax.random.key(0))
        kernel = lambda x: np.asarray(x.params["params"]["value"]["last"]["kernel"], np.float64)  # noqa: E731
        return float(np.linalg.norm(kernel(after) - kernel(begun)))

    whole = step(3, 0.5)
    assert whole > 0
    found = [step(*at) / whole for at in ((0, 0.0), (1, 0.0), (2, 0.9), (50, 0.999), (50, 1.0), (1, 1.0))]
    np.testing.assert_allclose(found, [0.25, 0.5, 0.75, 1.0, 0.1, 0.05], rtol=1e-2)


def test_importance_weights_count_fully_in_the_end() -> None:
    spec: Any = made(importance_exponent=0.4).replay
    np.testing.assert_allclose([float(spec.importance_exponent(jnp.float32(x))) for x in (0, 0.5, 1)], [0.4, 0.7, 1.0])
    none: Any = made(importance_exponent=0.0).replay
    assert float(none.importance_exponent(jnp.float32(0.5))) == 0.0
