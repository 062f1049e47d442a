"""podracer: reinforcement learning that runs on the accelerator.

import podracer
result = podracer.train("ppo", "cartpole", total_steps=500_000, seed=0)
print(result.evaluate(episodes=100))
"""

import importlib
from typing import TYPE_CHECKING, Any

from podracer.version import __version__

if TYPE_CHECKING:
    from podracer import agents, distributions, nets, returns, spaces, types
    from podracer.driver import OutOfMemoryError, TrainingDivergedError
    from podracer.pod.settings import Pod
    from podracer.policy import Actor
    from podracer.remote.hub import RemoteError
    from podracer.remote.settings import Remote
    from podracer.remote.worker import serve_envs
    from podracer.result import Result
    from podracer.run.checkpoint import CheckpointError
    from podracer.run.evaluation import Evaluation
    from podracer.run.experiment import RunConfig
    from podracer.run.export import load_policy
    from podracer.run.interruption import Interrupted
    from podracer.run.processes import PeerError
    from podracer.sebulba.actor import ActorError
    from podracer.training import load, resume, train

__all__ = [
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
    "TrainingDivergedError",
    "__version__",
    "agents",
    "distributions",
    "load",
    "load_policy",
    "nets",
    "resume",
    "returns",
    "serve_envs",
    "spaces",
    "train",
    "types",
]

_HOMES = {
    "Actor": "policy",
    "ActorError": "sebulba.actor",
    "CheckpointError": "run.checkpoint",
    "Evaluation": "run.evaluation",
    "Interrupted": "run.interruption",
    "OutOfMemoryError": "driver",
    "PeerError": "run.processes",
    "Pod": "pod.settings",
    "Remote": "remote.settings",
    "RemoteError": "remote.hub",
    "Result": "result",
    "RunConfig": "run.experiment",
    "TrainingDivergedError": "driver",
    "load": "training",
    "load_policy": "run.export",
    "resume": "training",
    "serve_envs": "remote.worker",
    "train": "training",
}
"""Where names live. They are imported when they are used: an exported policy needs no agents, which take a second."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"podracer.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"podracer.{name}")
    raise AttributeError(f"module 'podracer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
