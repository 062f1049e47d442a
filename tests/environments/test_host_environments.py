"""Host environments keep the trajectory contract, whatever their makers meant by a reset."""

import itertools

import gymnasium
import jax
import numpy as np
import pytest

from podracer import environments, spaces
from podracer.environments import envpool, envpool_drawing, gate, gymnasium_spaces
from podracer.environments.envpool import AtariOptions
from podracer.environments.seeds import first_seed
from podracer.system import machine
from podracer.types import EnvSpec, HostStep


def rollout(environment, length, choose):
    """Rows [length + 1] of a running environment, each a HostStep; `choose(t, step)` gives actions."""
    lanes, step = environment.recv()
    steps = [step]
    for t in range(length):
        environment.send(lanes, choose(t, step))
        lanes, step = environment.recv()
        np.testing.assert_array_equal(lanes, np.arange(step.timestep.reward.shape[0]))
        steps.append(step)
    environment.close()
    return steps


def at_random(space, lanes):
    """`choose` for `rollout`: random actions of all lanes."""
    rng = np.random.default_rng(0)

    def choose(t, step):
        if isinstance(space, spaces.Discrete):
            return rng.integers(0, space.num_values, lanes, np.int32)
        return rng.uniform(space.low, space.high, (lanes, *space.shape)).astype(np.float32)

    return choose


def test_pools_share_the_cores(monkeypatch):
    """The cores are those that this process may use."""
    threads = {}
    for cores in (1, 2, 4, 5, 16, 64):
        monkeypatch.setattr(machine, "num_cores", lambda cores=cores: cores)
        threads[cores] = [envpool._cores(pools) for pools in (1, 2, 100)]
    assert threads == {1: [1] * 3, 2: [2] * 3, 4: [4] * 3, 5: [3, 1, 1], 16: [14, 7, 1], 64: [62, 31, 1]}
    monkeypatch.setattr(machine, "num_cores", lambda: 6)
    source = environments.make("envpool:CartPole-v1")
    used = [s._pool(8, 0, False).config["num_threads"] for s in (source, source.shared_by(2), source)]
    assert used == [4, 2, 4]


def check_rows(spec: EnvSpec, steps):
    """Dtypes, shapes, and NEXT_STEP resets."""
    rows = [step.timestep for step in steps]
    B = rows[0].reward.shape[0]
    for row in rows:
        assert (row.reward.dtype, row.discount.dtype) == (np.float32, np.float32)
        assert (row.first.dtype, row.last.dtype) == (bool, bool)
        assert row.reward.shape == row.discount.shape == row.first.shape == row.last.shape == (B,)
        assert not np.any(row.first & row.last)
        assert np.all(row.reward[row.first] == 0)
        assert np.all(row.discount[row.first] == 1)
        assert np.all(row.last | (row.discount == 1))
        for lane in range(B):
            value = jax.tree.map(lambda x, lane=lane: x[lane], row.observation)
            assert spec.observation_space.contains(value), "an observation outside its space"
    assert rows[0].first.all()
    for before, after in itertools.pairwise(rows):
        np.testing.assert_array_equal(after.first, before.last)


NAMES = ("envpool:CartPole-v1", "gymnasium:CartPole-v1")


@pytest.mark.parametrize("name", NAMES)
def test_cartpole(name):
    """Both makers: deaths have discount 0, time limits discount 1, and every transition is rewarded 1."""
    source = environments.make(name, max_episode_steps=12)
    assert source.spec.action_space == spaces.Discrete(2)
    assert source.spec.max_episode_steps == 12

    # Lane 0 falls by always pushing; the others balance by pushing where the pole leans.
    def choose(t, step):
        lean = (step.timestep.observation[:, 2] > 0).astype(np.int32)
        lean[0] = 1
        return lean

    steps = rollout(source.make(4, 3), 60, choose)
    check_rows(source.spec, steps)
    deaths = sum(int((s.timestep.last & (s.timestep.discount == 0)).sum()) for s in steps)
    limits = sum(int((s.timestep.last & (s.timestep.discount == 1)).sum()) for s in steps)
    assert deaths >= 3
    assert limits >= 3
    rewards = {float(r) for s in steps for r in s.timestep.reward[~s.timestep.first]}
    assert rewards == {1.0}
    lengths, t = [], 0
    for s in steps[1:]:
        t = 0 if s.timestep.first[3] else t + 1
        if s.timestep.last[3]:
            lengths.append(t)
    assert lengths[0] == 12, "the step limit counts transitions, not resets"


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_callers(name):
    """Returned rows are not written to again."""
    environment = environments.make(name).make(2, 0)
    lanes, step = environment.recv()
    kept = step.timestep.observation.copy()
    for _ in range(5):
        environment.send(lanes, np.zeros(2, np.int32))
        environment.recv()
    np.testing.assert_array_equal(step.timestep.observation, kept)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_decide_the_rows(name):
    source = environments.make(name)

    def play(seed):
        steps = rollout(source.make(3, seed), 30, lambda t, step: np.full(3, t % 2, np.int32))
        return np.stack([step.timestep.observation for step in steps])

    one, again, other = play(5), play(5), play(6)
    np.testing.assert_array_equal(one, again)
    # Lane i has seed + i: neighbours share all but one stream, which is why callers give disjoint ranges.
    np.testing.assert_array_equal(one[:, 1:], other[:, :-1])
    assert np.any(one[0] != other[0])


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_checked(name):
    environment = environments.make(name).make(2, 0)
    lanes, _ = environment.recv()
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"are not in Discrete\(num_values=2\)"):
            environment.send(lanes, np.asarray(wrong))


def test_atari_games_and_lives():
    """A lost life ends an episode in training, not in evaluation; the raw score is that of whole games."""
    options = AtariOptions(episodic_life=True, max_episode_steps=400)
    source = environments.make("envpool:Breakout-v5", episodic_life=True, max_episode_steps=400)
    assert isinstance(options, AtariOptions)
    assert source.spec.observation_space == spaces.Box(0, 255, (84, 84), np.uint8)
    press = lambda t, step: np.full(2, 1 if t % 8 == 0 else 2 + t % 2, np.int32)  # fire, then move  # noqa: E731
    training = rollout(source.make(2, 1), 450, press)
    check_rows(source.spec, training)
    ends = sum(int(s.timestep.last.sum()) for s in training)
    games = sum(int(s.game_over.sum()) for s in training)
    assert ends > games >= 1
    assert all(np.all(s.timestep.last[s.game_over]) for s in training)
    evaluation = rollout(source.make(2, 1, evaluation=True), 450, press)
    assert all(np.array_equal(s.timestep.last, s.game_over) for s in evaluation)
    assert sum(float(s.raw_reward.sum()) for s in training) > 0


@pytest.mark.slow
def test_a_game_over_on_the_step_limit_is_a_termination():
    """EnvPool calls it truncated; its info knows better. The limit is set to where the game ends by itself."""
    play = lambda limit: rollout(  # noqa: E731
        environments.make("envpool:Pong-v5", max_episode_steps=limit, noop_max=1).make(1, 0),
        1200,
        lambda t, step: np.zeros(1, np.int32),
    )
    free = play(27000)
    over = next(t for t, s in enumerate(free) if s.timestep.last[0])
    assert free[over].timestep.discount[0] == 0
    on_limit = play(over)[over].timestep
    assert on_limit.last[0]
    assert on_limit.discount[0] == 0
    before = play(over - 1)[over - 1].timestep
    assert before.last[0]
    assert before.discount[0] == 1


@pytest.mark.parametrize(
    ("name", "settings", "observation", "action"),
    [
        ("envpool:MiniGrid-MemoryS7-v0", {}, spaces.Dict, spaces.Discrete),
        ("envpool:Maze-v0", {}, spaces.Dict, spaces.Discrete),  # names within names
        pytest.param(
            "envpool:SpotGetup-v1", {}, spaces.Box, spaces.Box, marks=pytest.mark.slow
        ),  # one name, which is no name
        ("envpool:HalfCheetah-v4", {}, spaces.Box, spaces.Box),
        ("envpool:Pendulum-v1", {}, spaces.Box, spaces.Box),
        pytest.param("envpool:D1Basic-v1", {}, spaces.Box, spaces.Discrete, marks=pytest.mark.slow),
        ("envpool:D1Basic-v1", {"settings": ("force_speed=True",)}, spaces.Box, spaces.Discrete),
        pytest.param(
            "envpool:gfootball/academy_empty_goal_close-v1", {}, spaces.Box, spaces.Discrete, marks=pytest.mark.slow
        ),
        ("envpool:FrozenLake-v1", {}, spaces.Discrete, spaces.Discrete),
        ("gymnasium:Blackjack-v1", {}, None, None),
        ("gymnasium:Acrobot-v1", {}, spaces.Box, spaces.Discrete),
    ],
)
def test_families(name, settings, observation, action):
    if observation is None:
        with pytest.raises(ValueError, match=r"Blackjack-v1 shows observations in Tuple.*not supported"):
            environments.make(name, **settings)
        return
    source = environments.make(name, **settings)
    assert isinstance(source.spec.observation_space, observation)
    assert isinstance(source.spec.action_space, action)
    check_rows(source.spec, rollout(source.make(2, 0), 60, at_random(source.spec.action_space, 2)))


@pytest.mark.parametrize(("task", "limit"), [("Maze-v0", 100), ("RubiksCube-partly-scrambled-v0", 20)])
def test_a_time_limit_that_envpool_reports_as_an_end_truncates(task, limit):
    """By EnvPool's Python and by the direct way."""
    source = environments.make(f"envpool:{task}")
    same = np.zeros((2, *np.shape(source.spec.action_space.num_values)), np.int32)
    rows = [step.timestep for step in rollout(source.make(2, 0), limit, lambda t, step: same)]
    assert [bool(row.last.any()) for row in rows] == [False] * limit + [True], "no task is solved by one action"
    np.testing.assert_array_equal(rows[limit].discount, [1.0, 1.0])


def test_envpools_limits_are_what_episodes_have():
    """Football's is a step more than its setting; LaneKeeping names a limit and never ends."""
    football = environments.make("envpool:gfootball/academy_empty_goal_close-v1", max_episode_steps=20)
    rows = [step.timestep for step in rollout(football.make(1, 0), 22, lambda t, step: np.zeros(1, np.int32))]
    assert football.spec.max_episode_steps == 21 == next(t for t, row in enumerate(rows) if row.last[0])
    assert environments.make("envpool:LaneKeeping-v0").spec.max_episode_steps is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Maze-v0", {"max_episode_steps": 30}, "max_episode_steps has no effect on Maze-v0, whose episodes end by its"),
        ("Jumanji/Maze-v0", {"settings": ("max_episode_steps=30",)}, "has no effect on Jumanji/Maze-v0"),
        ("Catch-v0", {"max_episode_steps": 3}, "max_episode_steps has no effect on Catch-v0"),
        ("TicTacToe-v1", {}, "TicTacToe-v1 of EnvPool has several players, which is not supported; `pgx:` has games"),
    ],
)
def test_what_envpool_would_take_and_not_do_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        environments.make(f"envpool:{name}", **settings)
    environments.make("envpool:Sokoban-v0", max_episode_steps=30)


@pytest.mark.parametrize(
    ("name", "settings", "steps"),
    [
        ("envpool:CartPole-v1", {}, 300),
        ("envpool:CartPole-v1", {"max_episode_steps": 12}, 60),
        ("envpool:Pong-v5", {"max_episode_steps": 40}, 100),
        ("envpool:MiniGrid-MemoryS7-v0", {}, 300),
        ("envpool:HalfCheetah-v4", {"max_episode_steps": 20}, 60),
    ],
)
def test_the_direct_way_shows_what_gymnasium_does(name, settings, steps):
    source = environments.make(name, **settings)
    choose = at_random(source.spec.action_space, 3)
    pools = source.make(3, 7), source.make(3, 7)
    assert isinstance(pools[0]._pool, envpool._DirectPool)
    pools[1]._pool = envpool._Pool(pools[1]._pool.pool)
    ended = 0
    for t in range(steps):
        (_, direct), (_, other) = (pool.recv() for pool in pools)
        jax.tree.map(np.testing.assert_array_equal, direct, other)
        assert jax.tree.map(lambda x: x.dtype, direct) == jax.tree.map(lambda x: x.dtype, other)
        actions = choose(t, direct)
        actions.flags.writeable = False  # as those from a device
        for pool in pools:
            pool.send(None, actions)
        ended += int(direct.timestep.last.sum())
    assert ended >= 3


@pytest.mark.parametrize(("task", "shape"), [("CartPole-v1", (4, 1)), ("HalfCheetah-v4", (4,)), ("Pong-v5", (3,))])
def test_actions_of_the_wrong_shape(task, shape):
    source = environments.make(f"envpool:{task}")
    pool = source.make(4, 0)
    pool.recv()
    dtype = np.int32 if isinstance(source.spec.action_space, spaces.Discrete) else np.float32
    with pytest.raises(ValueError, match=r"actions have shape \(.*\), not \(4,"):
        pool.send(None, np.zeros(shape, dtype))


def test_minigrid_shows_codes():
    source = environments.make("envpool:MiniGrid-MemoryS7-v0")
    image = dict(source.spec.observation_space.items)["image"]
    assert image == spaces.Box(0, 10, (7, 7, 3), np.uint8)


def test_spaces():
    box, discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete
    of = gymnasium_spaces.observation_space
    assert of(box(-1.0, 2.0, (3,), np.float64), "x") == spaces.Box(-1, 2, (3,), np.float32)
    assert of(box(0, 255, (1, 84, 84), np.uint8), "x") == spaces.Box(0, 255, (84, 84), np.uint8)
    assert of(box(0, 255, (3, 60, 80), np.uint8), "x") == spaces.Box(0, 255, (60, 80, 3), np.uint8)
    assert of(box(0, 255, (60, 80, 3), np.uint8), "x") == spaces.Box(0, 255, (60, 80, 3), np.uint8)
    assert of(gymnasium.spaces.MultiBinary(5), "x") == spaces.Box(0, 1, (5,), np.int8)
    with pytest.raises(ValueError, match=r"x\['b'\] shows observations in Text"):
        of(gymnasium.spaces.Dict({"a": discrete(2), "b": gymnasium.spaces.Text(3)}), "x")
    act = gymnasium_spaces.action_space
    assert act(gymnasium.spaces.MultiDiscrete([2, 3]), "x") == spaces.MultiDiscrete((2, 3))
    lowest, highest = np.array([0, -1], np.float32), np.array([1, np.inf], np.float32)
    assert act(box(lowest, np.ones(2, np.float32)), "x") == spaces.Box((0.0, -1.0), 1.0, (2,))
    assert act(box(-2.0, 2.0, (3,), np.float64), "x") == spaces.Box(-2.0, 2.0, (3,))
    for wrong in (box(-np.inf, np.inf, (2,)), box(lowest, highest), box(0, 1e308, (3,), np.float64)):
        with pytest.raises(ValueError, match="x takes actions in Box.*finite bounds"):
            act(wrong, "x")


def test_images_move_their_channels():
    image = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    moved = gate.to_agent(image, spaces.Box(0, 255, (4, 5, 3), np.uint8), (2,))
    np.testing.assert_array_equal(moved[1, 2, 3], image[1, :, 2, 3])
    grey = gate.to_agent(image[:, :1], spaces.Box(0, 255, (4, 5), np.uint8), (2,))
    np.testing.assert_array_equal(grey, image[:, 0])


def test_seeds_of_uses_are_apart():
    firsts = [
        first_seed(seed, use, restart) for seed in range(20) for use in ("training", "evaluation") for restart in (0, 7)
    ]
    assert len(set(firsts)) == len(firsts)
    gaps = np.diff(sorted(firsts))
    assert gaps.min() > 4096, "two uses share lanes"
    assert max(firsts) < 2**30


def test_a_first_row_carries_no_reward():
    """The environment's reward of the step in which it reset does not matter."""
    first, terminated = np.array([True, False, False]), np.array([False, True, False])
    row = HostStep.of(np.zeros(3), np.array([7.0, 7.0, 7.0]), terminated, first, terminated).timestep
    np.testing.assert_array_equal(row.reward, np.array([0, 7, 7], np.float32))
    np.testing.assert_array_equal(row.discount, np.array([1, 0, 1], np.float32))
    assert row.reward.dtype == row.discount.dtype == np.float32


# Pictures


def test_pictures_that_would_end_the_process_are_refused(monkeypatch):
    """MuJoCo calls exit() where there is no OpenGL: that is found out in another process."""
    made = environments.make("envpool:Hopper-v5")
    monkeypatch.setattr(
        envpool_drawing, "DRAW", "import sys; print('ERROR: no OpenGL, this most likely means'); sys.exit(1)"
    )
    envpool_drawing.problem.cache_clear()
    with pytest.raises(
        ValueError, match=r"envpool:Hopper-v5 cannot be rendered here \(no OpenGL\): .* needs the system's EGL"
    ):
        made.render(0)
    envpool_drawing.problem.cache_clear()
    monkeypatch.setattr(envpool_drawing, "DRAW", "raise SystemExit(3)")
    assert envpool_drawing.problem("Hopper-v5") == "exit code 3"
    envpool_drawing.problem.cache_clear()


@pytest.mark.slow
def test_mujocos_pictures_need_no_display():
    made = environments.make("envpool:Hopper-v5")
    try:
        shown = made.render(0)
    except ValueError as error:
        pytest.skip(str(error))
    shown.recv()
    assert shown.frame().shape == (480, 480, 3)
    assert shown.frame().std() > 10
    shown.close()
