"""How papers play Atari: the protocols of PPO, IMPALA and SEED RL, and the agents' settings that go with them."""

from __future__ import annotations

from typing import Any

from podracer.agents import PPOConfig, PQNConfig, R2D2Config, VTraceConfig
from podracer.environments.envpool import AtariOptions


def impala() -> AtariOptions:
    """Espeholt et al. 2018, table G.1: lost lives end training episodes; minimal actions; up to 30 no-ops.

    Rewards are clipped and frames stacked by the agent (`VTraceConfig.atari()`).
    """
    return AtariOptions(episodic_life=True)


def ppo() -> AtariOptions:
    """Schulman et al. 2017, by OpenAI's baselines: as IMPALA's, and games that wait for it are started with FIRE."""
    return AtariOptions(episodic_life=True, fire_reset=True)


def seed() -> AtariOptions:
    """Espeholt et al. 2020, table 9 (that of R2D2): all 18 actions; lost lives end nothing; up to 30 no-ops."""
    return AtariOptions(full_action_space=True)


def preset(agent: str) -> tuple[Any, AtariOptions]:
    """An agent's settings for Atari, and the protocol that its paper reports.

    Raises:
      ValueError: for an agent that has none.
    """
    known = {
        "ppo": (PPOConfig.atari, ppo),
        "pqn": (PQNConfig.atari, impala),
        "r2d2": (R2D2Config.atari, seed),
        "vtrace": (VTraceConfig.atari, impala),
    }
    if agent not in known:
        raise ValueError(f"{agent} has no preset for Atari; known: {', '.join(known)}.")
    config, options = known[agent]
    return config(), options()
