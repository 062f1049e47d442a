"""Human-normalised scores of Atari games."""

from __future__ import annotations

from podracer import config as configs

RANDOM_AND_HUMAN: dict[str, tuple[float, float]] = {
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
"""Scores of random play and of a human on 49 games, by EnvPool's names (Daley and Amato 2021, "Human-level
control without server-grade hardware", table 4, which has them from Mnih et al. 2015)."""


def human_normalised(game: str, score: float) -> float:
    """0 for random play and 1 for a human.

    Args:
      game: such as "Pong", "Pong-v5" or "envpool:Pong-v5".
      score: mean unclipped return of whole games.

    Raises:
      ValueError: for a game that the table lacks.
    """
    name = game.partition(":")[2] or game
    name = name.partition("-v")[0]
    if name not in RANDOM_AND_HUMAN:
        raise ValueError(f"no human score of {game!r} is known here; {configs.suggest(name, RANDOM_AND_HUMAN)}")
    random, human = RANDOM_AND_HUMAN[name]
    return (score - random) / (human - random)
