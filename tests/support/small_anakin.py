"""Small agents of the counting environment, for Anakin's rollouts and its program."""

from __future__ import annotations

from typing import Any

from podracer import agents
from podracer.agents import PPOConfig, PQNConfig, VTraceConfig
from podracer.types import Agent
from tests.support import counting

T, B = 5, 8
COUNTING = counting.CountingEnvironment()


def small_network(core_size: int = 0) -> dict[str, Any]:
    """Settings of a small network and of its rollouts; with a core if it has a size."""
    core = {"core": "lstm", "core_size": core_size} if core_size else {"core": "none", "core_size": 1}
    return {"rollout_length": T, "hidden_sizes": (8,)} | core


def agent_of(name: str, core_size: int = 0, **fields: Any) -> Agent:
    common = small_network(core_size)
    if name == "vtrace":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**(common | fields)))
    if name == "pqn":
        config = {"rollout_length": T, "hidden_sizes": (8,), "num_minibatches": 2}
        return agents.pqn.make(COUNTING.spec, PQNConfig(**(config | fields)))
    config = {"num_epochs": 2, "num_minibatches": 2, "normalize_observations": True, "normalize_rewards": True}
    return agents.ppo.make(COUNTING.spec, PPOConfig(**(common | config | fields)))
