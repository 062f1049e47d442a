"""The settings of SAC: what is refused, its presets, and networks that see a part of observations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import agents, configs, nets, spaces
from podracer.agents import SACConfig
from podracer.agents.registry import make_agent
from podracer.training import presets, sac_presets
from tests.agents.test_sac import SPEC, TD3, A, made

SIZES = {"state": 3, "privileged_state": 2}
PRIVILEGED = spaces.Dict({name: spaces.Box(-9.0, 9.0, (size,)) for name, size in SIZES.items()})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"space": spaces.Discrete(2)},
            "action space Discrete(num_values=2) is not supported by sac, which needs a Box; use dqn or ppo.",
        ),
        (
            {"space": spaces.Box(-np.inf, np.inf, (1,))},
            "action space Box(-inf, inf): sac squashes actions into finite bounds; bound them in the environment, such "
            "as +-1.",
        ),
        (
            {"target_entropy": 0.7},
            "target_entropy=0.7 must be below log 2 = 0.693, per action dimension: no policy on [-1, 1] has more; use "
            "-1.0.",
        ),
        (
            {"noise": (0.1, 0.1)},
            'noise=(0.1, 0.1) is for policy="deterministic"; a Gaussian policy explores by its own std; leave it out.',
        ),
        (
            {"noise": (0.4, 0.1), "policy": "deterministic"},
            "noise=(0.4, 0.1) must be two numbers that do not fall, (low, high); use (0.1, 0.4).",
        ),
        (
            {"target_noise": 0.2},
            'target_noise=0.2 is for policy="deterministic"; a Gaussian policy explores by its own std; leave it out.',
        ),
        (
            {"target_noise_clip": 0.1},
            'target_noise_clip=0.1 is for policy="deterministic"; a Gaussian policy explores by its own std; leave it '
            "out.",
        ),
        (
            {"values": "categorical", "max_value": np.inf},
            "max_value=inf must be finite: the largest return to tell apart, such as 10.0.",
        ),
        (
            {"space": spaces.Box(0, 4, (2,), np.int32)},
            f"actions in {spaces.Box(0, 4, (2,), np.int32)} are whole numbers; a MultiDiscrete space has choices of "
            "them.",
        ),
        (
            {"init_std": 0.1, "min_std": 0.5},
            "init_std=0.1 must be between min_std=0.5 and max_std=7.389; use 0.5.",
        ),
        (
            {"values": "categorical"},
            'values="categorical" needs max_value, the largest return to tell apart, such as 10.0.',
        ),
        (
            {"final_rate": 0.5},
            "final_rate=0.5 is of learning_rate_schedule='linear', not 'constant'; use 0.0.",
        ),
        (
            {"torso": "simba_v2", "value_hidden_sizes": (8, 4)},
            "value_hidden_sizes=(8, 4): blocks of torso='simba_v2' have one width; use (128, 128).",
        ),
        (
            {"torso": "simba_v2", "init_std": 0.1},
            "init_std=0.1 is of torso='mlp'; weights of torso='simba_v2' cannot be 0: use None.",
        ),
        (
            {"normalize_observations": True, "observation": spaces.Discrete(3)},
            "normalize_observations=True needs float32 observations, which box does not have; leave it out.",
        ),
        (
            {"target_entropy": 1},
            "target_entropy=1 must be below log 2 = 0.693, per action dimension: no policy on [-1, 1] has more; use "
            "-1.0.",
        ),
        (
            {"policy": "deterministic", "alpha_rate": 0.0},
            'alpha_rate=0.0 has no effect with policy="deterministic", which has no alpha; leave it out.',
        ),
        (
            {"policy": "deterministic", "max_std": 1.0},
            'max_std=1.0 has no effect with policy="deterministic", whose noise explores; leave it out.',
        ),
        (
            {"torso": "simba_v2", "layer_norm": True},
            "layer_norm=True is of torso='mlp', not torso='simba_v2'; leave it out.",
        ),
        (
            {"max_value": 9.0},
            'max_value=9.0 is of values="categorical", not values="mean"; leave it out.',
        ),
        (
            {"normalize_rewards": True, "reward_scale": 2.0},
            "reward_scale=2.0 has no effect with normalize_rewards=True, which divides by the scale of returns; use "
            "normalize_rewards=False.",
        ),
        (
            {"observation": spaces.Box(0, 255, (8, 8), np.uint8)},
            f"observation space {spaces.Box(0, 255, (8, 8), np.uint8)} has images, for which sac has no convolutions: "
            "use ppo, show other members of a Dict by policy_observations, or give a network= of your own.",
        ),
        (
            {"observation": PRIVILEGED, "value_observations": ("privileged",)},
            "value_observations=('privileged',): no such member; did you mean 'privileged_state'? known: "
            "privileged_state, state.",
        ),
        (
            {"target_entropy": "x"},
            "SACConfig.target_entropy='x': expected a number.",
        ),
        (
            {"replay_min_size": 20, "replay_capacity": 10},
            "replay_min_size=20 must be at most replay_capacity=10, or learning would never begin; use 10.",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(**given)
    assert str(caught.value) == message


def test_td3_is_a_preset() -> None:
    for call in (
        lambda: make_agent("td3", None),  # type: ignore[arg-type]
        lambda: presets.merge("td3", "pendulum", "td3", None, presets.Settings()),
    ):
        with pytest.raises(
            ValueError, match="^unknown agent 'td3'; use sac with --preset td3, or preset='td3' in Python.$"
        ):
            call()
    task = {"learning_rate": 1e-3, "replay_min_size": 1_000, "hidden_sizes": (64, 64)}
    found = presets.merge("sac", "gymnasium:Pendulum-v1", "td3", None, presets.Settings({"tau": 0.5}))
    assert found.agent == TD3 | task | {"tau": 0.5}
    assert presets.merge("sac", "catch", "td3", None, presets.Settings()).agent == TD3
    assert configs.from_json(SACConfig, found.agent).policy == "deterministic"


@pytest.mark.parametrize("name", sac_presets.LAYERS)
def test_presets_are_few_fields_each(name: str) -> None:
    """At most eight from layer to layer, none of them for nothing."""
    found: dict[str, Any] = dict(presets.merge("sac", "acrobot", name, None, presets.Settings()).agent)
    if found.get("values") == "categorical":
        found.setdefault("max_value", 9.0)
    assert agents.sac.make(SPEC, configs.from_json(SACConfig, found))
    below: dict[str, Any] = dict(vars(SACConfig()))
    for layer in sac_presets.LAYERS[name]:
        changed = {field: value for field, value in layer.agent.items() if below[field] != value}
        assert changed == layer.agent
        assert len(changed) <= 8
        below |= changed


def test_presets_of_playground_know_its_tasks() -> None:
    def merged(preset: str, task: str) -> presets.Settings:
        return presets.merge("sac", f"playground:{task}", preset, None, presets.Settings())

    assert merged("fast_td3", "Go1JoystickFlatTerrain").agent["max_value"] == 10.0
    go1 = merged("fast_td3", "Go1JoystickFlatTerrain").agent
    assert (go1["noise"], go1["target_noise"]) == ((0.2, 0.8), 0.2)
    for preset in sac_presets.LAYERS:
        robot = merged(preset, "G1JoystickFlatTerrain").agent
        assert (robot["policy_observations"], robot["value_observations"]) == (("state",), ("privileged_state",))
    assert "value_observations" not in merged("fast_sac", "WalkerWalk").agent
    assert merged("fast_sac", "WalkerWalk").agent["max_value"] == 10.0
    assert merged("fast_sac", "G1JoystickFlatTerrain").agent["max_value"] == 20.0
    assert "noise" not in merged("fast_sac", "CheetahRun").agent
    assert (
        merged("playground", "HopperHop").run["total_steps"] == 2 * merged("playground", "CupCatch").run["total_steps"]
    )


def test_tasks_of_other_kinds_leave_presets_alone() -> None:
    """Pendulum has `classic`'s lanes and layers under `td3` alone, and SimbaV2 a discount of its 200 steps."""

    def merged(preset: str, task: str) -> presets.Settings:
        return presets.merge("sac", task, preset, None, presets.Settings())

    for preset in ("fast_td3", "fast_sac", "playground"):
        assert merged(preset, "pendulum") == merged(preset, "acrobot")
        assert merged(preset, "envpool:Hopper-v4") == merged(preset, "acrobot")
    for task, discount in {"pendulum": 0.975, "gymnasium:Reacher-v4": 0.95, "brax:reacher": 0.995}.items():
        assert merged("simba_v2", task).agent["discount"] == discount
        assert merged("simba_v2", task).agent["learning_rate"] == 1e-4


def test_members_for_the_critics_alone_do_not_reach_the_policy() -> None:
    members = {"policy_observations": ("state",), "value_observations": ("state", "privileged_state")}
    spec = SPEC._replace(observation_space=PRIVILEGED)
    networks = SACConfig(hidden_sizes=(4,), **members).actor_critic("sac", spec, None, A)  # type: ignore[arg-type]
    policy, critic = networks.policy.init(jax.random.key(0)), networks.critic.init(jax.random.key(1))

    def outputs(name: str) -> tuple[Any, Any]:
        observation = {member: jnp.full((1, 1, n), float(member == name)) for member, n in SIZES.items()}
        inputs = nets.Inputs(observation, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ())
        return networks.policy.apply(policy, inputs, ())[0], networks.critic.apply(critic, inputs, jnp.zeros((1, A)))

    (none, q), (same, other), (moved, _) = outputs(""), outputs("privileged_state"), outputs("state")
    np.testing.assert_array_equal(none, same)
    assert np.all(np.asarray(q != other))
    assert np.any(np.asarray(none != moved))


def test_numbers_without_effect_are_not_tunable() -> None:
    gaussian, deterministic = set(made().hyper), set(made(policy="deterministic").hyper)
    assert gaussian - deterministic == {"target_entropy", "alpha_rate"}
    assert deterministic - gaussian == {"target_noise", "target_noise_clip"}
    assert gaussian - set(made(normalize_rewards=True).hyper) == {"reward_scale"}
    assert SACConfig(max_grad_norm=None) == SACConfig()


def test_networks_that_do_not_fit_are_refused() -> None:
    own = nets.critics.make(SPEC, (4,), "relu", num_critics=2, num_actions=A, with_std=True)
    flat = own._replace(critic=own.critic._replace(apply=lambda *args: own.critic.apply(*args)[..., 0]))
    with pytest.raises(nets.NetworkError, match=r"the critics return float32 \[2, 3\] .* needs float32 \[N, 3, 1\]"):
        agents.sac.make(SPEC, None, flat)
    with pytest.raises(nets.NetworkError, match="needs P = 2 outputs: 2 means; the network returns 4"):
        agents.sac.make(SPEC, SACConfig(policy="deterministic"), own)
    with pytest.raises(nets.NetworkError, match=r"network=Network: sac has critics of actions; give nets.ActorCritic"):
        agents.sac.make(SPEC, None, own.policy)
    with pytest.raises(nets.NetworkError, match="init_std=0.1 is of the library's own network"):
        agents.sac.make(SPEC, SACConfig(init_std=0.1), own)


def test_an_optimizer_with_a_rate_of_its_own_has_one_for_all() -> None:
    with pytest.raises(ValueError, match="or policy_rate=1 and alpha_rate=1"):
        agents.sac.make(SPEC, SACConfig(policy_rate=0.5, alpha_rate=0.0), optimizer=optax.adam(1e-3))
