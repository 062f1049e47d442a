"""The games of Atari that papers report, by EnvPool's names, with the scores of random play and of a human."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from podracer import configs

Table = Literal["nature", "atari57"]

NATURE: dict[str, tuple[float, float]] = {
    "Alien": (227.8, 6875.0),
    "Amidar": (5.8, 1676.0),
    "Assault": (222.4, 1496.0),
    "Asterix": (210.0, 8503.0),
    "Asteroids": (719.1, 13157.0),
    "Atlantis": (12850.0, 29028.0),
    "BankHeist": (14.2, 734.4),
    "BattleZone": (2360.0, 37800.0),
    "BeamRider": (363.9, 5775.0),
    "Bowling": (23.1, 154.8),
    "Boxing": (0.1, 4.3),
    "Breakout": (1.7, 31.8),
    "Centipede": (2091.0, 11963.0),
    "ChopperCommand": (811.0, 9882.0),
    "CrazyClimber": (10781.0, 35411.0),
    "DemonAttack": (152.1, 3401.0),
    "DoubleDunk": (-18.6, -15.5),
    "Enduro": (0.0, 309.6),
    "FishingDerby": (-91.7, 5.5),
    "Freeway": (0.0, 29.6),
    "Frostbite": (65.2, 4335.0),
    "Gopher": (257.6, 2321.0),
    "Gravitar": (173.0, 2672.0),
    "Hero": (1027.0, 25763.0),
    "IceHockey": (-11.2, 0.9),
    "Jamesbond": (29.0, 406.7),
    "Kangaroo": (52.0, 3035.0),
    "Krull": (1598.0, 2395.0),
    "KungFuMaster": (258.5, 22736.0),
    "MontezumaRevenge": (0.0, 4367.0),
    "MsPacman": (307.3, 15693.0),
    "NameThisGame": (2292.0, 4076.0),
    "Pong": (-20.7, 9.3),
    "PrivateEye": (24.9, 69571.0),
    "Qbert": (163.9, 13455.0),
    "Riverraid": (1339.0, 13513.0),
    "RoadRunner": (11.5, 7845.0),
    "Robotank": (2.2, 11.9),
    "Seaquest": (68.4, 20182.0),
    "SpaceInvaders": (148.0, 1652.0),
    "StarGunner": (664.0, 10250.0),
    "Tennis": (-23.8, -8.9),
    "TimePilot": (3568.0, 5925.0),
    "Tutankham": (11.4, 167.6),
    "UpNDown": (533.4, 9082.0),
    "Venture": (0.0, 1188.0),
    "VideoPinball": (16257.0, 17298.0),
    "WizardOfWor": (563.5, 4757.0),
    "Zaxxon": (32.5, 9173.0),
}
"""Scores of random play and of a human on 49 games (Mnih et al. 2015, as Daley and Amato 2021 have them in "Human-level
control without server-grade hardware", table 4). The human scores differ from the next table's: 9.3 for 14.6 in Pong,
4.3 for 12.1 in Boxing, but 15693 for 6951.6 in MsPacman."""

ATARI57: dict[str, tuple[float, float]] = {
    "Alien": (227.8, 7127.7),
    "Amidar": (5.8, 1719.5),
    "Assault": (222.4, 742.0),
    "Asterix": (210.0, 8503.3),
    "Asteroids": (719.1, 47388.7),
    "Atlantis": (12850.0, 29028.1),
    "BankHeist": (14.2, 753.1),
    "BattleZone": (2360.0, 37187.5),
    "BeamRider": (363.9, 16926.5),
    "Berzerk": (123.7, 2630.4),
    "Bowling": (23.1, 160.7),
    "Boxing": (0.1, 12.1),
    "Breakout": (1.7, 30.5),
    "Centipede": (2090.9, 12017.0),
    "ChopperCommand": (811.0, 7387.8),
    "CrazyClimber": (10780.5, 35829.4),
    "Defender": (2874.5, 18688.9),
    "DemonAttack": (152.1, 1971.0),
    "DoubleDunk": (-18.6, -16.4),
    "Enduro": (0.0, 860.5),
    "FishingDerby": (-91.7, -38.7),
    "Freeway": (0.0, 29.6),
    "Frostbite": (65.2, 4334.7),
    "Gopher": (257.6, 2412.5),
    "Gravitar": (173.0, 3351.4),
    "Hero": (1027.0, 30826.4),
    "IceHockey": (-11.2, 0.9),
    "Jamesbond": (29.0, 302.8),
    "Kangaroo": (52.0, 3035.0),
    "Krull": (1598.0, 2665.5),
    "KungFuMaster": (258.5, 22736.3),
    "MontezumaRevenge": (0.0, 4753.3),
    "MsPacman": (307.3, 6951.6),
    "NameThisGame": (2292.3, 8049.0),
    "Phoenix": (761.4, 7242.6),
    "Pitfall": (-229.4, 6463.7),
    "Pong": (-20.7, 14.6),
    "PrivateEye": (24.9, 69571.3),
    "Qbert": (163.9, 13455.0),
    "Riverraid": (1338.5, 17118.0),
    "RoadRunner": (11.5, 7845.0),
    "Robotank": (2.2, 11.9),
    "Seaquest": (68.4, 42054.7),
    "Skiing": (-17098.1, -4336.9),
    "Solaris": (1236.3, 12326.7),
    "SpaceInvaders": (148.0, 1668.7),
    "StarGunner": (664.0, 10250.0),
    "Surround": (-10.0, 6.5),
    "Tennis": (-23.8, -8.3),
    "TimePilot": (3568.0, 5229.2),
    "Tutankham": (11.4, 167.6),
    "UpNDown": (533.4, 11693.2),
    "Venture": (0.0, 1187.5),
    "VideoPinball": (16256.9, 17667.9),
    "WizardOfWor": (563.5, 4756.5),
    "YarsRevenge": (3092.9, 54576.9),
    "Zaxxon": (32.5, 9173.3),
}
"""Scores of random play and of a human on 57 games, as dqn_zoo has them; its humans are those of table 10 of Espeholt
et al. 2020, and of papers on 57 games and on Atari 100k."""

TABLES: Mapping[Table, dict[str, tuple[float, float]]] = {"nature": NATURE, "atari57": ATARI57}
"""Scores of random play and of a human by game, for every table."""

GAMES57 = tuple(ATARI57)
"""All games, such as "Pong", which is the environment `envpool:Pong-v5`."""

NATURE49 = tuple(NATURE)
"""The games of Mnih et al. 2015."""

GAMES26 = (
    "Alien",
    "Amidar",
    "Assault",
    "Asterix",
    "BankHeist",
    "BattleZone",
    "Boxing",
    "Breakout",
    "ChopperCommand",
    "CrazyClimber",
    "DemonAttack",
    "Freeway",
    "Frostbite",
    "Gopher",
    "Hero",
    "Jamesbond",
    "Kangaroo",
    "Krull",
    "KungFuMaster",
    "MsPacman",
    "Pong",
    "PrivateEye",
    "Qbert",
    "RoadRunner",
    "Seaquest",
    "UpNDown",
)
"""The games of Atari 100k (Kaiser et al. 2020)."""

SETS: Mapping[str, tuple[str, ...]] = {"atari57": GAMES57, "nature49": NATURE49, "atari100k": GAMES26}
"""The sets of games by the names that papers give them."""


def name(text: str) -> str:
    """The name of a game, from "Pong", "Pong-v5" or "envpool:Pong-v5".

    Raises:
      ValueError: for a name that is not in `GAMES57`, with the nearest names.
    """
    found = text.rpartition(":")[2].partition("-v")[0]
    if found not in GAMES57:
        raise ValueError(f"{text!r} is no game of Atari-57; {configs.suggest(found, GAMES57)}")
    return found
