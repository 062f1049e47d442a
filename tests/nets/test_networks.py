"""Networks: acting equals learning, resets cut memory, heads are as said, and inputs are encoded as said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets, spaces
from podracer.types import ActorParams, Agent, EnvSpec, TimeStep, Trajectory
from tests.support import harness

T, B = 9, 4
KEY = jax.random.key(0)
CORE = nets.CoreSettings("lstm", 8)
VECTOR = spaces.Box(-5.0, 5.0, (3,))
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "multi_discrete": spaces.MultiDiscrete((2, 3)),
    "box": spaces.Box(-1.0, 3.0, (2,)),
}


def spec_of(observation: spaces.Space = VECTOR, action: spaces.Space = ACTIONS["discrete"]) -> EnvSpec:
    return EnvSpec("test", observation, action)


def recorded(
    network: nets.Network, params: Any, spec: EnvSpec, seed: int = 1, frame_stack: int = 1
) -> tuple[Trajectory, dict, Any]:
    """Acts on random rows with random actions, row by row; what the network said, and its memory after."""

    def act(actor: ActorParams, state: nets.ActorState, row: TimeStep, key: jax.Array, _: bool) -> Any:
        outputs, values, memory = nets.step(network, actor.params, state, row)
        action = jax.vmap(spec.action_space.sample)(jax.random.split(key, B))
        return action, {"outputs": outputs, "values": values}, memory.after(action)

    rows = harness.timesteps(seed, T, B)
    agent: Any = Agent("test", None, *[None] * 3, act, None, {})  # type: ignore[arg-type]
    memory = nets.start(network, spec, B, frame_stack)
    if jax.tree.leaves(memory):  # not of an episode's start: the state before row 0 must matter
        memory = jax.tree.map(lambda x: (x + jnp.ones_like(x)).astype(x.dtype), memory)
    run = jax.jit(lambda params: harness.record(agent, ActorParams(params, jnp.int32(0)), memory, rows, KEY))
    trajectory, after = run(params)
    return trajectory, trajectory.extras, after


# Acting and learning.


@pytest.mark.parametrize(
    ("core", "frame_stack"),
    [
        (CORE, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((nets.NO_CORE, 1), (nets.NO_CORE, 3), (CORE, 1))),
    ],
)
@pytest.mark.parametrize("action", ["discrete", "box", pytest.param("multi_discrete", marks=pytest.mark.slow)])
def test_acting_step_by_step_is_the_unroll(action: str, core: nets.CoreSettings, frame_stack: int) -> None:
    spec = spec_of(action=ACTIONS[action])
    network = nets.make(nets.stacked_spec(spec, frame_stack), hidden_sizes=(16,), core=core)
    params = scaled(jax.jit(network.init)(KEY))
    assert network.recurrent == bool(core)
    trajectory, acted, _ = recorded(network, params, spec, frame_stack=frame_stack)
    outputs, values = jax.jit(lambda p, t: nets.unroll(network, p, t))(params, trajectory)
    assert (outputs.shape[:2], values.shape) == ((T + 1, B), (T + 1, B))
    np.testing.assert_allclose(outputs[:-1], acted["outputs"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[:-1], acted["values"], rtol=1e-5, atol=1e-6)
    if not core and frame_stack == 1:
        assert jax.tree.leaves(trajectory.actor_state) == []


def scaled(params: Any) -> Any:
    """Heads as large as the other layers: the policy's small initial weights would hide differences."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: 100.0 * x if any(getattr(k, "key", "") == "policy" for k in path) else x, params
    )


@pytest.fixture(scope="module")
def recurrent() -> tuple[nets.Network, Any, Any]:
    """A network with an LSTM, its parameters, and its compiled unroll of [T+1, B] rows."""
    network = nets.make(spec_of(), hidden_sizes=(16,), core=nets.CoreSettings("lstm", 8))
    params = scaled(jax.jit(network.init)(KEY))
    return network, params, jax.jit(lambda inputs, state: network.apply(params, inputs, state))


def random_inputs(first: np.ndarray, seed: int = 2) -> nets.Inputs:
    rng = np.random.default_rng(seed)
    shape = first.shape
    return nets.Inputs(
        observation=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        first=jnp.asarray(first),
        previous_action=jnp.asarray(rng.integers(0, 4, shape, np.int32)),
    )


def random_state(seed: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(B, 8)), jnp.float32) for _ in range(2))


@pytest.mark.parametrize("row", [0, 1, 4, T])
def test_an_unroll_across_a_reset_is_two_unrolls(recurrent: Any, row: int) -> None:
    """Before a first row the memory is an episode's start, whatever came before, in that lane only."""
    network, _, unroll = recurrent
    first = np.zeros((T + 1, B), bool)
    first[row, :2] = True
    inputs, state = random_inputs(first), random_state()
    outputs, values, after = unroll(inputs, state)

    plain = inputs._replace(first=jnp.zeros_like(inputs.first))
    whole = unroll(plain, state)
    # The second episode alone: rows from `row` on, from the start, with no previous action.
    begun = inputs._replace(first=inputs.first.at[row].set(True))
    alone = unroll(jax.tree.map(lambda x: x[row:], begun), network.start(B))
    for result, before, later in zip((outputs, values), whole, alone):
        np.testing.assert_allclose(result[:row], before[:row], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result[:, 2:], before[:, 2:], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result[row:, :2], later[:, :2], rtol=1e-5, atol=1e-6)
        assert not np.allclose(result[row:, :2], before[row:, :2], atol=1e-3)
    for result, before, later in zip(after, whole[2], alone[2]):
        np.testing.assert_allclose(result[:2], later[:2], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result[2:], before[2:], rtol=1e-5, atol=1e-6)


def test_the_state_goes_on(recurrent: Any) -> None:
    """Two unrolls, the second from where the first one ended, are one; the state before row 0 is used."""
    _, _, unroll = recurrent
    first = np.zeros((T + 1, B), bool)
    first[3, 1] = True
    inputs, state = random_inputs(first), random_state()
    outputs, values, after = unroll(inputs, state)
    half = unroll(jax.tree.map(lambda x: x[:5], inputs), state)
    rest = unroll(jax.tree.map(lambda x: x[5:], inputs), half[2])
    np.testing.assert_allclose(np.concatenate([half[0], rest[0]]), outputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([half[1], rest[1]]), values, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), rest[2], after)
    others = unroll(inputs, random_state(4))
    assert not np.allclose(others[1][0], values[0], atol=1e-3)
    np.testing.assert_allclose(others[1][3:, 1], values[3:, 1], rtol=1e-5, atol=1e-6)


def test_previous_action_and_reward_enter_the_core(recurrent: Any) -> None:
    """They matter, from their row on; but the previous action of a first row does not."""
    _, _, unroll = recurrent
    first = np.zeros((T + 1, B), bool)
    first[4, 0] = True
    inputs, state = random_inputs(first), random_state()
    values = unroll(inputs, state)[1]
    other = inputs._replace(previous_action=inputs.previous_action.at[4].set((inputs.previous_action[4] + 1) % 4))
    changed = unroll(other, state)[1]
    np.testing.assert_array_equal(changed[:4], values[:4])
    np.testing.assert_array_equal(changed[:, 0], values[:, 0])
    assert not np.isclose(changed[4:, 1:], values[4:, 1:], atol=1e-5).any()
    rewarded = unroll(inputs._replace(reward=inputs.reward.at[4].add(1.0)), state)[1]
    np.testing.assert_array_equal(rewarded[:4], values[:4])
    assert not np.isclose(rewarded[4:], values[4:], atol=1e-5).any()


def test_inputs_are_aligned() -> None:
    """The previous action of row t is the action of row t-1; of row 0, what the memory holds."""
    spec = spec_of()
    network = nets.make(spec, hidden_sizes=(4,), core=nets.CoreSettings("lstm", 3))
    trajectory, _, after = recorded(network, jax.jit(network.init)(KEY), spec)
    inputs = nets.inputs(network, trajectory)
    np.testing.assert_array_equal(inputs.previous_action[1:], trajectory.actions)
    np.testing.assert_array_equal(inputs.previous_action[0], trajectory.actor_state.previous_action)
    np.testing.assert_array_equal(after.previous_action, trajectory.actions[-1])
    harness.assert_same(
        (inputs.observation, inputs.reward, inputs.first), (*trajectory.timesteps[:2], trajectory.timesteps.first)
    )
    feed_forward = nets.make(spec, hidden_sizes=(4,))
    assert nets.inputs(feed_forward, trajectory).previous_action == ()


# Parameters and heads.


@pytest.mark.slow
def test_separate_torsos() -> None:
    spec = spec_of()
    inputs = random_inputs(np.zeros((2, 3), bool))
    for separate in (False, True):
        network = nets.make(spec, hidden_sizes=(8,), separate=separate)
        params = jax.jit(network.init)(KEY)
        gradient = jax.grad(lambda p, n=network: jnp.sum(n.apply(p, inputs, ())[1]))(params)["params"]
        assert ("value_torso" in gradient) == separate
        used = any(np.any(leaf) for leaf in jax.tree.leaves(gradient["torso"]))
        assert used != separate


def test_gaussian_scale_is_free() -> None:
    """The log standard deviation is one parameter for all observations, and starts at 0."""
    spec = spec_of(action=ACTIONS["box"])
    network = nets.make(spec, hidden_sizes=(8,))
    params = jax.jit(network.init)(KEY)
    assert params["params"]["log_std"].shape == (2,)
    params["params"]["log_std"] = jnp.asarray([0.5, -1.0])
    outputs = network.apply(params, random_inputs(np.zeros((2, 3), bool)), ())[0]
    assert outputs.shape == (2, 3, 4)
    np.testing.assert_array_equal(outputs[..., 2:], np.broadcast_to([0.5, -1.0], (2, 3, 2)))
    np.testing.assert_array_equal(jax.jit(network.init)(KEY)["params"]["log_std"], [0.0, 0.0])


def test_initial_policy_is_nearly_uniform() -> None:
    network = nets.make(spec_of(), hidden_sizes=(64, 64))
    outputs = network.apply(jax.jit(network.init)(KEY), random_inputs(np.zeros((5, 4), bool)), ())[0]
    assert np.abs(outputs).max() < 0.2
    assert np.ptp(outputs) > 0.0


@pytest.mark.parametrize(("dueling", "head_size", "norm"), [(False, 0, True), (False, 5, False), (True, 0, False)])
def test_heads_of_action_values(dueling: bool, head_size: int, norm: bool) -> None:
    """By hand, from the parameters."""
    network = nets.make_q(spec_of(), hidden_sizes=(7,), head_size=head_size, dueling=dueling, layer_norm=norm)
    params = jax.tree.map(lambda x: x + 0.1, jax.jit(network.init)(KEY))
    inputs = random_inputs(np.zeros((2, 3), bool))
    q, values, _ = network.apply(params, inputs, ())
    p = jax.tree.map(np.asarray, params["params"])
    dense = lambda p, x: x @ p["kernel"] + p["bias"]  # noqa: E731
    x = dense(p["torso"]["Dense_0"], np.asarray(inputs.observation))
    if norm:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x * p["torso"]["LayerNorm_0"]["scale"] + p["torso"]["LayerNorm_0"]["bias"]
    x = np.maximum(x, 0)
    head = lambda name: dense(p[name], np.maximum(dense(p[f"{name}_hidden"], x), 0) if head_size else x)  # noqa: E731
    if dueling:
        expected = head("value") + head("advantage") - head("advantage").mean(-1, keepdims=True)
        np.testing.assert_allclose(values, head("value")[..., 0], rtol=1e-5, atol=1e-5)
    else:
        expected = head("q")
        np.testing.assert_allclose(values, expected.max(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(q, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dueling", [False, True])
def test_heads_of_several_numbers_an_action(dueling: bool) -> None:
    """Each of the K numbers is joined from the streams by itself; the first action's come first."""
    A, K = 4, 3
    network = nets.make_q(spec_of(), hidden_sizes=(7,), head_size=0, dueling=dueling, num_bins=K)
    params = jax.tree.map(lambda x: x + 0.1, jax.jit(network.init)(KEY))
    inputs = random_inputs(np.zeros((2, 3), bool))
    outputs, values, _ = network.apply(params, inputs, ())
    assert (outputs.shape, values.shape) == ((2, 3, A * K), (2, 3))
    p = jax.tree.map(np.asarray, params["params"])
    dense = lambda p, x: x @ p["kernel"] + p["bias"]  # noqa: E731
    x = np.maximum(dense(p["torso"]["Dense_0"], np.asarray(inputs.observation)), 0)
    for k in range(K):
        if dueling:
            advantages = dense(p["advantage"], x)[..., k::K]
            expected = dense(p["value"], x)[..., k, None] + advantages - advantages.mean(-1, keepdims=True)
        else:
            expected = dense(p["q"], x)[..., k::K]
        np.testing.assert_allclose(outputs[..., k::K], expected, rtol=1e-5, atol=1e-5)


def test_uniform_weights_are_within_their_limits() -> None:
    """1 / sqrt(inputs), of convolutions the pixels of a kernel; biases too, and heads."""
    spec = spec_of(spaces.Box(0, 255, (36, 36, 2), np.uint8))
    network = nets.make_q(spec, torso="shallow", head_size=300, dueling=False, init="uniform")
    params = jax.jit(network.init)(KEY)["params"]
    for layer in (*params["torso"].values(), params["q_hidden"], params["q"]):
        limit = 1.0 / np.sqrt(np.prod(layer["kernel"].shape[:-1]))
        for array in (layer["kernel"], layer["bias"]):
            assert np.abs(array).max() <= limit
            assert array.size < 100 or np.std(array) == pytest.approx(limit / np.sqrt(3), rel=0.1)


# Observations.


def test_encode_every_space() -> None:
    space = spaces.Dict(
        {
            "position": spaces.Discrete(3),
            "cards": spaces.MultiDiscrete((2, 3)),
            "grid": spaces.Box(0, 2, (1, 2), np.uint8),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "lit": spaces.Box(0, 1, (2,), np.uint8),
            "speed": spaces.Box(-9.0, 9.0, (2,)),
            "scalar": spaces.Box(-9.0, 9.0, ()),
        }
    )
    value = {
        "position": np.array([[2, 0]], np.int32),
        "cards": np.array([[[1, 0], [0, 2]]], np.int32),
        "grid": np.array([[[[2, 0]], [[1, 1]]]], np.uint8),
        "lit": np.array([[[0, 1], [1, 1]]], np.uint8),
        "image": np.array([[[[0, 255], [51, 102]], [[255, 0], [0, 0]]]], np.uint8),
        "speed": np.array([[[-3.0, 2.5], [0.0, 9.0]]], np.float32),
        "scalar": np.array([[1.5, -2.0]], np.float32),
    }
    # In the order of names: cards, grid, image, lit, position, scalar, speed.
    expected = [
        [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0.2, 0.4, 0, 1, 0, 0, 1, 1.5, -3, 2.5],
        [1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, -2, 0, 9],
    ]
    encoded = nets.encode(jax.tree.map(jnp.asarray, value), space, leading=2)
    assert encoded.dtype == jnp.float32
    np.testing.assert_allclose(encoded, [expected], rtol=1e-6)

    network = nets.make(spec_of(space), hidden_sizes=(4,))
    assert jax.jit(network.init)(KEY)["params"]["torso"]["Dense_0"]["kernel"].shape == (23, 4)


# The user's own network.


def user_network(values_too_wide: bool = False) -> nets.Network:
    def apply(params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = observation @ params["value"]
        return observation @ params["policy"], values if values_too_wide else values[:, 0]

    return nets.feed_forward(lambda key: {"policy": jax.random.normal(key, (3, 4)), "value": jnp.ones((3, 1))}, apply)


def test_own_network() -> None:
    network = user_network()
    params = jax.jit(network.init)(KEY)
    assert not network.recurrent
    trajectory, acted, _ = recorded(network, params, spec_of())
    outputs, values = nets.unroll(network, params, trajectory)
    observation = np.asarray(trajectory.timesteps.observation)
    np.testing.assert_allclose(outputs, observation @ np.asarray(params["policy"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, observation.sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(acted["values"], values[:-1], rtol=1e-5, atol=1e-6)


def test_own_network_of_a_dict() -> None:
    """Every leaf of the observation is flattened to [N, ...]."""
    network = nets.feed_forward(
        lambda key: (), lambda params, o: (jnp.concatenate([o["a"], o["b"]], -1), o["a"][:, 0] + o["b"][:, 0])
    )
    observation = {"a": jnp.arange(12.0).reshape(3, 2, 2), "b": jnp.ones((3, 2, 1))}
    outputs, values, state = network.apply(
        (), nets.Inputs(observation, jnp.zeros((3, 2)), jnp.zeros((3, 2), bool), ()), ()
    )
    np.testing.assert_array_equal(values, 1.0 + np.arange(12.0).reshape(3, 2, 2)[..., 0])
    assert (outputs.shape, state) == ((3, 2, 3), ())


def test_own_network_of_the_wrong_shape() -> None:
    network = user_network(values_too_wide=True)
    message = r"returned \(\(6, 4\), \(6, 1\)\) for 6 observations; it must return outputs \[6, P\] and values \[6\]"
    with pytest.raises(ValueError, match=message):
        network.apply(jax.jit(network.init)(KEY), random_inputs(np.zeros((2, 3), bool)), ())
