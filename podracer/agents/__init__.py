"""Agents: one readable file each, made by its `make(spec, config, network, loss, optimizer) -> Agent`.

agent = podracer.agents.vtrace.make(env.spec, podracer.agents.VTraceConfig(learning_rate=1e-3))

Every `make` takes

*   `spec`: the environment's spec (AlphaZero takes the environment);
*   `config`: settings; the defaults if None;
*   `network`: your own network (see `podracer.nets.Network`) or model; the config's if None;
*   `loss`: your own loss, called as the file's `loss` is and returning what it returns, with metrics of any names;
*   `optimizer`: your own optimiser, a function `learning_rate -> optax.GradientTransformation` or a transformation; the
    config's if None.

In the files, the config comes first, then the loss, then `make`, then the agent's functions in the order of their use.
"""

from podracer.agents import alphazero, dqn, efficientzero, muzero, ppo, pqn, r2d2, sac, vtrace
from podracer.agents.alphazero import AlphaZeroConfig
from podracer.agents.dqn import DQNConfig
from podracer.agents.efficientzero import EfficientZeroConfig
from podracer.agents.muzero import MuZeroConfig
from podracer.agents.ppo import PPOConfig
from podracer.agents.pqn import PQNConfig
from podracer.agents.r2d2 import R2D2Config
from podracer.agents.sac import SACConfig
from podracer.agents.vtrace import VTraceConfig

__all__ = [
    "AlphaZeroConfig",
    "DQNConfig",
    "EfficientZeroConfig",
    "MuZeroConfig",
    "PPOConfig",
    "PQNConfig",
    "R2D2Config",
    "SACConfig",
    "VTraceConfig",
    "alphazero",
    "dqn",
    "efficientzero",
    "muzero",
    "ppo",
    "pqn",
    "r2d2",
    "sac",
    "vtrace",
]
