"""PPO on actions in a Box: laws, units, the adapted learning rate, members of observations, and refused settings."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import agents, distributions, nets, spaces
from podracer.agents import PPOConfig
from podracer.agents.ppo import loss, normalize_minibatch
from podracer.learning import minibatches
from podracer.types import EnvSpec
from tests.support import harness, oracles
from tests.support.small_ppo import KEY, NUMBERS, ONCE, B, T, made, samples_of, small

A = 2
SPEC = EnvSpec("robot", spaces.Box(-9.0, 9.0, (3,)), spaces.Box(-1.0, 1.0, (A,)))
PARTS = {"state": spaces.Box(-9.0, 9.0, (3,)), "privileged_state": spaces.Box(-9.0, 9.0, (2,))}
MEMBERS = SPEC._replace(observation_space=spaces.Dict(PARTS))


def test_the_squashed_loss_is_the_oracle() -> None:
    """Ratios by the Gaussian's density, and an entropy by 4,001 points."""
    rng = np.random.default_rng(5)
    _, values, samples = samples_of(5)
    mean, std = rng.normal(size=(T, B, A)), np.exp(0.3 * rng.normal(size=(T, B, A)))
    u = mean + std * rng.normal(size=(T, B, A))
    log_prob = oracles.gaussian_log_prob(mean, std, u)
    old = log_prob + 0.3 * rng.normal(size=(T, B))
    samples = samples._replace(sample=jnp.asarray(u, jnp.float32), log_prob=jnp.asarray(old, jnp.float32))
    config = PPOConfig(policy="tanh", normalize_advantages=False)
    numbers = {name: jnp.float32(x) for name, x in NUMBERS.items()}
    law = distributions.tanh_gaussian(SPEC.action_space)  # type: ignore[arg-type]
    outputs = jnp.asarray(np.concatenate([mean, np.log(std)], -1), jnp.float32)
    compute = lambda outputs, values, batch: loss(  # noqa: E731
        outputs, values, normalize_minibatch(batch, config), law, numbers, config
    )
    _, metrics = harness.alone(compute)(outputs, jnp.asarray(values, jnp.float32), samples)

    mask = np.asarray(samples.weight) > 0
    advantage = np.asarray(samples.advantage, np.float64)
    policy = oracles.ppo_clip_loss(log_prob, old, advantage, NUMBERS["clip_epsilon"], mask)
    z = np.linspace(-10.0, 10.0, 4001)
    x = mean[..., None] + std[..., None] * z
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    entropy = np.log(std) + 0.5 * np.log(2 * np.pi * np.e) + np.log(1 / np.cosh(x) ** 2) @ weights
    np.testing.assert_allclose(metrics["loss/policy"], policy, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["policy/entropy"], entropy.sum(-1)[mask].mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["policy/std"], std.mean(-1)[mask].mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["clipped", "tanh"])
def test_units_do_not_matter(policy: Any) -> None:
    """Actions in +-1 that an environment doubles, and actions in +-2: acting and learning are the same."""
    doubled = SPEC._replace(action_space=spaces.Box(-2.0, 2.0, (A,)))
    rows, ends, actions = harness.timesteps(1, T, B), [], []
    for spec in (SPEC, doubled):
        _, learner, record, learn = made(small(**ONCE, policy=policy, state_dependent_std=policy == "tanh"), spec)
        trajectory, _ = record(harness.moved(learner, 1.0), rows)
        actions.append(np.asarray(trajectory.actions))
        after, metrics = learn(learner, trajectory)
        ends.append((after, metrics, trajectory.extras))
    np.testing.assert_allclose(actions[1], 2.0 * actions[0], rtol=1e-6)
    assert np.abs(actions[0]).max() > 0.9
    harness.assert_same(*ends)


def test_numbers_over_the_run() -> None:
    """The clipping range falls to 0 with the run, and `reward_scale` multiplies rewards."""
    _, learner, record, learn = made(small(clip_epsilon_decay=True, learning_rate_schedule="constant"))
    trajectory, _ = record(learner, harness.timesteps(6, T, B))
    extras = trajectory.extras | {"log_prob": trajectory.extras["log_prob"] + 0.15}
    trajectory = trajectory._replace(extras=extras)
    with_number = lambda name, x: learner._replace(hyper=learner.hyper | {name: jnp.float32(x)})  # noqa: E731
    half = learn(learner, trajectory, 0.5)[0].params
    harness.assert_same(half, learn(with_number("clip_epsilon", 0.1), trajectory, 0.0)[0].params)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (half, learn(learner, trajectory)[0].params))))

    rows = trajectory.timesteps
    larger = trajectory._replace(timesteps=rows._replace(reward=3.0 * rows.reward))
    expected = learn(learner, larger)[0].params
    scaled = learn(with_number("reward_scale", 3.0), trajectory)[0].params
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), scaled, expected)


# The adapted learning rate.


def test_an_adapted_rate_goes_by_the_divergence() -> None:
    """Between minibatches, against a loop: parameters go down a slope, and the divergence is that of a parameter."""
    kls, target, rate = [0.0, 0.03, *[0.004] * 6, 0.012, 0.05, -1e-9, 0.001], 0.01, 2e-3
    learner = minibatches_learner(rate)
    adapt = lambda learner: minibatches.run(  # noqa: E731
        lambda params, batch: (params["w"] * batch.row[0, 0], ({"policy/kl": batch.row[0, 1]}, ())),
        learner,
        lambda units, weights: OneRow(jnp.stack([jnp.ones(()), weights])[None]),
        jnp.zeros((len(kls), 1), jnp.int32),
        jnp.asarray(kls),
        optimizer=SGD,
        learning_rate=jnp.float32(rate),
        observation=jnp.zeros((1, 1, 1)),
        target_kl=target,
    )
    after, metrics = harness.alone(adapt)(learner)
    w = 0.0
    for kl in kls:
        w -= rate
        rate = rate / 1.5 if kl > 2 * target else rate * 1.5 if 0 < kl < target / 2 else rate
        rate = min(max(rate, 1e-5), 1e-2)
    np.testing.assert_allclose(after.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad/learning_rate"], rate, rtol=1e-5)


SGD = PPOConfig(optimizer="sgd").make_optimizer(None)


class OneRow(NamedTuple):
    """A minibatch of a factor and a divergence, [1, 2]."""

    row: jax.Array
    core: Any = ()


def minibatches_learner(rate: float) -> Any:
    from podracer.learning import update

    numbers = {"learning_rate": jnp.float32(rate), "max_grad_norm": jnp.float32(np.inf)}
    return update.init({"w": jnp.float32(0.0)}, SGD, numbers)


def test_an_adapted_rate_is_kept() -> None:
    """In the learner's state, from one rollout to the next, whatever the run's progress."""
    config = small(target_kl=1e-6, learning_rate_schedule="constant", policy="tanh")
    _, learner, record, learn = made(config, SPEC)
    assert learner.aux.learning_rate == learner.hyper["learning_rate"]
    trajectory, _ = record(learner, harness.timesteps(0, T, B))
    after, metrics = learn(learner, trajectory, 0.9)
    # All but the first of 8 minibatches are further away than so small a target.
    np.testing.assert_allclose(after.aux.learning_rate, 1e-3 / 1.5**7, rtol=1e-4)
    assert after.aux.learning_rate == metrics["grad/learning_rate"]
    begun = learner._replace(aux=learner.aux._replace(learning_rate=jnp.float32(2e-3)))
    np.testing.assert_allclose(learn(begun, trajectory, 0.9)[0].aux.learning_rate, 2e-3 / 1.5**7, rtol=1e-4)


# Members of observations.


def seen_by_each(config: PPOConfig) -> dict[str, list[bool]]:
    """Members that outputs and values change with."""
    network, _ = config.policy_and_value("ppo", MEMBERS, None)
    params = jax.tree.map(lambda x: x + 0.3, jax.jit(network.init)(KEY))

    @jax.jit
    def results(observation: Any) -> Any:
        rows = nets.Inputs(observation, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ())
        return network.apply(params, rows, ())[:2]

    plain = {name: jnp.full((1, 1, *item.shape), 0.1) for name, item in PARTS.items()}
    before = results(plain)
    changed = {name: results(plain | {name: plain[name] + 1.0}) for name in PARTS}
    differs = lambda i: [bool(np.any(changed[name][i] != before[i])) for name in PARTS]  # noqa: E731
    return {"policy": differs(0), "value": differs(1)}


def test_policy_and_value_see_their_members() -> None:
    own = {"hidden_sizes": (4,), "value_hidden_sizes": (3, 3)}
    assert seen_by_each(PPOConfig(**own)) == {"policy": [True, True], "value": [True, True]}
    apart = PPOConfig(**own, policy_observations=("state",), value_observations=("privileged_state",))
    assert seen_by_each(apart) == {"policy": [True, False], "value": [False, True]}


def test_networks_as_asked_for() -> None:
    config = PPOConfig(hidden_sizes=(4,), value_hidden_sizes=(3, 5), init="lecun", state_dependent_std=True)
    network, law = config.policy_and_value("ppo", SPEC, None)
    params = jax.jit(network.init)(KEY)["params"]
    sizes = {name: [layer["kernel"].shape[1] for layer in params[name].values()] for name in ("torso", "value_torso")}
    assert sizes == {"torso": [4], "value_torso": [3, 5]}
    assert "log_std" not in params
    assert params["policy"]["kernel"].shape == (4, 2 * A) == (4, law.num_outputs)
    for name, inputs in (("policy", 4), ("value", 5)):
        largest = np.abs(params[name]["kernel"]).max()
        assert 0.5 * np.sqrt(3 / inputs) < largest <= np.sqrt(3 / inputs)


# What is refused.


BAD = [
    ({"init_std": 0.1, "min_std": 0.5}, r"^init_std=0.1 must be between min_std=0.5 and max_std; use 0.5\.$"),
    ({"init_std": 3.0, "max_std": 2.0}, r"^init_std=3.0 must be between min_std=0.0 and max_std=2.0; use 2.0\.$"),
    (
        {"target_kl": 0.01},
        r"^target_kl=0.01 sets the learning rate itself; use learning_rate_schedule='constant' and "
        r"learning_rate_warmup=0\.$",
    ),
    (
        {"target_kl": 0.01, "learning_rate_schedule": "constant", "learning_rate": 0.1},
        r"^learning_rate=0.1 must be between 1e-05 and 0.01, where target_kl=0.01 keeps it; use 0.01\.$",
    ),
    (
        {"target_kl": 0.01, "learning_rate_schedule": "constant", "num_epochs": 1, "num_minibatches": 1},
        r"^target_kl=0.01 compares the policy with .* takes one step a rollout; raise one of them\.$",
    ),
    ({"value_hidden_sizes": (8,), "separate": False}, r"^value_hidden_sizes=\(8,\) needs separate=True"),
    ({"value_observations": ("a",), "separate": False}, r"differ, which needs a torso for each: use separate=True"),
    ({"value_observations": ("a",), "core": "lstm"}, r"core='lstm' would show the policy what the value sees"),
    ({"reward_scale": 10.0}, r"^reward_scale=10.0 has no effect with normalize_rewards=True"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_settings_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**fields)


MISFITS = [
    (
        MEMBERS,
        {"value_observations": ("privileged",)},
        r"^value_observations=\('privileged',\): no such member; did you mean 'privileged_state'\?",
    ),
    (SPEC, {"policy_observations": ("state",)}, r"^policy_observations=\('state',\): robot shows Box.* no Dict"),
    (
        SPEC._replace(action_space=spaces.Discrete(2)),
        {"policy": "tanh"},
        r"^policy='tanh' is for actions in a Box, and robot takes Discrete\(num_values=2.*leave it out\.$",
    ),
]


@pytest.mark.parametrize(("spec", "fields", "message"), MISFITS)
def test_settings_that_do_not_fit_the_environment(spec: EnvSpec, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agents.ppo.make(spec, PPOConfig(**fields))


def test_parts_of_ones_own_that_do_not_fit() -> None:
    network = nets.make(SPEC, hidden_sizes=(4,))
    where = r"^policy_observations=\('state',\) is of the library's own network; leave it out\.$"
    with pytest.raises(nets.NetworkError, match=where):
        agents.ppo.make(SPEC, PPOConfig(policy_observations=("state",)), network)
    constant = {"target_kl": 0.01, "learning_rate_schedule": "constant"}
    with pytest.raises(ValueError, match=r"^target_kl=0.01 sets the learning rate, and optimizer= has one of its own"):
        agents.ppo.make(SPEC, PPOConfig(**constant), optimizer=optax.sgd(0.1))
    assert PPOConfig(max_grad_norm=None).max_grad_norm == np.inf
