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
