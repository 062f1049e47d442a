"""AdamW, Muon and optimisers of the user's, which see the tree of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import agents, configs, spaces
from podracer.agents import PPOConfig, registry
from podracer.learning import optimizer
from podracer.learning.optimizer import OptimizerError
from podracer.types import EnvSpec

SHAPES = {"torso": {"kernel": (6, 4), "bias": (4,)}, "conv": {"kernel": (2, 2, 3, 5)}, "policy": {"kernel": (4, 3)}}
NUMBERS = {"learning_rate": 0.01, "max_grad_norm": 1e3, "optimizer_eps": 1e-5, "weight_decay": 0.1}
SPEC = EnvSpec("test", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(2))


def tree(seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def numbers(**overrides: Any) -> dict[str, jax.Array]:
    return {name: jnp.float32(x) for name, x in (NUMBERS | overrides).items()}


def run(made: optimizer.Optimizer, hyper: dict[str, jax.Array], steps: int) -> Any:
    """Parameters and state after steps of gradients of many sizes."""
    scales = jnp.asarray(10.0 ** (np.arange(steps) % 4 - 2.0), jnp.float32)

    def step(carry: Any, scale: jax.Array) -> tuple[Any, tuple[()]]:
        params, state = carry
        grads = jax.tree.map(lambda x: scale * (jnp.sin(37.0 * x) + 0.3), params)
        packed, restore = made.pack(params)
        rate = hyper.get("learning_rate")
        moved, state, _ = made.step(made.pack(grads)[0], state, packed, learning_rate=rate, hyper=hyper)
        return (restore(moved), state), ()

    return jax.lax.scan(step, (tree(0), made.init(tree(0), hyper)), scales)[0]


def assert_close(a: Any, b: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def test_adam_of_the_users_is_the_named_one() -> None:
    """Over 100 updates, in a tree and in joined arrays."""
    own = optimizer.of(lambda rate: optax.adam(rate, eps=NUMBERS["optimizer_eps"]))
    found, named = (jax.jit(lambda h, m=m: run(m, h, 100)[0])(numbers()) for m in (own, optimizer.make("adam")))
    assert_close(found, named)
    moved = max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree(0))))
    assert moved > 0.1


@pytest.mark.parametrize("name", ["learning_rate", "optimizer_eps", "weight_decay"])
def test_members_are_the_single_runs(name: str) -> None:
    """A number mapped over two values gives what each value gives alone: RMSProp's epsilon, and those of others."""
    factory = optimizer.of(lambda rate: optax.chain(optax.adamw(rate), optax.add_noise(1e-4, 0.5, jax.random.key(1))))
    made = {"learning_rate": factory, "optimizer_eps": optimizer.make("rmsprop")}.get(name, optimizer.make("adamw"))
    values = jnp.float32([1e-3, 0.02])
    both = jax.jit(jax.vmap(lambda x: run(made, numbers(**{name: x}), 5)[0]))(values)
    single = jax.jit(lambda x: run(made, numbers(**{name: x}), 5)[0])
    for member, value in enumerate(values):
        assert_close(jax.tree.map(lambda x, m=member: x[m], both), single(value))
    assert np.any(np.abs(both["torso"]["kernel"][0] - both["torso"]["kernel"][1]) > 1e-4)


def test_adamw_decays_matrices_alone() -> None:
    """Against a loop (Loshchilov and Hutter 2019, algorithm 2)."""
    made, hyper = optimizer.make("adamw"), numbers()
    params, state = tree(0), made.init(tree(0), hyper)
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    m = v = jax.tree.map(np.zeros_like, w)
    step = jax.jit(lambda g, s, p: made.step(g, s, p, learning_rate=hyper["learning_rate"], hyper=hyper))
    for t in range(1, 5):
        grads = tree(t)
        params, state, _ = step(grads, state, params)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * np.asarray(g), m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * np.asarray(g) ** 2, v, grads)

        def moved(w: Any, m: Any, v: Any, t: int = t) -> Any:
            adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-5)
            return w - 0.01 * (adam + (0.1 * w if w.ndim > 1 else 0.0))

        w = jax.tree.map(moved, w, m, v)
    assert_close(params, w, rtol=1e-5, atol=1e-6)


def test_muon_takes_matrices_as_matrices() -> None:
    """Its first step is nearly orthogonal, with 0.2 as the root of its mean square; heads and vectors go by AdamW."""
    made, hyper = optimizer.make("muon"), numbers(weight_decay=0.0)
    state = made.init(tree(0), hyper)
    held = {x.shape for x in jax.tree.leaves(state) if x.ndim > 1 and x.shape[-1] != 3}
    assert held == {(6, 4), (2, 2, 3, 5)}
    grads = tree(1)
    moved, _, _ = jax.jit(lambda g: made.step(g, state, tree(0), learning_rate=jnp.float32(1), hyper=hyper))(grads)
    steps = jax.tree.map(lambda x, y: np.asarray(x - y), moved, tree(0))
    for name, shape in (("torso", (6, 4)), ("conv", (12, 5))):
        step, g = (x[name]["kernel"].reshape(shape) for x in (steps, grads))
        u, _, vt = np.linalg.svd(np.asarray(g), full_matrices=False)
        along = -u.T @ step @ vt.T / (0.2 * np.sqrt(max(shape)))
        np.testing.assert_allclose(along, np.eye(min(shape)), atol=0.35)  # what five iterations leave
        np.testing.assert_allclose(np.sqrt(np.mean(step**2)), 0.2, rtol=0.25)
    adam = jax.tree.map(lambda g: -g / (jnp.abs(g) + 1e-5), grads)
    assert_close(steps["torso"]["bias"], adam["torso"]["bias"], rtol=1e-4)
    assert_close(steps["policy"]["kernel"], adam["policy"]["kernel"], rtol=1e-4)


def changed_state(change: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: {"mu": jax.tree.map(jnp.zeros_like, params)},
        lambda grads, state, params=None: (grads, change(state)),
    )


FAULTS = {
    r"update failed: TypeError: .*'value'.* without further arguments": optax.contrib.reduce_on_plateau(),
    r"schedule-free, which evaluates other parameters than it trains": optax.contrib.schedule_free_sgd(0.1),
    r"returned a float, not an optax.GradientTransformation": lambda rate: 0.1,
    r"init failed: KeyError: 'absent'": optax.GradientTransformation(lambda p: p["absent"], lambda g, s, p=None: (g, s)),
    r"changes the state: mu.params.policy.bias was float32 \[2\] and is float16 \[2\]": changed_state(
        lambda s: jax.tree.map(lambda x: x.astype(jnp.float16), s)
    ),
    r"changes the state: mu.params.policy.bias was float32 \[2\] and is absent": changed_state(lambda s: {}),
    r"changes the updates: params.policy.bias was float32 \[2\] and is float32 \[1, 2\]": optax.stateless(
        lambda g, p: jax.tree.map(lambda x: x[None], g)
    ),
    r"optimizer='adam': give an optax.GradientTransformation, or a function": "adam",
}  # fmt: skip


def test_a_number_that_an_optimizer_uses_may_not_be_missing() -> None:
    """An epsilon of 0 would make a NaN of the first gradient that is 0."""
    params = {"w": jnp.zeros(2)}
    with pytest.raises(
        OptimizerError,
        match=r"needs optimizer_eps, max_grad_norm, and hyper has learning_rate; give the agent's config",
    ):
        optimizer.make("adam").init(params, {"learning_rate": jnp.float32(0.1)})
    optimizer.make("sgd").init(params, {"learning_rate": jnp.float32(0.1), "max_grad_norm": jnp.float32(1.0)})


def test_a_rate_in_the_state_follows_no_schedule() -> None:
    own = lambda rate: optax.inject_hyperparams(optax.sgd)(learning_rate=rate)  # noqa: E731
    with pytest.raises(OptimizerError, match=r"keeps its learning rate in its state .*, where no schedule reaches it"):
        ppo(own)
    ppo(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), learning_rate_schedule="constant")


def ppo(own: Any, **settings: Any) -> Any:
    return agents.ppo.make(SPEC, PPOConfig(hidden_sizes=(4,), **settings), optimizer=own)


@pytest.mark.parametrize("words", FAULTS)
def test_what_does_not_fit_is_refused_when_made(words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        ppo(FAULTS[words], learning_rate_schedule="constant")


def test_a_rate_of_its_own_follows_no_schedule() -> None:
    """Numbers that an optimiser does not use cannot be tuned."""
    plain = optax.adam(1e-3)
    for settings in ({}, {"learning_rate_schedule": "constant", "learning_rate_warmup": 0.1}):
        with pytest.raises(OptimizerError, match=r"no schedule .* reaches: .*, or learning_rate_schedule='constant'"):
            ppo(plain, **settings)
    assert not set(ppo(plain, learning_rate_schedule="constant").hyper) & set(optimizer.TUNABLE)
    assert set(ppo(optax.adam).hyper) & set(optimizer.TUNABLE) == {"learning_rate"}
    assert set(ppo(None).hyper) & set(optimizer.TUNABLE) == {"learning_rate", "optimizer_eps"}
    assert set(ppo(None, optimizer="muon").hyper) & set(optimizer.TUNABLE) == set(optimizer.TUNABLE)
    agent = ppo(optax.adam)
    with pytest.raises(
        ValueError, match=r"hyper\['weight_decay'\]: the agent does not use it with its settings; used: "
    ):
        configs.population_hyper(agent.config, 2, {"weight_decay": [0.0, 0.1]}, agent.hyper)


def test_numbers_of_another_optimizer_are_refused() -> None:
    def message(settings: dict[str, Any], own: Any = None, module: Any = agents.ppo, config: Any = PPOConfig) -> str:
        with pytest.raises(ValueError, match="leave it out") as error:
            module.make(SPEC, config(hidden_sizes=(4,), **settings), optimizer=own)
        return str(error.value)

    for name in ("sgd", "rmsprop", "centred_rmsprop"):
        assert message({"optimizer": name, "optimizer_b2": 0.9}) == (
            f"optimizer_b2=0.9 is of adam, radam, adamw, muon, not of optimizer={name!r}; leave it out."
        )
    assert "optimizer_b2=0.9 is of adam, radam, adamw, muon, not of an optimizer= of your own" in message(
        {"optimizer_b2": 0.9}, optax.adam
    )
    assert "optimizer_eps_root=1e-12 is of adam, not of an optimizer=" in message(
        {"optimizer_eps_root": 1e-12}, optax.adam
    )
    assert "weight_decay=0.1 is of adamw, muon, not of optimizer='adam'" in message({"weight_decay": 0.1})
    impala = {"module": agents.vtrace, "config": agents.VTraceConfig}
    for name, own in (("adam", None), ("rmsprop", optax.sgd)):
        words = message({"optimizer": name, "momentum": 0.9}, own, **impala)
        assert words.startswith("momentum=0.9 is of rmsprop, centred_rmsprop, sgd, not of ")
    assert "rmsprop_decay=0.9 is of rmsprop" in message({"optimizer": "sgd", "rmsprop_decay": 0.9}, **impala)
    agents.vtrace.make(SPEC, agents.VTraceConfig(hidden_sizes=(4,), optimizer="sgd", momentum=0.9))
    ppo(None, optimizer="muon", optimizer_b2=0.9)


def test_the_old_name_names_the_new_one() -> None:
    for name in ("learning_rate_decay", "anneal_lr"):
        with pytest.raises(ValueError, match=r"did you mean 'learning_rate_schedule', 'linear' for True and"):
            configs.from_json(registry.AGENTS["ppo"][0], {name: True})
