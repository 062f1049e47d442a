"""Bandit against bsuite's SimpleBandit, every arm of many orders."""

import zlib

import jax
import numpy as np
import pytest
from bsuite.environments import bandit as bsuite_bandit

from envs_jax.bandit import Bandit, BanditOptions, BanditState


@pytest.mark.parametrize("mapping_seed", [0, 1, 19])
def test_every_arm_equals_bsuite(mapping_seed):
    environment, theirs = Bandit(BanditOptions(mapping_seed)), bsuite_bandit.SimpleBandit(mapping_seed)
    arms, key = np.arange(11, dtype=np.int32), jax.random.key(0)
    start = environment.reset(key)
    np.testing.assert_array_equal(environment.observe(start), theirs.reset().observation)
    states, transitions = jax.vmap(environment.step, (None, 0, None))(start, arms, key)
    for arm in arms:
        theirs.reset()
        expected = theirs.step(arm)
        assert transitions.reward[arm] == np.float32(expected.reward)
        assert transitions.discount[arm] == expected.discount == 0
        assert transitions.last[arm]
        assert expected.last()
        np.testing.assert_array_equal(environment.observe(states), expected.observation)
    assert environment.spec.action_space.num_values == theirs.action_spec().num_values == len(arms)
    assert environment.spec.observation_space.shape == theirs.observation_spec().shape


def test_50_orders_are_as_they_were():
    orders = np.stack([Bandit(BanditOptions(seed))._rewards for seed in range(50)])
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.linspace(0, 1, 11, dtype=np.float32), (50, 1)))
    assert zlib.crc32(np.round(orders * 10).astype(np.uint8).tobytes()) == GOLDEN


GOLDEN = 2525371929


def test_the_picture_shows_rewards_and_the_arm_that_was_pulled():
    environment = Bandit()
    best = int(np.argmax(environment._rewards))
    image = np.asarray(environment.render(BanditState(np.int32(best))))
    assert image.shape == (80, 132, 3)
    assert image.dtype == np.uint8
    lit = np.argwhere(np.all(image == np.array((255, 215, 64)), axis=-1))
    assert len(np.unique(lit[:, 0])) == 76
    assert set(lit[:, 1] // 12) == {best}
    assert not np.any(np.all(np.asarray(environment.render(BanditState(np.int32(-1)))) == image[-1, best * 12 + 6], -1))


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, True, None])
def test_bad_options_name_field_value_and_remedy(value):
    with pytest.raises(ValueError, match=rf"^BanditOptions\(mapping_seed={value!r}\): use "):
        BanditOptions(mapping_seed=value)
