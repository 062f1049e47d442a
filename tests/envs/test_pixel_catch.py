"""Pixel Catch against Catch: the same episodes, its board in every pixel."""

import jax
import numpy as np
import pytest

from envs_jax.catch import Catch, CatchOptions
from envs_jax.pixel_catch import PixelCatch, PixelCatchOptions


def play(environment, keys, actions):
    """Whole episodes of `environment`, one for each of `keys` [B], with `actions` [B, T]."""

    def episode(key, actions):
        state = environment.reset(key)

        def body(state, action):
            state, transition = environment.step(state, action, key)
            return state, (environment.observe(state), transition)

        return environment.observe(state), *jax.lax.scan(body, state, actions)[1]

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(episode))(keys, actions))


def edges(cells):
    """Pixels of each of `cells`: cell i begins at the first pixel at or after i / cells of the image."""
    return np.diff(np.ceil(np.arange(cells + 1) * 84 / cells)).astype(int)


@pytest.mark.parametrize(("rows", "columns"), [(10, 5), (12, 7), pytest.param(84, 84, marks=pytest.mark.slow), (3, 83)])
def test_shows_the_board_of_catch(rows, columns):
    keys = jax.random.split(jax.random.key(0), 16)
    actions = np.random.default_rng(0).integers(0, 3, (16, rows - 1), dtype=np.int32)
    board, boards, expected = play(Catch(CatchOptions(rows, columns)), keys, actions)
    image, images, transitions = play(PixelCatch(PixelCatchOptions(rows, columns)), keys, actions)

    boards = np.concatenate([board[:, None], boards], axis=1)
    images = np.concatenate([image[:, None], images], axis=1)
    assert images.dtype == np.uint8
    assert images.shape[2:] == (84, 84)
    upscaled = np.repeat(np.repeat(boards, edges(rows), axis=2), edges(columns), axis=3)
    np.testing.assert_array_equal(images, 255 * upscaled.astype(np.uint8))
    jax.tree.map(np.testing.assert_array_equal, transitions, expected)


def test_cells_of_the_default_board():
    assert set(edges(10)) == {8, 9}
    assert set(edges(5)) == {16, 17}


def test_spec():
    environment = PixelCatch()
    assert environment.spec.observation_space.contains(environment.observe(environment.reset(jax.random.key(0))))
    assert environment.spec.action_space == Catch().spec.action_space
    assert environment.spec.max_episode_steps == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 85}, r"PixelCatchOptions\(rows=85\): use at most 84"),
        ({"columns": 85}, r"PixelCatchOptions\(columns=85\): use at most 84"),
        ({"rows": 1}, r"PixelCatchOptions\(rows=1\): use an integer of at least 2"),
    ],
)
def test_refuses_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PixelCatchOptions(**options)


def test_render_is_the_observation():
    environment = PixelCatch()
    state = environment.reset(jax.random.key(0))
    image = np.asarray(jax.jit(environment.render)(state))
    assert image.dtype == np.uint8
    assert image.shape == (168, 168, 3)
    np.testing.assert_array_equal(image[::2, ::2], np.stack([environment.observe(state)] * 3, axis=-1))
