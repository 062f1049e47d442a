"""Agents: one readable file each, made by its `make(spec, config) -> Agent`.

agent = podracer.agents.vtrace.make(env.spec, podracer.agents.VTraceConfig(learning_rate=1e-3))
"""

from podracer.agents import alphazero, dqn, efficientzero, muzero, ppo, pqn, r2d2, vtrace
from podracer.agents.alphazero import AlphaZeroConfig
from podracer.agents.dqn import DQNConfig
from podracer.agents.efficientzero import EfficientZeroConfig
from podracer.agents.muzero import MuZeroConfig
from podracer.agents.ppo import PPOConfig
from podracer.agents.pqn import PQNConfig
from podracer.agents.r2d2 import R2D2Config
from podracer.agents.vtrace import VTraceConfig

__all__ = [
    "AlphaZeroConfig",
    "DQNConfig",
    "EfficientZeroConfig",
    "MuZeroConfig",
    "PPOConfig",
    "PQNConfig",
    "R2D2Config",
    "VTraceConfig",
    "alphazero",
    "dqn",
    "efficientzero",
    "muzero",
    "ppo",
    "pqn",
    "r2d2",
    "vtrace",
]
