"""Agents: one readable file each, made by `make(spec, config) -> Agent`.

agent = podracer.agents.vtrace(env.spec, podracer.agents.VTraceConfig(learning_rate=1e-3))
"""

from podracer.agents.ppo import PPOConfig
from podracer.agents.ppo import make as ppo
from podracer.agents.r2d2 import R2D2Config
from podracer.agents.r2d2 import make as r2d2
from podracer.agents.vtrace import VTraceConfig
from podracer.agents.vtrace import make as vtrace

__all__ = ["PPOConfig", "R2D2Config", "VTraceConfig", "ppo", "r2d2", "vtrace"]
