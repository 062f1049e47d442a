"""Protocols against papers' tables, and what EnvPool makes of them."""

import numpy as np
import pytest

pytest.importorskip("envpool")

from podracer import atari, environments, spaces
from podracer.environments.envpool import AtariOptions

FIRE = 1

# Life ends in training, actions, sticky, no-ops and then FIRE, caps in frames of training and evaluation; epsilon,
# games and frames between evaluations; figure.
TABLE = {
    "nature": (True, "minimal", 0.0, (1, 30), False, 108_000, 18_000, 0.05, 30, 1_000_000, "best"),
    "fast_dqn": (True, "minimal", 0.0, (0, 29), True, 108_000, 108_000, 0.05, 30, 1_000_000, "best"),
    "dqn_zoo": (True, "minimal", 0.0, (1, 30), False, 108_000, 108_000, None, 30, 1_000_000, "final"),
    "machado": (False, "all", 0.25, (1, 1), False, 18_000, 18_000, 0.01, None, None, "last_100"),
    "dopamine": (False, "minimal", 0.25, (1, 1), False, 108_000, 108_000, 0.01, None, None, "each_million"),
    "seed": (False, "all", 0.0, (1, 30), False, 108_000, 108_000, 1e-3, 200, 40_000_000_000, "final"),
    "impala": (True, "minimal", 0.0, (1, 30), False, 108_000, 108_000, None, 200, None, "final"),
    "atari100k": (True, "minimal", 0.0, (1, 30), False, 12_000, 108_000, 0.0, 100, None, "final"),
    "ppo": (True, "minimal", 0.0, (0, 29), True, 108_000, 108_000, None, None, None, "last_100"),
}


@pytest.mark.parametrize("name", TABLE)
def test_protocols_are_the_papers(name):
    protocol = atari.protocol(name)
    options = AtariOptions(**protocol.env)
    least = 0 if options.fire_reset else 1
    cap = options.max_episode_steps * 4
    found = (
        options.episodic_life,
        "all" if options.full_action_space else "minimal",
        options.sticky_actions,
        (least, options.noop_max - 1 + least),
        options.fire_reset,
        cap,
        (options.evaluation_max_episode_steps or cap // 4) * 4,
        *(protocol.epsilon, protocol.episodes, protocol.every, protocol.figure),
    )
    assert found == TABLE[name]
    assert options.frame_skip == 4
    assert options.resize == ("bilinear" if name == "seed" else "area")


def test_what_protocols_set():
    assert set(atari.PROTOCOLS) == set(TABLE)
    assert atari.protocol("nature").run == {"total_steps": 50_000_000, "eval_every": 250_000, "eval_episodes": 30}
    assert atari.protocol("atari100k").run == {"total_steps": 100_000, "eval_every": 100_000, "eval_episodes": 100}
    assert atari.protocol("machado").run == {"total_steps": 50_000_000, "eval_every": 50_000_000}
    assert atari.protocol("seed").run == {"eval_every": 10_000_000_000, "eval_episodes": 200}
    explores = {"evaluation_epsilon": 0.5, "epsilon_final": 0.1}
    assert atari.protocol("nature").agent(explores) == {"evaluation_epsilon": 0.05}
    assert atari.protocol("dopamine").agent(explores) == {"evaluation_epsilon": 0.01, "epsilon_final": 0.01}
    assert atari.protocol("dopamine").agent({"epsilon_final": 0.0}) == {}
    assert atari.protocol("impala").agent(explores) == {}
    by_nature = {name for name, protocol in atari.PROTOCOLS.items() if protocol.table == "nature"}
    assert by_nature == {"nature", "fast_dqn"}, "what is compared with Mnih et al. 2015"
    assert all(set(protocol.games) <= set(atari.games.TABLES[protocol.table]) for protocol in atari.PROTOCOLS.values())
    with pytest.raises(ValueError, match="protocol='machao': unknown; did you mean 'machado'?"):
        atari.protocol("machao")


def memories(game, lanes, actions, **options):
    """The console's memory in every row of every lane, for actions [T, B] of one frame each: a list of T + 1 lists."""
    source = environments.make(f"envpool:{game}-v5", num_threads=1, frame_skip=1, **options)
    pool = source._pool(lanes, 0, False)
    infos = [pool.reset()[1]] + [pool.step(np.int32(row))[-1] for row in actions]
    return [[memory.tobytes() for memory in info["ram"]] for info in infos]


@pytest.mark.parametrize("game", ["Pong", pytest.param("Freeway", marks=pytest.mark.slow)])
def test_what_games_open_with(game):
    """1 to `noop_max` no-ops; with FIRE, 0 to `noop_max - 1` and then it, in games that have it (Freeway has not)."""
    most, lanes = 2, 8
    plays = (np.arange(most)[:, None] == np.arange(most)).astype(np.int32) * FIRE  # lane n: n no-ops, then FIRE
    rows = memories(game, most, plays, noop_max=1)
    idle = {rows[n][n]: n + 1 for n in range(most)}  # by no-ops, of which the first is the pool's
    fired = {rows[n + 1][n]: n + 1 for n in range(most)}
    (opened,) = memories(game, lanes, [], noop_max=most)
    assert {idle.get(memory) for memory in opened} == set(range(1, most + 1))
    (opened,) = memories(game, lanes, [], noop_max=most, fire_reset=True)
    if game == "Freeway":
        assert {idle.get(memory) for memory in opened} == set(range(1, most + 1))
    else:
        # FIRE in the very first frame is what no lane above could play: None.
        assert {fired.get(memory) for memory in opened} == {None, *range(1, most)}


def test_evaluation_has_its_own_time_limit():
    source = environments.make("envpool:Pong-v5", max_episode_steps=30, evaluation_max_episode_steps=50, noop_max=1)
    assert source.spec.max_episode_steps == 50
    for evaluation, limit in ((False, 30), (True, 50)):
        environment = source.make(1, 0, evaluation=evaluation)
        lanes, step = environment.recv()
        steps = 0
        while not step.timestep.last[0]:
            environment.send(lanes, np.zeros(1, np.int32))
            lanes, step = environment.recv()
            steps += 1
        assert steps == limit
        assert step.timestep.discount[0] == 1.0
    shorter = environments.make("envpool:Pong-v5", evaluation_max_episode_steps=50)
    assert shorter.spec.max_episode_steps == 27_000, "that of the longer games, of training"


def test_ways_to_resize_and_all_actions():
    """Averages keep the mean of what they are made of."""
    for resize in ("area", "bilinear"):
        source = environments.make("envpool:Breakout-v5", noop_max=1, resize=resize, full_action_space=True)
        assert source.spec.action_space == spaces.Discrete(18)
        environment = source.render(0)
        small = environment.recv()[1].timestep.observation
        grey = environment.frame().astype(np.float32) @ np.float32([0.299, 0.587, 0.114])
        assert (abs(small.mean() - grey.mean()) < 0.1) == (resize == "area")
