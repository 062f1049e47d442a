"""PPO's settings for MuJoCo Playground and for brax, as layers: what a task has beyond its suite, and that beyond brax.

Sources: google-deepmind/mujoco_playground, config/dm_control_suite_params.py and config/locomotion_params.py (commit
d5e6b47), and google/brax, notebooks/training.ipynb and training/agents/ppo (commit 0b96d05).

**Rows of a lane.** brax's `batch_size` counts unrolls, and an update has batch_size * num_minibatches of them. With
1,024 * 32 / 2,048 lanes that is 16 unrolls of 30 rows for each lane of the control suite, so `rollout_length` is 480
and an update has 983,040 rows, not 61,440.

**Differences from brax.** Its advantage is d_t + gamma A'_{t+1} without the first lambda, made anew in every minibatch
for each unroll; ours is GAE, once, over all rows of a lane. It leaves truncated steps out; ours bootstrap from the true
last observation. It returns every lane to one stored first state; ours begin anew. It evaluates by samples; ours are
greedy. Its entropy is that of one sample; ours is an integral. Its statistics of observations include the rows that are
learnt from; ours are those of before. Domain randomisation and curricula are not part of the settings.
"""

from __future__ import annotations

from podracer.training.settings import Settings

NETWORKS = Settings(
    {
        "policy": "tanh",
        "state_dependent_std": True,
        "init_std": 0.694,  # softplus(0) + 1e-3
        "min_std": 1e-3,
        "activation": "swish",
        "init": "lecun",
        "hidden_sizes": (32,) * 4,
        "value_hidden_sizes": (256,) * 5,
    }
)

LEARNING = Settings(
    {
        "normalize_observations": True,
        "statistics_min_std": 1e-6,
        "statistics_clip": None,
        "normalize_rewards": False,
        "num_minibatches": 32,
        "clip_epsilon": 0.3,
        "learning_rate_schedule": "constant",
        "optimizer_eps": 1e-8,
    }
)

CONTROL_SUITE = Settings(
    {
        "rollout_length": 480,
        "num_epochs": 16,
        "discount": 0.995,
        "learning_rate": 1e-3,
        "reward_scale": 10.0,
        "max_grad_norm": None,
    },
    {"num_envs": 2048, "total_steps": 60_000_000},
)

LOCOMOTION = Settings(
    {
        "rollout_length": 20,
        "discount": 0.97,
        "learning_rate": 3e-4,
        "max_grad_norm": 1.0,
        "hidden_sizes": (128,) * 4,
    },
    {"num_envs": 8192, "total_steps": 100_000_000},
)

PRIVILEGED = Settings(
    {
        "hidden_sizes": (512, 256, 128),
        "value_hidden_sizes": (512, 256, 128),
        "policy_observations": ("state",),
        "value_observations": ("privileged_state",),
    }
)
"""A value that sees more than a robot's sensors."""

HUMANOID = Settings({"clip_epsilon": 0.2, "entropy_cost": 5e-3})

BRAX = Settings(
    {"rollout_length": 160, "num_epochs": 8, "learning_rate": 3e-4, "entropy_cost": 1e-3, "max_grad_norm": None},
    {"num_envs": 2048, "total_steps": 50_000_000},
)


def _steps(number: int) -> Settings:
    return Settings({}, {"total_steps": number})


SHORT_SIGHTED = Settings({"discount": 0.95})
LONG = _steps(100_000_000)

CONTROL_SUITE_TASKS: dict[str, tuple[Settings, ...]] = {
    "AcrobotSwingup": (LONG,),
    "AcrobotSwingupSparse": (LONG,),
    "BallInCup": (SHORT_SIGHTED,),
    "CartpoleBalance": (),
    "CartpoleBalanceSparse": (),
    "CartpoleSwingup": (),
    "CartpoleSwingupSparse": (),
    "CheetahRun": (),
    "FingerSpin": (SHORT_SIGHTED,),
    "FingerTurnEasy": (),
    "FingerTurnHard": (),
    "FishSwim": (),
    "HopperHop": (),
    "HopperStand": (),
    "HumanoidRun": (),
    "HumanoidStand": (),
    "HumanoidWalk": (),
    "PendulumSwingup": (Settings({"num_epochs": 4}),),  # and each action four times, which is a wrapper
    "PointMass": (),
    "ReacherEasy": (),
    "ReacherHard": (),
    "SwimmerSwimmer6": (LONG,),
    "WalkerRun": (LONG,),
    "WalkerStand": (),
    "WalkerWalk": (),
}

HUMANOID_JOYSTICKS = (PRIVILEGED, HUMANOID, _steps(200_000_000))

LOCOMOTION_TASKS: dict[str, tuple[Settings, ...]] = {
    "ApolloJoystickFlatTerrain": HUMANOID_JOYSTICKS,
    "BarkourJoystick": (),
    "BerkeleyHumanoidJoystickFlatTerrain": (PRIVILEGED, HUMANOID, _steps(150_000_000)),
    "BerkeleyHumanoidJoystickRoughTerrain": (PRIVILEGED, HUMANOID, _steps(150_000_000)),
    "G1JoystickFlatTerrain": HUMANOID_JOYSTICKS,
    "G1JoystickRoughTerrain": HUMANOID_JOYSTICKS,
    "Go1Footstand": (PRIVILEGED,),
    "Go1Getup": (PRIVILEGED, _steps(50_000_000)),
    "Go1Handstand": (PRIVILEGED,),
    "Go1JoystickFlatTerrain": (PRIVILEGED, _steps(200_000_000)),
    "Go1JoystickRoughTerrain": (PRIVILEGED, _steps(200_000_000)),
    "H1InplaceGaitTracking": (),
    "H1JoystickGaitTracking": (),
    "Op3Joystick": (),
    "SpotFlatTerrainJoystick": (Settings({"policy_observations": ("state",), "value_observations": ("state",)}),),
    "SpotGetup": (),
    "SpotJoystickGaitTracking": (),
    "T1JoystickFlatTerrain": HUMANOID_JOYSTICKS,
    "T1JoystickRoughTerrain": HUMANOID_JOYSTICKS,
}

BRAX_TASKS: dict[str, tuple[Settings, ...]] = {
    "ant": (
        Settings(
            {"rollout_length": 80, "num_epochs": 4, "discount": 0.97, "reward_scale": 10.0, "entropy_cost": 1e-2},
            {"num_envs": 4096},
        ),
    ),
    "halfcheetah": (SHORT_SIGHTED,),
    "humanoid": (Settings({"discount": 0.97, "reward_scale": 0.1}),),
}

COMMON = (NETWORKS, LEARNING)

PLAYGROUND_LAYERS: dict[str, tuple[Settings, ...]] = {
    **{task: (*COMMON, CONTROL_SUITE, *layers) for task, layers in CONTROL_SUITE_TASKS.items()},
    **{task: (*COMMON, LOCOMOTION, *layers) for task, layers in LOCOMOTION_TASKS.items()},
}
"""The layers of every task of Playground, from the lowest one."""

BRAX_LAYERS: dict[str, tuple[Settings, ...]] = {task: (*COMMON, BRAX, *layers) for task, layers in BRAX_TASKS.items()}
"""The layers of tasks of brax, from the lowest one."""
