"""Games and human-normalised scores against what papers print."""

import numpy as np
import pytest

from podracer import atari
from podracer.atari import games, published

ATARI_100K = """
Alien 227.8 7127.7 1140 | Amidar 5.8 1719.5 101.9 | Assault 222.4 742 1407 | Asterix 210 8503.3 16844
BankHeist 14.2 753.1 361.9 | BattleZone 2360 37187.5 17938 | Boxing .1 12.1 44.1 | Breakout 1.7 30.5 406.5
ChopperCommand 811 7387.8 1794 | CrazyClimber 10780.5 35829.4 80125 | DemonAttack 152.1 1971 13298 | Freeway 0 29.6 21.8
Frostbite 65.2 4334.7 313.8 | Gopher 257.6 2412.5 3518 | Hero 1027 30826.4 8530 | Jamesbond 29 302.8 459.4
Kangaroo 52 3035 962 | Krull 1598 2665.5 6047 | KungFuMaster 258.5 22736.3 31112 | MsPacman 307.3 6951.6 1387
Pong -20.7 14.6 20.6 | PrivateEye 24.9 69571.3 100 | Qbert 163.9 13455 15458 | RoadRunner 11.5 7845 18512
Seaquest 68.4 42054.7 1020 | UpNDown 533.4 11693.2 16096
"""
"""Random, human and EfficientZero's score on Atari 100k, as papers on it print them; its mean is 1.904 and its median
1.160 (Ye et al. 2021, table 1)."""

DMLAB30 = """
rooms_collect_good_objects_test 10.0 0.1 9.0 5.8 | rooms_exploit_deferred_effects_test 85.7 8.5 15.6 11.0
rooms_select_nonmatching_object 65.9 0.3 7.3 26.1 | rooms_watermaze 54.0 4.1 26.9 31.1
rooms_keys_doors_puzzle 53.8 4.1 28.0 24.3 | language_select_described_object 389.5 -0.1 324.6 593.1
language_select_located_object 280.7 1.9 189.0 301.7 | language_execute_random_task 254.1 -5.9 -49.9 66.8
language_answer_quantitative_question 184.5 -0.3 219.4 264.0 | lasertag_one_opponent_large 12.7 -0.2 -0.2 0.3
lasertag_three_oponents_large 18.6 -0.2 -0.1 4.1 | lasertag_one_opponent_small 18.6 -0.1 -0.1 2.5
lasertag_three_opponents_small 31.5 -0.1 19.1 11.3 | natlab_fixed_large_map 36.9 2.2 34.7 12.2
natlab_varying_map_regrowth 24.4 3.0 20.7 15.9 | natlab_varying_map_randomized 42.4 7.3 36.1 29.0
skymaze_irreversible_path_hard 100.0 0.1 13.6 30.0 | skymaze_irreversible_path_varied 100.0 14.4 45.1 53.6
pyschlab_arbitrary_visuomotor_mapping 58.8 0.2 16.4 14.3 | pyschlab_continuous_recognition 58.3 0.2 29.9 29.9
pyschlab_sequential_comparison 39.5 0.1 0.0 0.0 | pyschlab_visual_search 78.5 0.1 0.0 0.0
explore_object_locations_small 74.5 3.6 57.8 62.6 | explore_object_locations_large 65.7 4.7 37.0 51.1
explore_obstructed_goals_small 206.0 6.8 135.2 188.8 | explore_obstructed_goals_large 119.5 2.6 39.5 71.0
explore_goal_locations_small 267.5 7.7 209.4 252.5 | explore_goal_locations_large 194.5 3.1 83.1 125.3
explore_object_rewards_few 77.7 2.1 39.8 43.2 | explore_object_rewards_many 106.7 2.4 58.7 62.6
"""
"""Human, random, experts' and one agent's score on the 30 tasks of DeepMind Lab (Espeholt et al. 2018, table B.1)."""


def test_games_are_envpools():
    envpool = pytest.importorskip("envpool")
    assert {f"{game}-v5" for game in atari.GAMES57} <= set(envpool.list_all_envs())
    assert [len(set(some)) for some in (atari.GAMES57, atari.NATURE49, atari.GAMES26)] == [57, 49, 26]
    missing = set(atari.GAMES57) - set(atari.NATURE49)
    assert missing == {"Berzerk", "Defender", "Phoenix", "Pitfall", "Skiing", "Solaris", "Surround", "YarsRevenge"}
    assert set(atari.GAMES26) < set(atari.NATURE49)


def test_the_table_is_that_of_atari_100k():
    rows = [row.split() for line in ATARI_100K.strip().splitlines() for row in line.split(" | ")]
    assert [game for game, *_ in rows] == list(atari.GAMES26)
    for game, random, human, _ in rows:
        assert games.ATARI57[game] == (float(random), float(human))
    assert {game: float(score) for game, *_, score in rows} == published.by_name("EfficientZero")


@pytest.mark.parametrize(
    ("name", "mean", "median"),
    [
        ("SimPLe", 0.443, 0.144),
        ("MuZero", 0.562, 0.227),
        ("EfficientZero", 1.904, 1.160),
        ("EfficientZero-v2", 1.943, 1.090),
        ("SpeedyZero", 1.483, 1.011),
        ("SpeedyZero-300k", 2.915, 1.113),
        ("SpeedyZero-300k-35min", 2.594, 0.520),
        ("BBF", 2.247, 0.917),
    ],
)
def test_published_scores_come_to_what_papers_print(name, mean, median):
    scores = [atari.human_normalised(game, score) for game, score in published.by_name(name).items()]
    assert len(scores) == 26
    assert (np.mean(scores), np.median(scores)) == pytest.approx((mean, median), abs=1e-3)


def test_scores_are_normalised_as_papers_do():
    """By their own tables, of which none is taken for the other."""
    assert atari.human_normalised("envpool:Pong-v5", 14.6) == pytest.approx(1.0)
    assert atari.human_normalised("Pong", -20.7) == 0.0
    assert atari.human_normalised("Pong", 9.3, table="nature") == pytest.approx(1.0)
    # Daley and Amato 2021, table 4, last columns: DQN by Nature's human.
    for game, score, norm in (("Breakout-v5", 401.2, 13.272), ("Hero", 19950, 0.765), ("Krull", 3805, 2.769)):
        assert atari.human_normalised(game, score, table="nature") == pytest.approx(norm, abs=2e-3)
        assert atari.human_normalised(game, score) != pytest.approx(norm, abs=2e-2)


def test_capped_scores_come_to_table_b1():
    """The paper prints 44.5% and 49.4%, of scores that it does not round."""
    rows = [row.split()[1:] for line in DMLAB30.strip().splitlines() for row in line.split(" | ")]
    human, random, experts, impala = np.array(rows, float).T
    assert len(rows) == 30
    for returns, mean in ((experts, 0.444), (impala, 0.493), (human, 1.0), (random, 0.0)):
        assert atari.capped_scores(returns, random, human).mean() == pytest.approx(mean, abs=5e-4)
    # Experts are below random play in one task, which counts less than 0.
    assert atari.capped_scores(experts, random, human).min() < -0.15


@pytest.mark.parametrize(
    ("game", "table", "message"),
    [
        ("Pnog", "atari57", "'Pnog' is no game of Atari-57; did you mean 'Pong'?"),
        ("Pitfall-v5", "nature", "Pitfall is not among the 49 games of table='nature'; use 'atari57'."),
        ("Pong", "natur", "table='natur': unknown; did you mean 'nature'?"),
    ],
)
def test_unknown_games_and_tables_are_refused(game, table, message):
    with pytest.raises(ValueError, match=message):
        atari.human_normalised(game, 1.0, table)
