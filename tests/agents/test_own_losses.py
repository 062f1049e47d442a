"""A loss of one's own in the place of an agent's (examples/own_loss.py trains with one)."""

import functools
import typing

import jax
import jax.numpy as jnp
import pytest

from podracer import agents, spaces
from podracer.agents.registry import AGENTS
from podracer.types import Batch, EnvSpec
from tests.support import harness, tiers

B = 4
MODELS = ("muzero", "efficientzero")
SPEC = EnvSpec("test", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(3))
SPECS = {"sac": SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,)))}
SMALL = {
    "dqn": {"n_step": 6},
    "efficientzero": {"unroll_length": 2, "n_step": 3, "simulations": 2},
    "muzero": {"unroll_length": 2, "n_step": 3, "simulations": 2},
    "ppo": {"num_epochs": 1, "num_minibatches": 2},
    "pqn": {"num_epochs": 1, "num_minibatches": 2},
    "vtrace": {},
    "sac": {"n_step": 6},
    "r2d2": {"burn_in": 2, "trace_length": 4, "core": "none"},
}


def made(name, **own):
    cls, make = AGENTS[name]
    return make(SPECS.get(name, SPEC), cls(hidden_sizes=(4,), **SMALL[name]), **own)


@pytest.mark.parametrize("name", AGENTS)
def test_arguments_of_make_are_named_and_checked(name):
    cls, make = AGENTS[name]
    assert typing.get_type_hints(make)["config"] is cls
    other = next(each for each, _ in AGENTS.values() if not issubclass(each, cls) and not issubclass(cls, each))
    with pytest.raises(ValueError, match=f"agent '{name}' takes a {cls.__name__}, not {other.__name__}"):
        make(SPEC, other())


@functools.cache
def arguments(name):
    """Shapes of what an agent's `learn` is given, under the learner's axes."""
    agent = made(name)

    def recorded(rows):
        learner = agent.init(jax.random.key(0), harness.hyper(agent))
        start = agent.start(jnp.arange(B, dtype=jnp.int32), B)
        params = agent.actor_params(learner, jnp.float32(0))
        batch, _ = harness.record(agent, params, start, rows, jax.random.key(1))
        if name == "r2d2":
            batch = batch._replace(actor_state=start.net)
        if name == "sac":
            batch = batch._replace(actor_state=start.network)
        if agent.replay is not None:
            batch = Batch(batch, jnp.ones(B), jnp.ones(B, jnp.int32))
        return learner, batch, jnp.float32(0), jax.random.key(2)

    shapes = jax.eval_shape(recorded, harness.timesteps(0, 6, B))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 1, *x.shape), x.dtype), shapes)


def traced(name, **own):
    """An agent's `learn`, and the names of its metrics."""
    learn = harness.over_axes(made(name, **own).learn)
    jaxpr, (_, metrics, *_) = jax.make_jaxpr(learn, return_shape=True)(*arguments(name))
    return str(jaxpr), set(metrics)


@pytest.mark.parametrize(
    "name",
    [*sorted(set(AGENTS) - {"alphazero", *MODELS}), *tiers.slow(*MODELS)],
)
def test_a_loss_takes_the_place_of_the_agents(name):
    default = getattr(agents, name).loss
    calls = []

    def mine(*args):
        calls.append(args)
        return default(*args)

    value = "value/target_mean" if name in ("muzero", "efficientzero") else "value/mean"
    plain, metrics = traced(name)
    assert traced(name, loss=mine) == (plain, metrics)
    assert calls

    def other(*args):
        total, terms, *more = default(*args)
        return 2.0 * total, {"loss/mine": jnp.square(total), value: terms[value]}, *more

    changed, found = traced(name, loss=other)
    assert changed != plain
    assert found - metrics == {"loss/mine"}
    assert "loss/total" in metrics - found
    assert {value, "grad/norm"} <= found
