"""podracer: reinforcement learning that runs on the accelerator.

import podracer
result = podracer.train("ppo", "cartpole", total_steps=500_000, seed=0)
print(result.evaluate(episodes=100))
"""

import importlib
from typing import TYPE_CHECKING, Any

from podracer.version import __version__

if TYPE_CHECKING:
    from envs_jax.adapters.brax import from_brax
    from envs_jax.adapters.gymnax import from_gymnax
    from envs_jax.adapters.jumanji import from_jumanji
    from envs_jax.adapters.playground import from_playground
    from podracer import agents, anakin, distributions, nets, returns, spaces, types
    from podracer.errors import (
        ActorError,
        CheckpointError,
        Interrupted,
        OutOfMemoryError,
        PeerError,
        RemoteError,
        TrainingDivergedError,
    )
    from podracer.evaluation.evaluation import Evaluation
    from podracer.pod.settings import Pod
    from podracer.population.config import PBT
    from podracer.remote.settings import Remote
    from podracer.remote.worker import serve_envs
    from podracer.result.export import load_policy
    from podracer.result.policy import Actor
    from podracer.result.result import Result
    from podracer.run.config import RunConfig
    from podracer.sweeps.ranges import log_uniform, uniform
    from podracer.sweeps.result import Sweep
    from podracer.sweeps.sweep import sweep
    from podracer.training.train import load, resume, train

__all__ = [
    "PBT",
    "Actor",
    "ActorError",
    "CheckpointError",
    "Evaluation",
    "Interrupted",
    "OutOfMemoryError",
    "PeerError",
    "Pod",
    "Remote",
    "RemoteError",
    "Result",
    "RunConfig",
    "Sweep",
    "TrainingDivergedError",
    "__version__",
    "agents",
    "anakin",
    "distributions",
    "from_brax",
    "from_gymnax",
    "from_jumanji",
    "from_playground",
    "load",
    "load_policy",
    "log_uniform",
    "nets",
    "resume",
    "returns",
    "serve_envs",
    "spaces",
    "sweep",
    "train",
    "types",
    "uniform",
]

_HOMES = {
    "Actor": "result.policy",
    "ActorError": "errors",
    "CheckpointError": "errors",
    "Evaluation": "evaluation.evaluation",
    "Interrupted": "errors",
    "OutOfMemoryError": "errors",
    "PeerError": "errors",
    "PBT": "population.config",
    "Pod": "pod.settings",
    "Remote": "remote.settings",
    "RemoteError": "errors",
    "Result": "result.result",
    "RunConfig": "run.config",
    "Sweep": "sweeps.result",
    "TrainingDivergedError": "errors",
    "load": "training.train",
    "load_policy": "result.export",
    "log_uniform": "sweeps.ranges",
    "resume": "training.train",
    "serve_envs": "remote.worker",
    "sweep": "sweeps.sweep",
    "train": "training.train",
    "uniform": "sweeps.ranges",
}
"""The module of each public name, imported when it is used: an exported policy needs no agents, which take a second."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"podracer.{_HOMES[name]}"), name)
    if name in __all__ and name.startswith("from_"):
        return getattr(importlib.import_module(f"envs_jax.adapters.{name.removeprefix('from_')}"), name)
    if name in __all__:
        return importlib.import_module(f"podracer.{name}")
    raise AttributeError(f"module 'podracer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
