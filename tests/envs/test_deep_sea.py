"""Deep Sea against bsuite's, transition by transition."""

import jax
import numpy as np
import pytest
from bsuite.environments import deep_sea as bsuite_deep_sea

from envs_jax.deep_sea import DeepSea, DeepSeaOptions, DeepSeaState

CASES = [(8, True, 42), (8, True, 7), (5, False, 0), (1, True, 1)]


def bsuite_environment(size, randomize_actions, mapping_seed, move_cost=0.01):
    kwargs = {"randomize_actions": randomize_actions, "mapping_seed": mapping_seed, "unscaled_move_cost": move_cost}
    if randomize_actions:
        return bsuite_deep_sea.DeepSea(size, **kwargs)
    with pytest.warns(UserWarning, match="debug mode"):
        return bsuite_deep_sea.DeepSea(size, **kwargs)


def options(size, randomize_actions, mapping_seed, move_cost=0.01):
    return DeepSeaOptions(size, randomize_actions, mapping_seed, move_cost)


@pytest.mark.parametrize("case", [*CASES, (6, True, 42, 0.3)])
def test_every_transition_equals_bsuite(case):
    size = case[0]
    row, column, action = (x.reshape(-1).astype(np.int32) for x in np.meshgrid(range(size), range(size), range(2)))
    environment, theirs = DeepSea(options(*case)), bsuite_environment(*case)

    @jax.jit
    @jax.vmap
    def step(row, column, action):
        state, transition = environment.step(DeepSeaState(row, column), action, jax.random.key(0))
        return environment.observe(state), transition

    observation, transition = jax.device_get(step(row, column, action))
    assert observation.dtype == np.float32
    for i in range(len(action)):
        theirs.reset()
        theirs._row, theirs._column = row[i], column[i]
        expected = theirs.step(action[i])
        np.testing.assert_array_equal(observation[i], expected.observation)
        assert transition.reward[i] == np.float32(expected.reward)
        assert transition.discount[i] == expected.discount
        assert transition.last[i] == expected.last()


@pytest.mark.parametrize("case", CASES)
def test_whole_episodes_equal_bsuite(case):
    size, num_episodes = case[0], 16
    actions = np.random.default_rng(0).integers(0, 2, (size, num_episodes), np.int32)
    environment, theirs = DeepSea(options(*case)), bsuite_environment(*case)

    def episode(actions):
        def body(state, action):
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, (environment.observe(state), transition)

        state = environment.reset(jax.random.key(0))
        return environment.observe(state), jax.lax.scan(body, state, actions)[1]

    first, (observations, transitions) = jax.device_get(jax.jit(jax.vmap(episode, in_axes=1))(actions))
    for i in range(num_episodes):
        np.testing.assert_array_equal(first[i], theirs.reset().observation)
        for t in range(size):
            expected = theirs.step(actions[t, i])
            np.testing.assert_array_equal(observations[i, t], expected.observation)
            assert transitions.reward[i, t] == np.float32(expected.reward)
            assert transitions.last[i, t] == expected.last()


def test_the_optimal_return_is_one_minus_the_move_cost():
    environment = DeepSea(DeepSeaOptions(size=10, randomize_actions=False, unscaled_move_cost=0.25))
    state, total = environment.reset(jax.random.key(0)), 0.0
    for _ in range(10):
        state, transition = environment.step(state, np.int32(1), jax.random.key(0))
        total += float(transition.reward)
    assert transition.last
    assert total == pytest.approx(0.75, abs=1e-6)


def test_the_picture_shows_the_diver_until_the_sea_bed():
    environment = DeepSea(DeepSeaOptions(size=4))
    render = jax.jit(environment.render)
    pictures = [np.asarray(render(DeepSeaState(np.int32(row), np.int32(1)))) for row in range(5)]
    diver = pictures[0][0, 24]
    for row, picture in enumerate(pictures):
        assert picture.shape == (120, 96, 3)
        assert picture.dtype == np.uint8
        np.testing.assert_array_equal(np.argwhere((picture == diver).all(-1))[0], [24 * row, 24])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("size", 0), ("size", 2.0), ("size", True), ("randomize_actions", 1), ("mapping_seed", -1)],
        *[("mapping_seed", None), ("unscaled_move_cost", 1.0), ("unscaled_move_cost", float("nan"))],
    ],
)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^DeepSeaOptions\({field}={value!r}\): use "):
        DeepSeaOptions(**{field: value})
