"""Faults of a network of one's own are named when the agent is made: in one sentence, before anything runs."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from podracer import agents, nets, spaces
from podracer.types import EnvSpec

VECTOR = spaces.Box(-1.0, 1.0, (4,))
DISCRETE = EnvSpec("mine", VECTOR, spaces.Discrete(2))
BOX = EnvSpec("mine", VECTOR, spaces.Box(-1.0, 1.0, (3,)))
SEVERAL = EnvSpec("mine", VECTOR, spaces.MultiDiscrete((2, 3)))


def flat(outputs=2, apply=None, init=None):
    """A feed-forward network, of which a part may be replaced."""
    params = {"w": jnp.zeros((4, outputs))}
    return nets.feed_forward(init or (lambda key: params), apply or (lambda p, o: (o @ p["w"], o[:, 0])))


def recurrent(apply, start=lambda num_lanes: jnp.zeros((num_lanes, 5))):
    return nets.Network(lambda key: {"w": jnp.zeros(3)}, apply, start)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, observation):
        x = nn.Dense(8)(observation)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(2)(x), nn.Dense(1)(x)[:, 0]


class NNX(nnx.Module):
    def __init__(self, rngs, dropout=False):
        self.layer = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.Dropout(0.1, rngs=rngs) if dropout else nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, observation):
        x = self.norm(self.layer(observation))
        return x[:, :2], x[:, 2]


def mlp(key):
    return eqx.nn.MLP(4, 2, 8, 1, key=key)


LINEN = (lambda key: Linen().init(key, jnp.zeros((1, 4))), Linen().apply)
HAIKU = hk.transform(lambda observation: (hk.Linear(2)(observation), observation[:, 0]))


def python_if(params, observation):
    if observation[0, 0] > 0:
        return observation @ params["w"], observation[:, 0]
    return observation @ params["w"], observation[:, 1]


def returns(outputs=(2,), values=(), state=lambda s: s):
    """An apply whose results have these shapes."""

    def apply(params, inputs, before):
        rows = inputs.reward.shape
        return jnp.zeros((*rows, *outputs)), jnp.zeros((*rows, *values)), state(before)

    return apply


MISTAKES = {
    # Outputs and values
    "box": (
        BOX,
        flat(7),
        r"ppo on Box\(3\) needs P = 6 outputs: 3 means and 3 log standard deviations; .* returns 7\.",
    ),
    "discrete": (
        DISCRETE,
        flat(7),
        r"ppo on Discrete\(2\) needs P = 2 outputs: the logit of each action; .* returns 7\.",
    ),
    "several": (SEVERAL, flat(7), r"ppo on MultiDiscrete\(2, 3\) needs P = 5 outputs: the logits of 2 \+ 3 choices; "),
    "values": (
        DISCRETE,
        flat(apply=lambda p, o: (o @ p["w"], o[:, :1])),
        r"returned \(\(6, 2\), \(6, 1\)\) for 6 obser",
    ),
    "one thing": (DISCRETE, flat(apply=lambda p, o: o @ p["w"]), r"must return outputs \[6, P\] and values \[6\]\."),
    "integers": (
        DISCRETE,
        flat(apply=lambda p, o: (o.astype(int), o[:, 0])),
        r"they must be float32 \[2, 3, P\] and \[2, 3\]",
    ),
    "halves": (
        DISCRETE,
        recurrent(lambda *x: jax.tree.map(lambda x: x.astype(jnp.bfloat16), returns()(*x))),
        r"returns outputs bfloat16 \[2, 3, 2\] and values bfloat16 .* they must be float32",
    ),
    "values of rows": (
        DISCRETE,
        recurrent(returns(values=(1,))),
        r"values float32 \[2, 3, 1\] for rows \[2, 3\]; they",
    ),
    "two things": (
        DISCRETE,
        recurrent(lambda *_: (jnp.zeros(2), jnp.zeros(3))),
        "apply returns .*; it must return three",
    ),
    # States
    "another state": (
        DISCRETE,
        recurrent(returns(state=lambda s: s[:, :2])),
        r"\[3, 5\] at the start and float32 \[3, 2\]",
    ),
    "another type": (
        DISCRETE,
        recurrent(returns(state=lambda s: s.astype(int))),
        r"int32 \[3, 5\] after apply; both must be",
    ),
    "no state": (DISCRETE, recurrent(returns(state=lambda s: None)), "and None after apply"),
    "no lanes": (
        DISCRETE,
        recurrent(returns(), start=lambda n: jnp.zeros(5)),
        r"start\(3\) returns float32 \[5\] as state; it",
    ),
    # Modules
    "Linen": (
        DISCRETE,
        Linen(),
        r"network=Linen is no podracer.nets.Network; wrap it: .* module.apply\); see examples/net",
    ),
    "its class": (DISCRETE, Linen, r"network=Linen is no .* module.apply"),
    "NNX": (DISCRETE, NNX(nnx.Rngs(0)), r"network=NNX is no .*nnx.state\(module, nnx.Param\) and apply merges; see"),
    "Equinox": (DISCRETE, mlp(jax.random.key(0)), "network=MLP is no .*eqx.partition finds and apply combines"),
    "Haiku": (DISCRETE, HAIKU, r"network=Transformed is no .*hk.without_apply_rng\(net\).apply\)"),
    "a function": (
        DISCRETE,
        mlp,
        r"network=function is no podracer.nets.Network; use nets.feed_forward\(init, apply\)\.",
    ),
    # Parameters
    "no arrays": (DISCRETE, flat(init=mlp), "params.activation is custom_jvp, not an array; .* as eqx.partition"),
    "no floats": (
        DISCRETE,
        flat(init=lambda key: {"n": jnp.int32(3)}),
        r"params\['n'\] is int32 \[\], which has no gradient",
    ),
    "random keys": (DISCRETE, flat(init=lambda key: nnx.state(NNX(nnx.Rngs(key), True))), "rngs.* as nnx.split"),
    "statistics": (
        DISCRETE,
        nets.feed_forward(*LINEN),
        "batch_stats.* is a running statistic.* use LayerNorm or GroupNorm",
    ),
    "NNX statistics": (
        DISCRETE,
        flat(init=lambda key: nnx.state(NNX(nnx.Rngs(key)))),
        "norm.*use LayerNorm or GroupNorm",
    ),
    # Functions
    "BatchNorm": (
        DISCRETE,
        nets.feed_forward(lambda key: LINEN[0](key)["params"], lambda p, o: Linen().apply({"params": p}, o)),
        r"apply cannot be traced: .*in .*test_network_check.py, line \d+, `x = nn.BatchNorm.*`: .* use LayerNorm or GroupNorm",
    ),
    "Python's if": (
        DISCRETE,
        flat(apply=python_if),
        r"line \d+, `if observation\[0, 0\] > 0:`: use jnp.where or jax.lax.cond instead of if",
    ),
    "a wrong name": (
        DISCRETE,
        flat(apply=lambda p, o: p["v"]),
        r"traced: KeyError: 'v', in .*test_network_check.py, line \d+, ",
    ),
    "a wrong call": (
        DISCRETE,
        flat(init=lambda: 0),
        r"network's init cannot be traced: TypeError: .*argument.* given\.",
    ),
    "Haiku's key": (
        DISCRETE,
        nets.feed_forward(lambda key: HAIKU.init(key, jnp.zeros((1, 4))), HAIKU.apply),
        "without_apply",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    spec, network, message = MISTAKES[name]
    with pytest.raises(nets.NetworkError, match=message) as caught:
        agents.ppo.make(spec, network=network)
    assert "\n" not in str(caught.value)


def test_every_agent_looks():
    with pytest.raises(nets.NetworkError, match=r"vtrace on Discrete\(2\) needs P = 2 outputs: the logit of each"):
        agents.vtrace.make(DISCRETE, network=flat(7))
    with pytest.raises(nets.NetworkError, match=r"r2d2 on Discrete\(2\) needs P = 2 outputs: the value of each action"):
        agents.r2d2.make(DISCRETE, network=flat(7))
    with pytest.raises(ValueError, match="mine takes actions in Box.*; action values need Discrete ones"):
        agents.r2d2.make(BOX, network=flat(6))


def test_stacked_frames_are_what_a_network_sees():
    config = agents.PPOConfig(frame_stack=3)
    seen = []
    agents.ppo.make(DISCRETE, config, flat(apply=lambda p, o: (seen.append(o.shape), (o[:, 0, :2], o[:, 0, 0]))[1]))
    assert seen == [(6, 4, 3)]


@pytest.mark.parametrize("action", [DISCRETE, BOX, SEVERAL], ids=lambda spec: type(spec.action_space).__name__)
def test_right_networks(action):
    spec = action._replace(observation_space=spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}))
    for core in (nets.NO_CORE, nets.CoreSettings("lstm", 4)):
        nets.check(nets.make(spec, hidden_sizes=(4,), core=core), spec, "ppo")
    if action is DISCRETE:
        nets.check(nets.make_q(spec, hidden_sizes=(4,), head_size=4), spec, "r2d2", action_values=True)
        nets.check(recurrent(returns()), spec, "ppo")


def test_outputs_of_16_bits_become_float32():
    network = flat(
        apply=lambda p, o: (o.astype(jnp.bfloat16) @ jnp.ones((4, 2), jnp.bfloat16), o[:, 0].astype(jnp.float16))
    )
    inputs = nets.Inputs(jnp.ones((2, 3, 4)), jnp.zeros((2, 3)), jnp.ones((2, 3), bool), ())
    outputs, values, _ = network.apply(network.init(jax.random.key(0)), inputs, ())
    assert outputs.dtype == values.dtype == jnp.float32
