"""podracer: reinforcement learning that runs on the accelerator.

import podracer
result = podracer.train("ppo", "cartpole", total_steps=500_000, seed=0)
print(result.evaluate(episodes=100))
"""

from podracer import agents, distributions, nets, returns, spaces, types
from podracer.driver import OutOfMemoryError, TrainingDivergedError
from podracer.result import Result
from podracer.run.checkpoint import CheckpointError
from podracer.run.evaluation import Evaluation
from podracer.run.experiment import RunConfig
from podracer.sebulba.actor import ActorError
from podracer.training import load, resume, train
from podracer.version import __version__

__all__ = [
    "ActorError",
    "CheckpointError",
    "Evaluation",
    "OutOfMemoryError",
    "Result",
    "RunConfig",
    "TrainingDivergedError",
    "__version__",
    "agents",
    "distributions",
    "load",
    "nets",
    "resume",
    "returns",
    "spaces",
    "train",
    "types",
]
