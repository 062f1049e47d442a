"""The parts of a run, as one record."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from podracer.population.config import PBT
from podracer.run.config import RunConfig
from podracer.run.driver import Driver
from podracer.types import Agent, Environment, HostEnvironments


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's parts, resolved from names and defaults."""

    agent: Agent
    environment: Environment | HostEnvironments
    run: RunConfig
    driver: Driver
    hyper: dict[str, np.ndarray]
    description: dict[str, Any]
    network: Any = None
    pbt: PBT | None = None
    pbt_dir: pathlib.Path | None = None

    @property
    def seeds(self) -> np.ndarray:
        return self.run.seeds
