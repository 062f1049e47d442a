"""Discounting Chain against bsuite's, whole episodes."""

import zlib

import jax
import numpy as np
import pytest
from bsuite.environments import discounting_chain as bsuite_discounting_chain

from envs_jax.discounting_chain import DiscountingChain, DiscountingChainOptions, DiscountingChainState
from tests.support.playing import play


def episodes(mapping_seed):
    """Ours: two of each first action. Their actions [10, 100], observations [10, 101, 1, 2] and transitions [10, 100]."""
    environment = DiscountingChain(DiscountingChainOptions(mapping_seed))
    actions = np.random.default_rng(mapping_seed).integers(0, 5, (10, 100), np.int32)
    actions[:, 0] = np.arange(10) % 5
    starts = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 10))
    return actions, *play(environment, starts, actions)


@pytest.mark.parametrize("mapping_seed", [0, 4, 7])
def test_whole_episodes_equal_bsuite(mapping_seed):
    theirs = bsuite_discounting_chain.DiscountingChain(mapping_seed)
    actions, observations, transitions = episodes(mapping_seed)
    for i in range(10):
        np.testing.assert_array_equal(observations[i, 0], theirs.reset().observation)
        for t in range(100):
            expected = theirs.step(actions[i, t])
            np.testing.assert_array_equal(observations[i, t + 1], expected.observation)
            assert transitions.reward[i, t] == np.float32(expected.reward)
            assert transitions.discount[i, t] == expected.discount
            assert transitions.last[i, t] == expected.last()
    assert np.all(transitions.last[:, -1])


def test_a_chain_pays_once_and_one_of_them_a_tenth_more():
    _, _, transitions = episodes(3)
    assert [np.flatnonzero(row).tolist() for row in transitions.reward[:5]] == [[0], [2], [9], [29], [99]]
    np.testing.assert_allclose(np.sum(transitions.reward, axis=1), [1, 1, 1, 1.1, 1] * 2, rtol=1e-6)


def test_an_episode_is_as_it_was():
    _, observations, transitions = episodes(2)
    assert zlib.crc32(observations.tobytes() + np.asarray(transitions.reward).tobytes()) == GOLDEN


GOLDEN = 2911607153


def test_the_picture_shows_time_and_choice():
    render = jax.jit(DiscountingChain().render)
    image = np.asarray(render(DiscountingChainState(np.int32(3), np.int32(25))))
    assert image.shape == (40, 120, 3)
    assert image.dtype == np.uint8
    lit = np.argwhere(np.all(image == np.array((255, 215, 64)), axis=-1))
    assert set(lit[:, 1] // 24) == {3}
    time_left = np.all(image[0] == image[0, 0], axis=-1)
    assert np.sum(time_left) == 90


@pytest.mark.parametrize("value", [-1, 1.0, True, None])
def test_bad_options_name_field_value_and_remedy(value):
    with pytest.raises(ValueError, match=rf"^DiscountingChainOptions\(mapping_seed={value!r}\): use "):
        DiscountingChainOptions(mapping_seed=value)
