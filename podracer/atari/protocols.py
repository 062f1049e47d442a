"""The protocols by which papers play Atari and report scores, by name.

All of them skip 4 frames, take the maximum of the last two, in grey at 84 x 84, and report unclipped scores of whole
games. `PROTOCOLS` has their differences. EnvPool (1.2.5, read and run) differs from all of them:

*   Games open with at least one frame of no-ops, so protocols without no-ops have one. *   If a lost life ends a
training episode, as many no-ops follow as before a game. A game that ends during these is not reported: the training
score of two games may then be one. Evaluations play lives on. *   Frames are resized by averaging their pixels, unless
a protocol has `resize="bilinear"`. *   The frame that opens a game is no maximum of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from podracer import configs
from podracer.atari import games

FRAME_SKIP = 4
"""Frames of a step, in all protocols."""

Figure = Literal["best", "final", "last_100", "each_million"]


class Protocol(NamedTuple):
    """A protocol: the settings of games in training and in evaluation, and the number that a paper reports.

    Attributes:
      source: the paper or code that it is from, and the differences.
      env: fields of `AtariOptions` that differ from the defaults.
      figure: the reported number: "best", the highest mean of an evaluation; "final", the mean of the last one;
        "last_100", the mean of the newest 100 training games; "each_million", the mean of the training games in each 1M
        frames.
      episodes: games of an evaluation, or None if the training games are the score.
      every: frames between evaluations; None for one at the end, which runs of any length have.
      epsilon: probability of a random action in games that count, for agents that have one; None for the agent's own.
      samples: whether policies sample in games that count, as in training, or take their best actions; None for the
        agent's own.
      frames: frames of training; None leaves it to the user.
      at: frames after which the figure is reported, if more than once or not at the end.
      games: the games of the paper.
      table: the table of scores of random play and of a human that normalises its scores (`human_normalised`).
    """

    source: str
    env: Mapping[str, Any]
    figure: Figure
    episodes: int | None = None
    every: int | None = None
    epsilon: float | None = None
    samples: bool | None = None
    frames: int | None = 200_000_000
    at: tuple[int, ...] = ()
    games: tuple[str, ...] = games.GAMES57
    table: games.Table = "atari57"

    @property
    def run(self) -> dict[str, int]:
        """The fields of `RunConfig` that it sets, in steps."""
        in_steps = {"total_steps": self.frames, "eval_every": self.every or self.frames}
        steps = {name: frames // FRAME_SKIP for name, frames in in_steps.items() if frames}
        return steps | ({"eval_episodes": self.episodes} if self.episodes else {})

    def agent(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of an agent's config that it sets, of all those that the agent has."""
        found: dict[str, Any] = {}
        if self.samples is not None and "evaluation_policy" in settings:
            found["evaluation_policy"] = "sample" if self.samples else "mode"
        if self.epsilon is None:
            return found
        if "evaluation_epsilon" in settings:
            found["evaluation_epsilon"] = self.epsilon
        if self.episodes is None and settings.get("epsilon_final", 0.0) > self.epsilon:
            found["epsilon_final"] = self.epsilon
        return found


def _env(frames: int, evaluation: int | None = None, **options: Any) -> dict[str, Any]:
    """Fields of `AtariOptions`, with games cut after so many frames, in evaluation perhaps after others."""
    limits = {"max_episode_steps": frames, "evaluation_max_episode_steps": evaluation}
    return {name: limit // FRAME_SKIP for name, limit in limits.items() if limit} | options


PROTOCOLS: dict[str, Protocol] = {
    "nature": Protocol(
        "Mnih et al. 2015, methods: a game of evaluation lasts 5 minutes at most.",
        _env(108_000, 18_000, episodic_life=True),
        "best",
        episodes=30,
        every=1_000_000,
        epsilon=0.05,
        games=games.NATURE49,
        table="nature",
    ),
    "fast_dqn": Protocol(
        "Daley and Amato 2021, section 5.2, and their code: 0 to 29 no-ops and then FIRE, in games that have it; in "
        "others 1 to 30.",
        _env(108_000, episodic_life=True, fire_reset=True),
        "best",
        episodes=30,
        every=1_000_000,
        epsilon=0.05,
        games=games.NATURE49,
        table="nature",
    ),
    "dqn_zoo": Protocol(
        "Quan and Ostrovski 2020, by their code: there an evaluation has 500,000 frames, no no-ops follow a lost life, "
        "and plots smooth the means of ten evaluations.",
        _env(108_000, episodic_life=True),
        "final",
        episodes=30,
        every=1_000_000,
    ),
    "machado": Protocol(
        "Machado et al. 2018: games of 5 minutes at most. Others who say that they follow it play 30 minutes "
        "(max_episode_steps=27000).",
        _env(18_000, full_action_space=True, sticky_actions=0.25, noop_max=1),
        "last_100",
        epsilon=0.01,
        at=(10_000_000, 50_000_000, 100_000_000, 200_000_000),
    ),
    "dopamine": Protocol(
        "Castro et al. 2018: games of 30 minutes at most.",
        _env(108_000, sticky_actions=0.25, noop_max=1),
        "each_million",
        epsilon=0.01,
    ),
    "ppo": Protocol(
        "Schulman et al. 2017, by OpenAI's baselines: lost lives end games, which FIRE starts.",
        _env(108_000, episodic_life=True, fire_reset=True),
        "last_100",
        samples=True,
        frames=40_000_000,
        games=games.NATURE49,
    ),
    "impala": Protocol(
        "Espeholt et al. 2018, table F.1, and their code, in which policies sample when they are tested, too.",
        _env(108_000, episodic_life=True),
        "final",
        episodes=200,
        samples=True,
    ),
    "seed": Protocol(
        "Espeholt et al. 2020, table 9 (that of R2D2). It trains for 40G frames, which is for you to say.",
        _env(108_000, full_action_space=True, resize="bilinear"),
        "final",
        episodes=200,
        every=40_000_000_000,  # so at the end of runs that are shorter, too
        epsilon=1e-3,
        frames=None,
    ),
    "atari100k": Protocol(
        "Kaiser et al. 2020, as SpeedyZero plays it: short games in training, long and greedy ones in evaluation.",
        _env(12_000, 108_000, episodic_life=True),
        "final",
        episodes=100,
        epsilon=0.0,
        samples=False,
        frames=400_000,
        games=games.GAMES26,
    ),
}
"""The protocols by name. `machado` and `dopamine` measure the training games, and lower an epsilon that is higher."""


def protocol(name: str) -> Protocol:
    """A protocol by name.

    Raises:
      ValueError: for an unknown name, with the nearest ones.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"protocol={name!r}: unknown; {configs.suggest(name, PROTOCOLS)}")
    return PROTOCOLS[name]
