"""Memory Chain against bsuite's, transition by transition."""

import jax
import numpy as np
import pytest
from bsuite.environments import memory_chain as bsuite_memory_chain

from envs_jax.memory_chain import MemoryChain, MemoryChainOptions, MemoryChainState

SIZES = [(10, 1), (7, 3), (1, 1), (1, 2), (30, 5)]


@pytest.mark.parametrize(("length", "num_bits"), SIZES)
def test_every_transition_equals_bsuite(length, num_bits):
    rng = np.random.default_rng(0)
    num_steps = np.repeat(np.arange(length + 1, dtype=np.int32), 8)
    context = rng.integers(0, 2, (len(num_steps), num_bits), np.int32)
    query = rng.integers(0, num_bits, len(num_steps), np.int32)
    action = rng.integers(0, 2, len(num_steps), np.int32)
    environment = MemoryChain(MemoryChainOptions(length, num_bits))
    theirs = bsuite_memory_chain.MemoryChain(length, num_bits)

    @jax.jit
    @jax.vmap
    def step(state, action):
        new_state, transition = environment.step(state, action, jax.random.key(0))
        return environment.observe(new_state), transition

    observation, transition = jax.device_get(step(MemoryChainState(num_steps, context, query), action))
    assert observation.dtype == np.float32
    for i in range(len(action)):
        theirs.reset()
        theirs._timestep, theirs._context, theirs._query = num_steps[i], context[i], query[i]
        expected = theirs.step(action[i])
        np.testing.assert_array_equal(observation[i], expected.observation)
        assert transition.reward[i] == expected.reward
        assert transition.discount[i] == expected.discount
        assert transition.last[i] == expected.last()


@pytest.mark.parametrize(("length", "num_bits"), SIZES)
def test_whole_episodes_equal_bsuite(length, num_bits):
    num_episodes = 16
    actions = np.random.default_rng(0).integers(0, 2, (length + 1, num_episodes), np.int32)
    environment = MemoryChain(MemoryChainOptions(length, num_bits))
    theirs = bsuite_memory_chain.MemoryChain(length, num_bits)

    def episode(key, actions):
        def body(state, action):
            state, transition = environment.step(state, action, key)
            return state, (environment.observe(state), transition)

        state = environment.reset(key)
        return state, environment.observe(state), jax.lax.scan(body, state, actions)[1]

    keys = jax.random.split(jax.random.key(0), num_episodes)
    played = jax.jit(jax.vmap(episode, in_axes=(0, 1)))(keys, actions)
    start, first, (observations, transitions) = jax.device_get(played)
    for i in range(num_episodes):
        theirs.reset()
        theirs._context, theirs._query = start.context[i], start.query[i]
        np.testing.assert_array_equal(first[i], theirs._get_observation())
        for t in range(length + 1):
            expected = theirs.step(actions[t, i])
            np.testing.assert_array_equal(observations[i, t], expected.observation)
            assert transitions.reward[i, t] == expected.reward
            assert transitions.last[i, t] == expected.last()


def test_bits_and_queries_are_uniform_and_independent():
    environment = MemoryChain(MemoryChainOptions(num_bits=3))
    states = jax.jit(jax.vmap(environment.reset))(jax.random.split(jax.random.key(0), 24_000))
    word = np.asarray(states.context) @ [1, 2, 4] * 3 + np.asarray(states.query)
    np.testing.assert_allclose(np.bincount(word, minlength=24), 1000, atol=160)  # 5 standard deviations
    assert not np.any(states.num_steps)


def test_the_picture_shows_bits_query_and_time():
    environment = MemoryChain(MemoryChainOptions(length=4, num_bits=2))
    render = jax.jit(environment.render)

    def picture(num_steps, bits, query):
        return np.asarray(render(MemoryChainState(np.int32(num_steps), np.array(bits, np.int32), np.int32(query))))

    one = picture(0, [1, 0], 0)
    assert one.shape == (96, 96, 3)
    assert one.dtype == np.uint8
    assert (one[40, 24] != one[40, 72]).any()
    np.testing.assert_array_equal(picture(0, [0, 1], 0)[40, 24], one[40, 72])
    assert (picture(0, [1, 0], 1)[16, 0] != one[16, 0]).any()
    assert (picture(5, [1, 0], 0)[0, 48] != one[0, 48]).any()


@pytest.mark.parametrize(("field", "value"), [("length", 0), ("length", 1.0), ("num_bits", 0), ("num_bits", True)])
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^MemoryChainOptions\({field}={value!r}\): use "):
        MemoryChainOptions(**{field: value})
