"""The contracts that environments, agents and drivers share: time steps, trajectories, environments and agents.

Rows, lanes and rollouts are terms of this library; docs/glossary.md defines them. The alignment rules hold everywhere
(docs/adr/0001-next-step-reset.md):

*   Transition t is `(observation_t, action_t) -> (reward_{t+1}, discount_{t+1}, observation_{t+1})`.
*   NEXT_STEP reset: the step after a `last` row ignores its action and returns the `first` row of the next episode
    with reward 0. The final observation of every episode is therefore in the trajectory, and a truncated episode
    bootstraps from it exactly.
*   `mask_t = ~first_{t+1}`: a transition into a `first` row joins two episodes and carries no information.
"""

from podracer.types.agent import (
    ActFn,
    ActorParams,
    ActorParamsFn,
    Agent,
    Batch,
    BestFn,
    Caution,
    InitFn,
    LearnerState,
    LearnFn,
    ReanalyseFn,
    RefreshFn,
    ReplaySpec,
    StartFn,
)
from podracer.types.environment import (
    NO_METRICS,
    ArrayTree,
    Environment,
    EnvSpec,
    EpisodeStats,
    HostEnvironment,
    HostEnvironments,
    HostStep,
    Metrics,
    TimeStep,
    Trajectory,
    Transition,
    check_metric_names,
    check_one_player,
    task_of,
)

__all__ = [
    "NO_METRICS",
    "ActFn",
    "ActorParams",
    "ActorParamsFn",
    "Agent",
    "ArrayTree",
    "Batch",
    "BestFn",
    "Caution",
    "EnvSpec",
    "Environment",
    "EpisodeStats",
    "HostEnvironment",
    "HostEnvironments",
    "HostStep",
    "InitFn",
    "LearnFn",
    "LearnerState",
    "Metrics",
    "ReanalyseFn",
    "RefreshFn",
    "ReplaySpec",
    "StartFn",
    "TimeStep",
    "Trajectory",
    "Transition",
    "check_metric_names",
    "check_one_player",
    "task_of",
]
