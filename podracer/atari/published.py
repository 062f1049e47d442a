"""Scores from papers, to compare with one's own (`podracer suite report --against`)."""

from __future__ import annotations

from podracer import configs

_COLUMNS = (
    "SimPLe",
    "MuZero",
    "EfficientZero",
    "EfficientZero-v2",
    "SpeedyZero",
    "SpeedyZero-300k",
    "SpeedyZero-300k-35min",
    "BBF",
)

# fmt: off
_ROWS: dict[str, tuple[float, ...]] = {
    "Alien":          (  616.9,     530,    1140,   808.5,     718,    1058,   627.3,    1173),
    "Amidar":         (     88,    38.8,   101.9,   148.6,    86.1,   153.5,    85.8,   244.6),
    "Assault":        (  527.2,   500.1,    1407,    1263,   952.5,    1129,    1241,    2098),
    "Asterix":        (   1128,    1734,   16844,   25558,   11019,  177143,  124148,    3946),
    "BankHeist":      (   34.2,   192.5,   361.9,     351,   228.6,   239.5,   166.7,   732.9),
    "BattleZone":     (   5184,    7688,   17938,   13871,    7438,    9930,   10873,   24460),
    "Boxing":         (    9.1,    15.1,    44.1,    52.7,      29,    28.1,    33.7,    85.8),
    "Breakout":       (   16.4,      48,   406.5,   414.1,   371.1,   404.1,   401.1,   370.6),
    "ChopperCommand": (   1247,    1350,    1794,    1117,    1255,    1168,     935,    7549),
    "CrazyClimber":   (  62584,   56937,   80125,   83940,   82106,  107975,  113583,   58432),
    "DemonAttack":    (  208.1,    3527,   13298,   13004,    9098,   26023,   25603,   13341),
    "Freeway":        (   20.3,    21.8,    21.8,    21.8,     7.1,    10.7,       0,    25.5),
    "Frostbite":      (  254.7,     255,   313.8,   296.3,   262.6,   831.4,   406.5,    2385),
    "Gopher":         (    771,    1256,    3518,    3260,    2600,    4108,    3908,    1331),
    "Hero":           (   2657,    3095,    8530,    9316,    6002,    5651,    7602,    7819),
    "Jamesbond":      (  125.3,    87.5,   459.4,     517,   340.1,   342.3,   169.5,    1130),
    "Kangaroo":       (  323.1,    62.5,     962,   724.1,   428.7,   542.5,    1403,    6615),
    "Krull":          (   4540,    4891,    6047,    5663,    5855,    6388,    7677,    8223),
    "KungFuMaster":   (  17257,   18813,   31112,   30945,   22170,   29132,   30965,   18992),
    "MsPacman":       (   1480,    1266,    1387,    1281,    1587,    3296,    2685,    2008),
    "Pong":           (   12.8,    -6.7,    20.6,    20.1,    16.3,    17.5,      15,    16.7),
    "PrivateEye":     (   58.3,    56.3,     100,    96.7,    29.7,    33.3,       0,    40.5),
    "Qbert":          (   1289,    3952,   15458,   13782,   14467,   16043,   14205,    4447),
    "RoadRunner":     (   5641,    2500,   18512,   17751,    8496,   25368,   17235,   33427),
    "Seaquest":       (  683.3,     208,    1020,    1100,   530.7,    1312,   901.6,    1232),
    "UpNDown":        (   3350,    2897,   16096,   17264,   12383,   22532,    6411,   12102),
}
# fmt: on

ATARI_100K: dict[str, dict[str, float]] = {
    name: {game: row[column] for game, row in _ROWS.items()} for column, name in enumerate(_COLUMNS)
}
"""Means over seeds of whole games after 100,000 steps, by method and game; for `SpeedyZero-300k` and `-300k-35min`
after 300,000.

SimPLe (Kaiser et al. 2020), MuZero and EfficientZero (Ye et al. 2021), EfficientZero-v2 (the second version of that
paper, arXiv 2111.00210), SpeedyZero (Mei et al. 2023: 50 minutes; its last column 35), BBF (Schwarzer et al. 2023)."""


def by_name(name: str) -> dict[str, float]:
    """The scores of a method, by game.

    Raises:
      ValueError: for an unknown name, with the nearest ones.
    """
    if name not in ATARI_100K:
        raise ValueError(f"no scores of {name!r} are known; {configs.suggest(name, ATARI_100K)}")
    return ATARI_100K[name]
