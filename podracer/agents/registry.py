"""Agents by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from podracer import agents, configs
from podracer.agents.base import MakeFn
from podracer.learning.optimizer import Own
from podracer.nets import Network
from podracer.search.search import Planner
from podracer.types import Agent, Environment, HostEnvironments

AGENTS: dict[str, tuple[type, MakeFn]] = {
    "alphazero": (agents.AlphaZeroConfig, agents.alphazero.make),
    "dqn": (agents.DQNConfig, agents.dqn.make),
    "efficientzero": (agents.EfficientZeroConfig, agents.efficientzero.make),
    "muzero": (agents.MuZeroConfig, agents.muzero.make),
    "ppo": (agents.PPOConfig, agents.ppo.make),
    "pqn": (agents.PQNConfig, agents.pqn.make),
    "r2d2": (agents.R2D2Config, agents.r2d2.make),
    "sac": (agents.SACConfig, agents.sac.make),
    "vtrace": (agents.VTraceConfig, agents.vtrace.make),
}
"""Agents that have a name: their config and what makes them."""

PRESETS = dict.fromkeys(("td3", "fast_td3", "fast_sac", "simba_v2"), "sac")
"""Names that are asked for as agents and are presets of one."""

PLANNERS: dict[str, Callable[..., Planner]] = {
    "alphazero": agents.alphazero.planner,
    "efficientzero": agents.efficientzero.planner,
    "muzero": agents.muzero.planner,
}
"""Makers of the searches of agents that search."""


def make_agent(
    agent: str,
    environment: Environment | HostEnvironments,
    config: Any = None,
    network: Network | None = None,
    optimizer: Own | None = None,
) -> Agent:
    """An agent by name for an environment; `config` is its config dataclass or a mapping of fields, `network` and
    `optimizer` are the user's own.

    Raises:
      ValueError: for an unknown name (with the nearest ones), or settings that do not fit.
    """
    if agent not in AGENTS:
        raise ValueError(unknown(agent))
    cls, make = AGENTS[agent]
    if config is None or isinstance(config, Mapping):
        config = configs.from_json(cls, config or {})
    return make(_rules(agent, environment), config, network, optimizer=optimizer)


def unknown(agent: str) -> str:
    """Says that no agent has a name, and what to use."""
    if agent in PRESETS:
        return f"unknown agent {agent!r}; use {PRESETS[agent]} with --preset {agent}, or preset={agent!r} in Python."
    return f"unknown agent {agent!r}; {configs.suggest(agent, AGENTS)}"


def make_planner(agent: Agent, environment: Environment | HostEnvironments, network: Any = None) -> Planner:
    """Makes the search of an agent that was made by name.

    Raises:
      ValueError: if the agent does not search.
    """
    if agent.name not in PLANNERS:
        raise ValueError(f"{agent.name} does not search; {', '.join([*PLANNERS][:-1])} and {[*PLANNERS][-1]} do.")
    return PLANNERS[agent.name](_rules(agent.name, environment), agent.config, network)


def _rules(agent: str, environment: Environment | HostEnvironments) -> Any:
    """Returns the part of an environment that an agent needs: AlphaZero's model is the environment itself."""
    return environment if agent == "alphazero" else environment.spec
