"""Catch against EnvPool's and bsuite's, transition by transition."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.catch import Catch, CatchOptions, CatchState

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what third-party packages do at import
    import envpool

SIZES = [(10, 5), (7, 4), (2, 3), (5, 8)]


def play(rows, columns, ball_column, actions):
    """Whole episodes from `ball_column` [B] with `actions` [rows - 1, B]: observations [rows, B, ...], transitions."""
    environment = Catch(CatchOptions(rows=rows, columns=columns))

    def episode(ball_column, actions):
        state = environment.reset(jax.random.key(0))._replace(ball_column=ball_column)

        def body(state, action):
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, (environment.observe(state), transition)

        first = environment.observe(state)
        _, (observations, transitions) = jax.lax.scan(body, state, actions)
        return jnp.concatenate([first[None], observations]), transitions

    lanes_last = jax.vmap(episode, in_axes=(0, 1), out_axes=1)
    return jax.tree.map(np.asarray, jax.jit(lanes_last)(ball_column, actions))


def check(rows, columns, observations, actions, rewards, terminated):
    """Ours from the first boards of another implementation: observations [rows, B, ...], the rest [rows - 1, B]."""
    ball_column = np.argmax(observations[0, :, 0], axis=-1).astype(np.int32)
    assert len(np.unique(ball_column)) == columns
    ours, transitions = play(rows, columns, ball_column, actions)
    np.testing.assert_array_equal(ours, observations)
    assert ours.dtype == observations.dtype == np.float32
    np.testing.assert_array_equal(transitions.reward, rewards)
    np.testing.assert_array_equal(transitions.last, terminated)
    np.testing.assert_array_equal(transitions.discount, 1.0 - terminated)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_equals_envpool(rows, columns):
    num_episodes, num_lanes = 8, 64
    pool = envpool.make(
        "Catch-v0", env_type="gymnasium", num_envs=num_lanes, seed=1, num_threads=1, height=rows, width=columns
    )
    rng = np.random.default_rng(0)
    episodes = []
    for episode in range(num_episodes):
        actions = rng.integers(0, 3, (rows - 1, num_lanes), dtype=np.int32)
        # After the first episode a step resets, and ignores its action.
        first = pool.reset()[0] if episode == 0 else pool.step(actions[0])[0]
        observations, rewards, terminated, truncated, _ = zip(*(pool.step(action) for action in actions))
        assert not np.any(truncated)
        episodes.append((np.stack([first, *observations]), actions, np.stack(rewards), np.stack(terminated)))
    check(rows, columns, *(np.concatenate(x, axis=1) for x in zip(*episodes)))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_equals_bsuite(rows, columns):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        catch = pytest.importorskip("bsuite.environments.catch")
    num_lanes = 100
    environment = catch.Catch(rows=rows, columns=columns, seed=1)
    actions = np.random.default_rng(0).integers(0, 3, (rows - 1, num_lanes), dtype=np.int32)
    episodes = [[environment.reset(), *(environment.step(action) for action in lane)] for lane in actions.T]
    check(
        rows,
        columns,
        np.stack([[row.observation for row in episode] for episode in episodes], axis=1),
        actions,
        np.stack([[row.reward for row in episode[1:]] for episode in episodes], axis=1),
        np.stack([[row.last() for row in episode[1:]] for episode in episodes], axis=1),
    )


def test_reset_is_uniform_over_columns():
    states = jax.vmap(Catch().reset)(jax.random.split(jax.random.key(0), 5000))
    counts = np.bincount(states.ball_column, minlength=5)
    assert len(counts) == 5
    assert np.all(np.abs(counts - 1000) < 150)  # 5 standard deviations
    assert np.all(states.ball_row == 0)
    assert np.all(states.paddle_column == 2)


def test_spec_and_options():
    environment = Catch()
    observation = environment.observe(environment.reset(jax.random.key(0)))
    assert environment.spec.observation_space.contains(observation)
    assert environment.spec.action_space.num_values == 3
    assert environment.spec.max_episode_steps == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 1}, r"rows=1\): use an integer of at least 2"),
        ({"rows": 10.0}, r"rows=10\.0"),
        ({"columns": 0}, r"columns=0\): use an integer of at least 1"),
        ({"columns": True}, "columns=True"),
    ],
)
def test_refuses_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        CatchOptions(**options)


def test_render_shows_ball_and_paddle():
    image = np.asarray(jax.jit(Catch().render)(CatchState(jnp.int32(3), jnp.int32(4), jnp.int32(1))))
    assert image.dtype == np.uint8
    assert image.shape[-1] == 3
    assert min(image.shape[:2]) >= 64
    cell = image.shape[1] // 5
    background = image[0, 0]
    drawn = np.any(image != background, axis=-1) & np.any(image != image[0, cell], axis=-1)
    assert {tuple(index) for index in np.argwhere(drawn) // cell} == {(3, 4), (9, 1)}
