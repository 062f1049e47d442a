"""Umbrella Chain against bsuite's, whole episodes, with the chance of ours given to it."""

import zlib

import jax
import numpy as np
import pytest
from bsuite.environments import umbrella_chain as bsuite_umbrella_chain

from envs_jax.umbrella_chain import UmbrellaChain, UmbrellaChainOptions, UmbrellaChainState


class Given:
    """A source of random bits that are known beforehand."""

    def __init__(self):
        self.bits = []

    def binomial(self, n, p, size=None):
        assert (n, p) == (1, 0.5)
        drawn = [self.bits.pop(0) for _ in range(1 if size is None else size)]
        return drawn[0] if size is None else drawn


def episodes(length, num_distractors, count=12):
    """Ours at random: actions [count, length], first states, states [count, length, ...], observations, transitions."""
    environment = UmbrellaChain(UmbrellaChainOptions(length, num_distractors))
    actions = np.random.default_rng(0).integers(0, 2, (count, length), np.int32)

    def episode(key, actions):
        def body(state, now):
            action, key = now
            state, transition = environment.step(state, action, key)
            return state, (state, environment.observe(state), transition)

        reset_key, key = jax.random.split(key)
        start = environment.reset(reset_key)
        rows = jax.lax.scan(body, start, (actions, jax.random.split(key, length)))[1]
        return start, environment.observe(start), *rows

    return actions, *jax.device_get(jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), count), actions))


@pytest.mark.parametrize(("length", "num_distractors"), [(20, 20), (1, 0), (5, 40)])
def test_whole_episodes_equal_bsuite(length, num_distractors):
    actions, start, first, states, observations, transitions = episodes(length, num_distractors)
    theirs = bsuite_umbrella_chain.UmbrellaChain(length, num_distractors, seed=0)
    theirs._rng = Given()
    for i in range(len(actions)):
        theirs._rng.bits = [start.need[i], start.have[i], *start.distractors[i]]
        np.testing.assert_array_equal(first[i], theirs.reset().observation)
        for t in range(length):
            on_the_way = [] if t == length - 1 else [int(transitions.reward[i, t] == 1)]
            theirs._rng.bits = [*on_the_way, *states.distractors[i, t]]
            expected = theirs.step(actions[i, t])
            assert not theirs._rng.bits
            np.testing.assert_array_equal(observations[i, t], expected.observation)
            assert transitions.reward[i, t] == expected.reward
            assert transitions.discount[i, t] == expected.discount
            assert transitions.last[i, t] == expected.last()
    assert set(transitions.reward[:, -1]) == {-1, 1}


def test_who_takes_the_umbrella_when_it_is_needed_wins():
    actions, start, _, _, _, transitions = episodes(6, 2, count=40)
    np.testing.assert_array_equal(transitions.reward[:, -1], np.where(actions[:, 0] == start.need, 1, -1))


def test_chance_is_fair_and_fresh():
    """The words of need, have, a distractor of each kind of row, and a reward on the way: all 32 are alike, by chi-square."""
    environment = UmbrellaChain(UmbrellaChainOptions(num_distractors=34))

    def one(key):
        reset_key, step_key = jax.random.split(key)
        start = environment.reset(reset_key)
        state, transition = environment.step(start, np.int32(0), step_key)
        return [start.need, start.have, start.distractors[33], state.distractors[33], (transition.reward + 1) / 2]

    bits = np.stack(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 32_000))).astype(int)
    counts = np.bincount(2 ** np.arange(5) @ bits, minlength=32)
    assert np.sum((counts - 1000.0) ** 2 / 1000) < 70.0  # passed once in 10,000 times


def test_50_steps_are_as_they_were():
    _, start, first, _, observations, transitions = episodes(50, 20, count=1)
    record = (start.have, first, observations, transitions.reward)
    assert zlib.crc32(b"".join(np.asarray(x).tobytes() for x in record)) == GOLDEN


GOLDEN = 4011018847


def test_the_picture_shows_time_weather_and_umbrella():
    environment = UmbrellaChain(UmbrellaChainOptions(length=4, num_distractors=0))
    render = jax.jit(environment.render)

    def picture(need, have, num_steps):
        state = UmbrellaChainState(*(np.int32(x) for x in (need, have, num_steps)), np.zeros(0, np.int32))
        return np.asarray(render(state))

    image = picture(1, 0, 1)
    assert image.shape == (64, 96, 3)
    assert image.dtype == np.uint8
    lit = np.argwhere(np.all(image[16:] == np.array((96, 165, 250)), axis=-1))
    assert set(lit[:, 1] // 48) == {0}
    np.testing.assert_array_equal(picture(0, 1, 1)[16:, 48:], image[16:, :48])
    assert np.sum(np.all(image[0] == image[0, 0], axis=-1)) == 72


@pytest.mark.parametrize(
    ("field", "value"), [("length", 0), ("length", 1.0), ("num_distractors", -1), ("num_distractors", True)]
)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^UmbrellaChainOptions\({field}={value!r}\): use "):
        UmbrellaChainOptions(**{field: value})
