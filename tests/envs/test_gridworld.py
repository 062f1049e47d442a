"""Gridworld against the model of `value_iteration.py`, which shares no code with it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.gridworld import GridObject, GridParameters, GridState, Gridworld, GridworldOptions
from envs_jax.gridworld_chain import ChainState
from tests.support import value_iteration

# Every rule at once: two objects that come back, a trap that ends half of the episodes.
CHANCY = (GridObject(1.0, 0.0, 0.25), GridObject(2.5, 0.125, 0.5), GridObject(-1.0, 0.5, 0.75))
GRIDS = [
    GridworldOptions(),
    GridworldOptions(height=2, width=3, objects=CHANCY, object_cells=((1, 2), (0, 0), (1, 0)), max_steps=9),
    GridworldOptions("random_goals"),
    GridworldOptions("random_goals", height=2, width=2, objects=CHANCY, max_steps=9),
    GridworldOptions("random_goals", height=1, width=4, objects=(GridObject(1.0, 0.0, 0.5),), max_steps=5),
]
CHAINS = [
    GridworldOptions("delayed_chain"),
    GridworldOptions("delayed_chain", chain_length=1),
    GridworldOptions("delayed_chain", chain_length=3, noisy_rewards=True, distractor_bits=2),
]


def cell_state(options, worlds, present, cell, num_steps=0):
    """A batch of `GridState` from object cells [..., N], sets of present objects and agent cells [...]."""
    bits = present[..., None] >> np.arange(len(options.objects)) & 1
    return GridState(
        agent=np.stack(np.divmod(cell, options.width), -1).astype(np.int32),
        objects=np.stack(np.divmod(worlds, options.width), -1).astype(np.int32),
        present=bits.astype(bool),
        num_steps=np.full(cell.shape, num_steps, np.int32),
    )


def agent_cell(options, state):
    return np.asarray(state.agent) @ [options.width, 1]


def present_set(state):
    return np.asarray(state.present) @ (2 ** np.arange(state.present.shape[-1]))


@pytest.mark.parametrize("options", GRIDS)
def test_every_transition_of_a_grid_follows_the_table(options):
    worlds = value_iteration.placements(options)
    reward, termination, collected = value_iteration.arrivals(options, worlds)
    targets, respawn = value_iteration.neighbours(options), value_iteration.respawn_matrix(options)
    world, present, cell, action = (x.reshape(-1) for x in np.indices((*reward.shape, 9)))
    num_samples = 1 + 100_000 // len(world)
    environment = Gridworld(options)

    @jax.jit
    @jax.vmap
    def step(state, action, keys):
        new_state, transition = jax.vmap(environment.step, in_axes=(None, None, 0))(state, action, keys)
        return new_state, transition

    keys = jax.random.split(jax.random.key(0), (len(world), num_samples))
    before = cell_state(options, worlds[world], present, cell)
    after, transition = jax.device_get(step(before, action.astype(np.int32), keys))

    arrival = world, present, targets[cell, action]
    np.testing.assert_array_equal(agent_cell(options, after), np.repeat(arrival[2][:, None], num_samples, 1))
    np.testing.assert_array_equal(transition.reward, np.repeat(reward[arrival][:, None], num_samples, 1))
    np.testing.assert_array_equal(transition.last, transition.discount == 0)
    np.testing.assert_array_equal(after.num_steps, 1)
    np.testing.assert_array_equal(after.objects, np.repeat(before.objects[:, None], num_samples, 1))
    # Chance, over all transitions with the same probabilities.
    for chance in np.unique(termination):
        check_frequency(np.mean(transition.last[termination[arrival] == chance]), chance, 1 / 50)
    sets = np.where(transition.last, -1, collected[arrival][:, None])  # what is there in the end matters to nobody
    for p in np.unique(sets[sets >= 0]):
        for q in range(len(respawn)):
            check_frequency(np.mean(present_set(after)[sets == p] == q), respawn[p, q], 1 / 50)


def check_frequency(frequency, probability, tolerance):
    """Certain events exactly, others within `tolerance`."""
    np.testing.assert_allclose(frequency, probability, rtol=0, atol=tolerance if 0 < probability < 1 else 0)


@pytest.mark.parametrize("options", GRIDS)
def test_starts_are_uniform(options):
    world, present, cell = value_iteration.start_states(options)
    num_episodes = 50 * len(world)
    states = jax.jit(jax.vmap(Gridworld(options).reset))(jax.random.split(jax.random.key(3), num_episodes))
    places = np.column_stack([np.asarray(states.objects) @ [options.width, 1], agent_cell(options, states)])
    expected = np.column_stack([value_iteration.placements(options)[world], cell])
    found, counts = np.unique(places, axis=0, return_counts=True)
    np.testing.assert_array_equal(found, np.unique(expected, axis=0))
    z = (counts - 50) / np.sqrt(50)
    assert abs(np.mean(z**2) - 1) < 6 * np.sqrt(2 / len(z))
    assert np.abs(z).max() < 6
    np.testing.assert_array_equal(present_set(states), present[0])
    np.testing.assert_array_equal(states.num_steps, 0)


@pytest.mark.parametrize("options", GRIDS)
def test_observations_are_as_documented(options):
    environment, worlds = Gridworld(options), value_iteration.placements(options)
    num_sets, num_cells = 2 ** len(options.objects), options.height * options.width
    world, present, cell = (x.reshape(-1) for x in np.indices((len(worlds), num_sets, num_cells)))
    state = cell_state(options, worlds[world], present, cell)
    observation = np.asarray(jax.jit(jax.vmap(environment.observe))(state))
    assert observation.dtype == np.float32
    assert observation.shape[1:] == environment.spec.observation_space.shape
    if options.task == "tabular":
        np.testing.assert_array_equal(np.argmax(observation, axis=-1), cell * num_sets + present)
        np.testing.assert_array_equal(observation.sum(-1), 1)
        return
    planes = observation.reshape(-1, num_cells, 1 + len(options.objects))
    np.testing.assert_array_equal(planes[..., 0], np.eye(num_cells)[cell])
    for i in range(len(options.objects)):
        np.testing.assert_array_equal(
            planes[..., 1 + i], np.eye(num_cells)[worlds[world, i]] * (present >> i & 1)[:, None]
        )


def test_flatten_only_reshapes():
    image = Gridworld(GridworldOptions("random_goals", height=3, flatten=False))
    vector = Gridworld(GridworldOptions("random_goals", height=3))
    state = image.reset(jax.random.key(0))
    assert image.spec.observation_space.shape == image.observe(state).shape == (3, 4, 3)
    np.testing.assert_array_equal(image.observe(state).reshape(-1), vector.observe(state))


def test_the_time_limit_truncates_and_a_termination_at_the_limit_terminates():
    options = GridworldOptions(max_steps=7)
    step = Gridworld(options).step
    worlds = value_iteration.placements(options)[0]

    def transition(cell, num_steps):
        state = cell_state(options, worlds, np.array(3), np.array(cell), num_steps)
        return [
            float(x) for x in step(state, np.int32(0), jax.random.key(0))[1][:3]
        ]  # staying collects what lies there

    assert transition(15, 5) == [0, 1, False]
    assert transition(15, 6) == [0, 1, True]
    assert transition(3, 6) == [1, 0, True]


@pytest.mark.parametrize("options", CHAINS)
def test_every_transition_of_a_chain(options):
    length, environment = options.chain_length, Gridworld(options)
    num_steps, cue, right, action, _ = (x.reshape(-1) for x in np.indices((length, 2, 2, 2, 64)))
    keys = jax.random.split(jax.random.key(0), len(action))
    bits = np.zeros((len(action), options.distractor_bits), bool)
    before = ChainState(num_steps.astype(np.int32), cue.astype(np.int32), right.astype(bool), bits)
    after, transition = jax.device_get(jax.jit(jax.vmap(environment.step))(before, action.astype(np.int32), keys))
    observation = jax.device_get(jax.jit(jax.vmap(environment.observe))(after))

    expected_right = np.where(num_steps == 0, action == cue, right)
    last = num_steps == length - 1
    np.testing.assert_array_equal(after.right, expected_right)
    np.testing.assert_array_equal(after.cue, cue)
    np.testing.assert_array_equal(transition.last, last)
    np.testing.assert_array_equal(transition.discount, ~last)
    np.testing.assert_array_equal(transition.reward[last], np.where(expected_right, 1, -1)[last])
    if options.noisy_rewards:
        np.testing.assert_array_equal(np.abs(transition.reward), 1)
        assert abs(np.mean(transition.reward[~last])) < 0.2
    else:
        assert not transition.reward[~last].any()
    index = 2 * (num_steps + 1) + expected_right
    np.testing.assert_array_equal(observation[:, : 2 + 2 * length], np.eye(2 + 2 * length)[index])
    np.testing.assert_array_equal(observation[:, 2 + 2 * length :], after.distractors)
    if options.distractor_bits:
        np.testing.assert_allclose(after.distractors.mean(0), 0.5, atol=0.1)


def test_a_chain_starts_with_a_cue():
    environment = Gridworld(GridworldOptions("delayed_chain", distractor_bits=1))
    states = jax.jit(jax.vmap(environment.reset))(jax.random.split(jax.random.key(0), 1000))
    observation = np.asarray(jax.vmap(environment.observe)(states))
    np.testing.assert_array_equal(observation[:, :2], np.eye(2)[states.cue])
    assert not observation[:, 2:-1].any()
    table = np.histogram2d(np.asarray(states.cue), np.asarray(states.distractors[:, 0]), bins=2)[0]
    np.testing.assert_allclose(table, 250, atol=70)  # 5 standard deviations


@pytest.mark.parametrize(("task", "random"), [("tabular", -0.2736), ("random_goals", 0.0), ("delayed_chain", 0.0)])
def test_the_defaults_leave_much_to_learn(task, random):
    options = GridworldOptions(task)
    assert value_iteration.optimal_return(options) == pytest.approx(1.0, abs=1e-9)
    assert value_iteration.random_return(options) == pytest.approx(random, abs=1e-4)


def test_value_iteration_by_hand():
    thing = GridObject(1.0, termination_probability=0.5, respawn_probability=0.25)
    options = GridworldOptions("random_goals", height=1, width=2, objects=(thing,), max_steps=2)
    # Collect at once; if it goes on (1/2) and the object is back (1/4), stay.
    assert value_iteration.optimal_return(options) == pytest.approx(1 + 1 / 8)
    # A third of the moves change the column and two thirds do not.
    assert value_iteration.random_return(options) == pytest.approx(1 / 3 * (1 + 1 / 8 * 2 / 3) + 2 / 3 * 1 / 3)


@pytest.mark.parametrize("options", [pytest.param(GRIDS[0], marks=pytest.mark.slow), GRIDS[3], CHAINS[2]])
def test_a_random_policy_earns_what_the_model_says(options):
    environment = Gridworld(options)

    def episode(key):
        def body(carry, key):
            state, alive = carry
            action_key, step_key = jax.random.split(key)
            action = environment.spec.action_space.sample(action_key)
            state, transition = environment.step(state, action, step_key)
            return (state, alive & ~transition.last), jnp.where(alive, transition.reward, 0.0)

        reset_key, key = jax.random.split(key)
        carry = environment.reset(reset_key), jnp.bool_(True)
        (_, alive), rewards = jax.lax.scan(body, carry, jax.random.split(key, environment.spec.max_episode_steps))
        return rewards.sum(), alive

    returns, alive = jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), 8192))
    assert not np.any(alive)
    error = np.std(returns) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - value_iteration.random_return(options)) < 4 * error


@pytest.mark.parametrize("task", ["tabular", "random_goals", "delayed_chain"])
def test_pictures(task):
    environment = Gridworld(GridworldOptions(task, width=6, height=2))
    state = environment.reset(jax.random.key(0))
    picture = np.asarray(jax.jit(environment.render)(state))
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert min(picture.shape[:2]) >= 64
    if task != "delayed_chain":
        scale = picture.shape[0] // 2
        row, column = np.asarray(state.agent)
        centres = picture[scale // 2 :: scale, scale // 2 :: scale]
        assert centres.shape[:2] == (2, 6)
        assert (centres == centres[row, column]).all(-1).sum() == 1


BAD = [
    *[("task", "maze"), ("height", 0), ("width", 2.0), ("max_steps", 0), ("max_steps", True), ("flatten", 1)],
    *[("chain_length", 0), ("noisy_rewards", None), ("distractor_bits", -1), ("objects", [GridObject(1.0)])],
    *[("objects", (1.0, 2.0)), ("objects", (GridObject(1.0),) * 16), ("objects", (GridObject(1.0),))],
    *[("object_cells", ((0, 0), (0, 0))), ("object_cells", ((0, 0), (0, 4))), ("object_cells", ((0, 0), (0,)))],
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=r"^GridworldOptions\((object_cells|" + field + r")=.+\): .*(use|give) "):
        GridworldOptions(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    itertools.chain(
        itertools.product(("termination_probability", "respawn_probability"), (-0.1, 1.5, True, "1")),
        [("reward", float("inf")), ("reward", None)],
    ),
)
def test_bad_objects_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^GridObject\({field}={value!r}\): use "):
        GridObject(**({"reward": 1.0} | {field: value}))


# Parameters


@pytest.mark.parametrize("task", ["tabular", pytest.param("random_goals", marks=pytest.mark.slow)])
def test_a_grid_by_parameters_is_the_one_by_options(task: Any) -> None:
    """Also where all of them are traced."""
    things = (GridObject(0.5, 0.25, 0.5), GridObject(-1.0, 0.5, 0.125))
    other = (GridObject(9.0), GridObject(9.0))
    grids = [
        Gridworld(GridworldOptions(task, height=3, width=4, objects=objects, object_cells=cells))
        for objects, cells in ((things, ((2, 1), (0, 3))), (other, ((0, 0), (1, 1))))
    ]
    numbers = np.array([[0.5, 0.25, 0.5], [-1.0, 0.5, 0.125]], np.float32).T
    asked = GridParameters(*map(jnp.asarray, numbers), jnp.array([3, 4]), jnp.array([[2, 1], [0, 3]]))

    def play(parameters: Any, key: jax.Array) -> Any:
        env = grids[0] if parameters is None else grids[1].with_parameters(parameters)

        def step(state: Any, key: jax.Array) -> Any:
            action = jax.random.randint(key, (), 0, 9)
            state, transition = env.step(state, action, key)
            return state, (env.observe(state), transition)

        return jax.lax.scan(step, env.reset(key), jax.random.split(key, 40))

    keys = jax.random.split(jax.random.key(0), 8)
    same, traced = (jax.jit(jax.vmap(play, in_axes=(None, 0)))(parameters, keys) for parameters in (None, asked))
    jax.tree.map(np.testing.assert_array_equal, same, traced)


@pytest.mark.slow
@pytest.mark.nightly
def test_parameters_are_drawn_within_their_grid() -> None:
    grid = Gridworld(GridworldOptions(height=4, width=5))
    drawn = jax.jit(jax.vmap(grid.parameters))(jax.random.split(jax.random.key(0), 500))
    assert {tuple(size) for size in np.asarray(drawn.size)} == {(h, w) for h in (2, 3, 4) for w in (3, 4, 5)}
    assert np.all((drawn.cells >= 0) & (drawn.cells < drawn.size[:, None]))
    assert np.all(np.any(drawn.cells[:, 0] != drawn.cells[:, 1], axis=-1))

    # Nobody leaves a small grid, and the agent begins beside the objects.
    def walk(parameters: Any, key: jax.Array) -> Any:
        env = grid.with_parameters(parameters)
        step = lambda state, key: (env.step(state, jax.random.randint(key, (), 0, 9), key)[0], state)  # noqa: E731
        return jax.lax.scan(step, env.reset(key), jax.random.split(key, 20))[1]

    states = jax.jit(jax.vmap(walk))(drawn, jax.random.split(jax.random.key(1), 500))
    assert np.all((states.agent >= 0) & (states.agent < drawn.size[:, None]))
    assert np.all(states.objects == drawn.cells[:, None])
    assert not np.any(np.all(states.agent[:, 0, None] == states.objects[:, 0], axis=-1))


def test_a_chain_has_no_parameters() -> None:
    with pytest.raises(ValueError, match="has no parameters; use 'tabular' or 'random_goals'"):
        Gridworld(GridworldOptions(task="delayed_chain")).parameters(jax.random.key(0))
