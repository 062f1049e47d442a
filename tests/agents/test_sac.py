"""SAC and TD3: equations by hand, a reference in NumPy, and tasks whose soft optima are known."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.agents import SACConfig
from podracer.topology import collectives
from podracer.training import presets
from podracer.types import Agent, Batch, EnvSpec, LearnerState, TimeStep, Trajectory
from tests.support import harness
from tests.support.sac_reference import Reference

A, B = 2, 12
SPEC = EnvSpec("box", spaces.Box(-9.0, 9.0, (3,)), spaces.Box([-1.0, -4.0], [3.0, 4.0]))
LOW, HIGH = np.array([-1.0, -4.0]), np.array([3.0, 4.0])
SMALL: dict[str, Any] = {"hidden_sizes": (8, 8), "batch_size": B}
TD3: dict[str, Any] = dict(presets.ANYWHERE["td3"]["sac"].agent)


def batches(n: int, count: int, size: int = B) -> list[Batch]:
    """Samples of n transitions, of which the first is real, and lanes' discounted returns."""
    rows = jax.tree.map(np.asarray, harness.timesteps(3, 60, 16))
    starts = np.array([(t, b) for b in range(16) for t in range(60 - n) if not rows.first[t + 1, b]])
    rng, found = np.random.default_rng(4), []
    for _ in range(count):
        t, b = starts[rng.choice(len(starts), size, replace=False)].T
        steps = TimeStep(*(x[t + np.arange(n + 1)[:, None], b] for x in rows))  # type: ignore[arg-type]
        actions = rng.uniform(LOW, HIGH, (n, size, A)).astype(np.float32)
        extras = {"discounted_return": rng.normal(0.0, 9.0, (n, size)).astype(np.float32)}
        state = nets.ActorState((), (), ())
        version: Any = np.zeros((n, size), np.int32)
        trajectory = Trajectory(steps, actions, extras, state, version, version[0])
        found.append(Batch(trajectory, np.ones(size, np.float32), np.ones(size, np.int32)))  # type: ignore[arg-type]
    return found


def layers(params: Any, heads: tuple[str, ...]) -> list[Any]:
    """Weights and biases, float64, heads side by side as the last."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    torso = [params["torso"][name] for name in sorted(params["torso"])]
    last = [np.concatenate([params[head][part] for head in heads], -1) for part in ("kernel", "bias")]
    return [(x["kernel"], x["bias"]) for x in torso] + [tuple(last)]


def networks(learner: LearnerState, gaussian: bool, of: Any) -> tuple[Any, Any]:
    heads = ("policy", "std") if gaussian else ("policy",)
    critics = [layers(jax.tree.map(lambda x, i=i: x[i], of["critic"]), ("q",)) for i in range(2)]
    return layers(of.get("policy", learner.params["policy"]), heads), critics


CASES: dict[str, dict[str, Any]] = {
    "sac": {"n_step": 3, "policy_interval": 2, "alpha_init": 0.3, "alpha_rate": 2.0, "target_entropy": -2.0},
    "td3": {**TD3, "n_step": 1, "reward_scale": 0.5},
    "mean": {"critics": "mean", "target_policy": True, "policy_rate": 0.5, "max_std": 1.5},
    "categorical": {
        "n_step": 3,
        "alpha_init": 0.3,
        "values": "categorical",
        "num_bins": 7,
        "max_value": 1.5,
        "optimizer": "adamw",
        "optimizer_b2": 0.9,
        "weight_decay": 0.5,
        "value_hidden_sizes": (6,),
        "normalize_observations": True,
        "statistics_min_std": 0.5,
        "statistics_clip": 1.0,
        "normalize_rewards": True,
        "learning_rate_schedule": "linear",
        "final_rate": 0.5,
    },
    "categorical mean": {"values": "categorical", "num_bins": 7, "max_value": 1.0, "critics": "mean", **TD3},
}


@pytest.mark.parametrize(
    "name",
    ["sac", *(pytest.param(x, marks=pytest.mark.slow) for x in ("td3", "categorical", "mean", "categorical mean"))],
)
def test_updates_are_those_of_the_reference(name: str) -> None:
    """Critics, policy, alpha, targets and statistics after 20 updates of NumPy's."""
    given: dict[str, Any] = SMALL | {"learning_rate": 1e-2, "tau": 0.1, "discount": 0.9} | CASES[name]
    config = SACConfig(**given)
    agent, D = agents.sac.make(SPEC, config), config.policy_interval
    learner = harness.learner_of(agent)
    gaussian = config.policy == "gaussian"
    policy, critics = networks(learner, gaussian, learner.params)
    log_alpha = float(learner.params.get("log_alpha", 0.0))
    progress = 0.4 if config.learning_rate_schedule == "linear" else 0.0
    reference = Reference(policy, critics, log_alpha, vars(config), progress)
    reference.target_policy, reference.target_critics = networks(learner, gaussian, learner.aux)
    learn, noise_of = harness.alone(agent.learn), jax.jit(lambda key: jax.random.normal(key, (2, B, A)))
    metrics: Any = {}
    for number, batch in enumerate(batches(config.n_step, 20 // D, D * B)):
        key = jax.random.key(number)
        learner, metrics, priorities = learn(learner, batch, jnp.float32(0.4), key)
        rows = {name: np.asarray(x, np.float64) for name, x in batch.trajectory.timesteps._asdict().items()}
        rows |= {name: np.asarray(x, np.float64) for name, x in batch.trajectory.extras.items()}
        units = (np.asarray(batch.trajectory.actions[0], np.float64) - (HIGH + LOW) / 2) / ((HIGH - LOW) / 2)
        assert priorities.shape == (D * B,)
        # D updates, in blocks of the draw; each has its own noise.
        keys = [key] if D == 1 else jax.random.split(key, D)
        for i in range(D):
            block = slice(i * B, (i + 1) * B)
            noise = np.asarray(noise_of(keys[i]), np.float64)
            reference.update({name: x[:, block] for name, x in rows.items()}, units[block], noise)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, networks(learner, gaussian, learner.params), (reference.policy, reference.critics))
    if gaussian:
        close(learner.params["log_alpha"], reference.log_alpha)
        assert float(metrics["policy/alpha"]) == pytest.approx(D * math.exp(reference.log_alpha), rel=0.05)
        assert abs(reference.log_alpha - log_alpha) > 0.01
    found = networks(learner, gaussian, learner.aux)
    close(found[1][0][0][0], reference.target_critics[0][0][0])
    if config.target_policy:
        close(found[0][0][0], reference.target_policy[0][0])
    statistics = learner.aux["statistics"]
    if config.normalize_rewards:
        close(statistics.observation.mean, reference.moments.mean)
        close(statistics.largest_return, reference.largest_return)
    elif config.max_value:
        assert 0.01 < float(metrics["value/outside"]) < 0.99
    assert int(learner.num_updates) == 20
    # Sums over a block's updates.
    assert float(metrics["grad/learning_rate"]) == pytest.approx(D * reference.critic_adams[0].rate, rel=1e-5)
    assert metrics["loss/policy"].shape == ()


def test_shards_meet_twice_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the critics, and for policy and alpha together."""
    agent, calls = agents.sac.make(SPEC, SACConfig(**SMALL)), []
    global_sum, batch = collectives.global_sum, jax.tree.map(jnp.asarray, batches(1, 1)[0])
    monkeypatch.setattr(collectives, "global_sum", lambda tree: (calls.append(tree), global_sum(tree))[1])

    def learn(key: Any) -> Any:
        learner = agent.init(jax.random.key(0), harness.hyper(agent))
        return agent.learn(learner, batch, jnp.float32(0), jax.random.wrap_key_data(key))

    for axis in collectives.DATA_AXES:
        learn = jax.vmap(learn, axis_name=axis)
    jax.eval_shape(learn, jnp.zeros((1, 1, 2), jnp.uint32))
    assert len(calls) == 2


# y by hand: rewards 1, 2, 4, discounts 0.5, and a critic that says 10 everywhere.


@pytest.mark.parametrize(
    ("n", "end", "y"),
    [
        (1, None, 1 + 0.5 * 10),
        (1, ("terminated", 1), 1.0),
        (1, ("truncated", 1), 1 + 0.5 * 10),
        (3, None, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 10),
        (3, ("terminated", 1), 1.0),
        (3, ("terminated", 2), 1 + 0.5 * 2),
        (3, ("terminated", 3), 1 + 0.5 * 2 + 0.25 * 4),
        (3, ("truncated", 1), 1 + 0.5 * 10),
        (3, ("truncated", 2), 1 + 0.5 * 2 + 0.25 * 10),
        (3, ("truncated", 3), 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 10),
    ],
)
def test_targets_by_hand(n: int, end: tuple[str, int] | None, y: float) -> None:
    first, last, discount = np.zeros(n + 1, bool), np.zeros(n + 1, bool), np.ones(n + 1, np.float32)
    reward = np.array([0.0, 1.0, 2.0, 4.0], np.float32)[: n + 1]
    if end:
        kind, row = end
        last[row] = True
        discount[row] = kind == "truncated"
        first[row + 1 : row + 2] = True
        reward[row + 1 :] = 77.0  # another episode's
    observation = np.arange(n + 1, dtype=np.float32)[:, None, None] * np.ones((1, 1, 3), np.float32)
    rows = TimeStep(observation, *(x[:, None] for x in (reward, discount, first, last)))  # type: ignore[arg-type]
    version: Any = np.zeros((n, 1), np.int32)
    actions = np.ones((n, 1, A), np.float32)
    trajectory = Trajectory(rows, actions, {}, nets.ActorState((), (), ()), version, version[0])
    assert by_hand(n)(trajectory) == pytest.approx(y, rel=1e-6)


@functools.cache
def by_hand(n: int) -> Any:
    """A function of a trajectory of one lane that says what y the critics are given."""
    seen: list[Any] = []

    def loss(outputs: jax.Array, target: jax.Array, *rest: Any) -> Any:
        del rest
        seen.append(target)
        return jnp.sum(outputs), {"target": target[1, 0, 0]}, target[0, :, 0]

    constant = nets.Critic(
        lambda key: jnp.full(2, 10.0),
        lambda params, inputs, action: jnp.broadcast_to(params[:, None, None], (2, inputs.reward.shape[1], 1)),
    )
    policy = nets.critics.make(SPEC, (4,), "relu", num_critics=2, num_actions=A, with_std=False).policy
    config = SACConfig(policy="deterministic", discount=0.5, n_step=n, batch_size=1, policy_rate=0.0)
    agent = agents.sac.make(SPEC, config, nets.ActorCritic(policy, constant), loss)
    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    learn = harness.alone(agent.learn)
    batch = lambda trajectory: Batch(trajectory, np.ones(1, np.float32), np.ones(1, np.int32))  # type: ignore[arg-type]  # noqa: E731
    return lambda trajectory: float(learn(learner, batch(trajectory), jnp.float32(0), jax.random.key(0))[1]["target"])


def test_a_return_at_an_end_is_in_the_scale_of_rewards() -> None:
    """The only reward ends an episode, whose last row is no sample's first."""
    config = SACConfig(normalize_rewards=True, discount=0.9)
    zeros, ends = np.zeros((2, 4), np.float32), np.array([[0, 0, 0, 0], [0, 0, 0, 8]], np.float32)
    steps = TimeStep(np.zeros((2, 4, 3), np.float32), ends, 1 - ends / 8, zeros.astype(bool), ends > 0)  # type: ignore[arg-type]
    trajectory = Trajectory(steps, zeros[:1], {"discounted_return": zeros[:1]}, (), zeros[:1], zeros[0])  # type: ignore[arg-type]
    hyper = {"discount": jnp.float32(0.9), "reward_scale": jnp.float32(1.0)}

    def scaled(batch: Batch) -> Any:
        return config.normalize_samples(config.initial_statistics(SPEC), batch, 2.0, hyper)

    batch = Batch(trajectory, np.ones(4, np.float32), np.ones(4, np.int32))  # type: ignore[arg-type]
    statistics, _, factor = harness.alone(scaled)(batch)
    assert float(statistics.largest_return) == 8.0
    assert float(statistics.returns.variance) == pytest.approx(12.0, rel=1e-3)  # of 0, 0, 0 and 8
    assert float(factor) == pytest.approx(1 / 4)


@pytest.mark.parametrize("settings", [{"reward_scale": 0.1}, {"normalize_rewards": True}])
def test_networks_see_rewards_as_they_are(settings: dict[str, Any]) -> None:
    """In learning as in acting, though targets have scaled ones."""

    def read(params: Any, inputs: Any, action: jax.Array) -> jax.Array:
        return jnp.broadcast_to(inputs.reward[0, :, None] + 0 * params, (2, len(action), 1))

    policy = nets.critics.make(SPEC, (4,), "relu", num_critics=2, num_actions=A, with_std=False).policy
    loss = lambda outputs, target, *_: (jnp.sum(outputs), {"seen": outputs[0, 0, 0]}, target[0, :, 0])  # noqa: E731
    config = SACConfig(policy="deterministic", batch_size=1, **settings)
    agent = agents.sac.make(SPEC, config, nets.ActorCritic(policy, nets.Critic(lambda key: jnp.zeros(()), read)), loss)
    zeros, no = np.zeros((2, 1), np.float32), np.zeros((2, 1), bool)
    rows = TimeStep(np.zeros((2, 1, 3), np.float32), zeros + 10, zeros + 1, no, no)  # type: ignore[arg-type]
    extras, version = {"discounted_return": zeros[:1]}, np.zeros((1, 1), np.int32)
    actions = np.ones((1, 1, A), np.float32)
    trajectory = Trajectory(rows, actions, extras, nets.ActorState((), (), ()), version, version[0])  # type: ignore[arg-type]
    batch = Batch(trajectory, np.ones(1, np.float32), np.ones(1, np.int32))  # type: ignore[arg-type]
    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    assert harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(0))[1]["seen"] == 10.0


def made(space: Any = SPEC.action_space, observation: Any = SPEC.observation_space, **config: Any) -> Agent:
    return agents.sac.make(SPEC._replace(action_space=space, observation_space=observation), SACConfig(**config))


# Acting.


def acted(agent: Agent, version: int, memory: Any = None, first: Any = None, key: int = 2) -> tuple[np.ndarray, Any]:
    """Actions of 64 lanes in equal rows, and the memory after."""
    N = 64
    learner = harness.learner_of(agent)
    learner = learner._replace(num_updates=jnp.int32(version))
    rows = TimeStep(jnp.ones((N, 3)), jnp.zeros(N), jnp.ones(N), jnp.ones(N, bool), jnp.zeros(N, bool))
    rows = rows._replace(first=rows.first if first is None else first)
    memory = agent.start(jnp.arange(N, dtype=jnp.int32), N) if memory is None else memory
    act = jax.jit(agent.act, static_argnums=4)
    actions, _, memory = act(agent.actor_params(learner, jnp.float32(0)), memory, rows, jax.random.key(key), False)
    return np.asarray(actions), memory


@pytest.mark.slow
@pytest.mark.nightly
def test_actions_are_uniform_before_the_first_update() -> None:
    agent = made(policy="deterministic", **SMALL)
    random, _ = acted(agent, 0)
    assert np.all(np.std(random, axis=0) > 0.8 * (HIGH - LOW) / math.sqrt(12))
    assert np.all((random >= LOW) & (random <= HIGH))
    assert np.all(np.std(acted(agent, 1)[0], axis=0) < 1e-6), "no noise"
    untrained = made(policy="deterministic", random_start=False, **SMALL)
    np.testing.assert_array_equal(acted(untrained, 0)[0], acted(untrained, 1)[0])


@pytest.mark.slow
def test_a_lane_keeps_its_noise_for_an_episode() -> None:
    agent = made(policy="deterministic", noise=(0.1, 0.4), **SMALL)
    _, memory = acted(agent, 1)
    assert 0.1 <= float(memory.std.min()) < 0.2 < 0.3 < float(memory.std.max()) <= 0.4
    first = jnp.arange(64) % 2 == 0
    _, after = acted(agent, 1, memory, first, key=3)
    np.testing.assert_array_equal(np.asarray(after.std == memory.std), ~np.asarray(first))


@pytest.mark.slow
def test_the_first_std_is_init_std() -> None:
    agent = made(init_std=0.3, **SMALL)
    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    head = learner.params["policy"]["params"]["std"]
    assert not np.any(head["kernel"])
    low, high = math.log(0.006738), math.log(7.389)
    stds = np.exp(low + 0.5 * (high - low) * (np.tanh(head["bias"]) + 1))
    np.testing.assert_allclose(stds, 0.3, rtol=1e-5)
    made(init_std=0.5, min_std=0.5)
