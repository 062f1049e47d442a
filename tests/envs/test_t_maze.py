"""T-maze against its rules written down a second time, over a drawn map."""

import jax
import numpy as np
import pytest

from envs_jax.t_maze import TMaze, TMazeOptions, TMazeState
from envs_jax.testing import check_environment, validate_protocol
from tests.support.playing import play

NORTH, EAST, SOUTH, WEST = range(4)
MOVES = {NORTH: (-1, 0), EAST: (0, 1), SOUTH: (1, 0), WEST: (0, -1)}
PAPER = TMazeOptions(10, 10, correct_reward=4, wrong_reward=-0.1, bump_penalty=0.1)
OPTIONS = [TMazeOptions(), PAPER, TMazeOptions(1, 3, max_steps=5), TMazeOptions(1, 1)]


def limit(options):
    return options.max_steps or 4 * options.max_length


def oracle(options, length, cue, actions):
    """(observation, reward, discount, last) of every row of an episode, the first one included."""
    drawn = ["#" * (length + 1) + "N#", "#S" + "." * (length - 1) + "J#", "#" * (length + 1) + "N#"]
    place, rows = (1, 1), [([cue, 1, 0, 0], 0.0, 1.0, False)]
    for t, action in enumerate(actions, start=1):
        target = tuple(np.add(place, MOVES[int(action)]))
        reward = 0.0
        if t > 1:
            if drawn[target[0]][target[1]] == "#":
                reward = -options.bump_penalty
            else:
                place = target
        sight = drawn[place[0]][place[1]]
        terminated = sight == "N"
        if terminated:
            reward = options.correct_reward if (place[0] == 0) == (cue == 1) else options.wrong_reward
        last = terminated or t == limit(options)
        rows.append(([0, sight == "S", sight == ".", sight == "J"], np.float32(reward), not terminated, last))
        if last:
            return rows
    return rows


def start(length, cue):
    """A batch of first states."""
    zeros = np.zeros(len(length), np.int32)
    return TMazeState(zeros, np.array(length, np.int32), np.array(cue, np.int32), zeros, zeros)


def returns(transitions):
    """The sum of rewards [B] up to and including the first last row, and its index."""
    end = np.argmax(transitions.last, axis=1)
    assert transitions.last[np.arange(len(end)), end].all()
    return np.sum(transitions.reward * (np.arange(transitions.last.shape[1]) <= end[:, None]), axis=1), end


def random_actions(rng, options, num_episodes):
    return rng.choice(4, (num_episodes, limit(options)), p=[0.15, 0.5, 0.15, 0.2])


@pytest.mark.parametrize("options", OPTIONS)
def test_every_row_follows_the_rules(options):
    rng = np.random.default_rng(0)
    actions = random_actions(rng, options, 300)
    length = rng.integers(options.min_length, options.max_length + 1, 300)
    cue = rng.choice([-1, 1], 300)
    observations, transitions = play(TMaze(options), start(length, cue), actions)
    ends = set()
    for i in range(300):
        rows = oracle(options, length[i], cue[i], actions[i])
        for t, (observation, reward, discount, last) in enumerate(rows):
            np.testing.assert_array_equal(observations[i, t], observation)
            if t > 0:
                assert [x[i, t - 1] for x in transitions[:3]] == [reward, discount, last]
        ends.add((float(rows[-1][1]), len(rows) - 1 == limit(options), rows[-1][2]))
    assert len(ends) >= 3  # right, wrong and too late all happened


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_the_optimum_takes_the_cue_and_nothing_else_will_do(options):
    length, cue = (x.reshape(-1) for x in np.meshgrid(range(options.min_length, options.max_length + 1), [-1, 1]))
    actions = np.full((len(length), limit(options)), EAST)
    actions[np.arange(len(length)), length + 1] = np.where(cue == 1, NORTH, SOUTH)
    for sign, expected in ((1, options.correct_reward), (-1, options.wrong_reward)):
        total, end = returns(play(TMaze(options), start(length, sign * cue), actions)[1])
        np.testing.assert_array_equal(total, np.float32(expected))
        np.testing.assert_array_equal(end + 1, length + 2)


def test_nothing_but_the_first_observation_and_the_reward_of_a_turn_depends_on_the_cue():
    """An agent without memory earns 0 for this reason: the two rewards cancel, whatever it does at the sign."""
    options, rng = TMazeOptions(), np.random.default_rng(1)
    actions, length = random_actions(rng, options, 500), rng.integers(5, 11, 500)
    others = actions.copy()
    others[:, 0] = rng.integers(0, 4, 500)
    one, ones = play(TMaze(options), start(length, [1] * 500), actions)
    two, twos = play(TMaze(options), start(length, [-1] * 500), others)
    total, end = returns(ones)
    until = np.arange(limit(options)) <= end[:, None]
    np.testing.assert_array_equal(one[:, 1:][until], two[:, 1:][until])
    np.testing.assert_array_equal(ones.last[until], twos.last[until])
    np.testing.assert_array_equal(ones.reward[until], -twos.reward[until])
    assert set(total) == {-1, 0, 1}
    np.testing.assert_array_equal(one[:, 0] - two[:, 0], [[2, 0, 0, 0]] * 500)


def test_lengths_and_cues_are_uniform_and_independent():
    states = jax.jit(jax.vmap(TMaze().reset))(jax.random.split(jax.random.key(0), 12_000))
    found, counts = np.unique(np.column_stack([states.length, states.cue]), axis=0, return_counts=True)
    np.testing.assert_array_equal(found, [(length, cue) for length in range(5, 11) for cue in (-1, 1)])
    np.testing.assert_allclose(counts, 1000, atol=160)  # 5 standard deviations
    for x in (states.num_steps, states.column, states.arm):
        assert not np.any(x)


def test_the_time_limit_truncates_and_a_turn_at_the_limit_terminates():
    options = TMazeOptions(2, 2, max_steps=4)
    actions = [[EAST, EAST, EAST, NORTH], [EAST, EAST, EAST, EAST]]
    transitions = play(TMaze(options), start([2, 2], [1, 1]), actions)[1]
    np.testing.assert_array_equal(transitions.last, [[False, False, False, True]] * 2)
    np.testing.assert_array_equal(transitions.discount, [[1, 1, 1, 0], [1, 1, 1, 1]])
    transitions = play(TMaze(TMazeOptions()), start([5], [1]), [[WEST] * 40])[1]
    np.testing.assert_array_equal(transitions.last[0], np.arange(1, 41) == 40)
    assert (transitions.discount == 1).all()
    assert TMaze().spec.max_episode_steps == 40


@pytest.mark.slow  # others of its options are quick: tests/envs/test_conformance.py
@pytest.mark.parametrize("options", OPTIONS[1:3])
def test_conforms(options):
    validate_protocol(TMaze(options))
    check_environment(TMaze(options), episodes=3)


def test_the_picture_shows_agent_arms_and_sign():
    render = jax.jit(TMaze().render)

    def picture(num_steps, cue, column=0, arm=0):
        state = TMazeState(*(np.int32(x) for x in (num_steps, 7, cue, column, arm)))
        return np.asarray(render(state)).reshape(3, 32, 11, 32, 3).transpose(0, 2, 1, 3, 4)  # [row, column, y, x, 3]

    one, two = picture(0, 1), picture(3, -1, 2)
    assert one.dtype == np.uint8
    assert (one[0, 7] != one[2, 7]).any()
    np.testing.assert_array_equal(one[[0, 2], 7], two[[2, 0], 7])
    np.testing.assert_array_equal(one[1, 0, 16, 16], two[1, 2, 16, 16])  # the agent
    np.testing.assert_array_equal(one[1, 0, 16, 16], picture(9, 1, 7, -1)[2, 7, 16, 16])
    assert (one[1, 0, 0, 0] != two[1, 0, 0, 0]).any()  # the sign
    np.testing.assert_array_equal(one[1, 8], one[0, 0])  # rock beyond the junction


BAD = [
    *[("min_length", 0), ("min_length", 1.0), ("max_length", 4), ("max_length", True), ("max_steps", 11)],
    *[("max_steps", 20.0), ("correct_reward", 0), ("correct_reward", "1"), ("wrong_reward", 1.0)],
    *[("wrong_reward", float("nan")), ("bump_penalty", -0.1), ("bump_penalty", None)],
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^TMazeOptions\({field}={value!r}\): use "):
        TMazeOptions(**{field: value})
