"""Actors: the same actions as evaluation, from memory of their own, in this process and from exported files."""

import dataclasses
import errno
import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.result import export, policy
from podracer.result.export import load_policy
from podracer.types import EnvSpec, TimeStep
from tests.support import every_core, tiers

T, B = 14, 3

VECTOR = EnvSpec("vector", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4))
BOX = EnvSpec("box", spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-2.0, 2.0, (2,)))
IMAGES = EnvSpec("images", spaces.Box(0, 255, (36, 36), np.uint8), spaces.Discrete(3))
NAMED = EnvSpec("named", spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0.0, 1.0, (2,))}), spaces.Discrete(2))

SMALL = {"hidden_sizes": (8,)}
CASES = {
    "ppo": (agents.ppo.make, agents.PPOConfig(**SMALL), VECTOR),
    "ppo box": (agents.ppo.make, agents.PPOConfig(**SMALL, normalize_observations=True), BOX),
    "ppo named": (agents.ppo.make, agents.PPOConfig(**SMALL), NAMED),
    "ppo frames": (agents.ppo.make, agents.PPOConfig(**SMALL, frame_stack=3), VECTOR),
    "ppo lstm": (agents.ppo.make, agents.PPOConfig(**SMALL, core="lstm", core_size=6), BOX),
    "vtrace lstm frames": (
        agents.vtrace.make,
        agents.VTraceConfig(**SMALL, core="lstm", core_size=6, frame_stack=2),
        VECTOR,
    ),
    "vtrace images": (agents.vtrace.make, agents.VTraceConfig(torso="shallow", frame_stack=4), IMAGES),
    "r2d2": (
        agents.r2d2.make,
        agents.R2D2Config(**SMALL, core="lstm", core_size=6, frame_stack=2, evaluation_epsilon=0.5),
        VECTOR,
    ),
    "dqn": (
        agents.dqn.make,
        agents.DQNConfig(**SMALL, values="categorical", noise=9.0, evaluation_epsilon=0.5),
        VECTOR,
    ),
    "sac": (agents.sac.make, agents.SACConfig(**SMALL), BOX),
    "td3": (
        agents.sac.make,
        agents.SACConfig(**SMALL, policy="deterministic", noise=(0.1, 0.9), normalize_observations=True),
        BOX,
    ),
    "pqn": (agents.pqn.make, agents.PQNConfig(**SMALL, evaluation_epsilon=0.5), VECTOR),
    "muzero": (
        agents.muzero.make,
        agents.MuZeroConfig(**SMALL, state_size=6, head_size=8, num_bins=11, simulations=4, frame_stack=2),
        VECTOR,
    ),
}
CASES["efficientzero"] = (
    agents.efficientzero.make,
    agents.EfficientZeroConfig(
        **SMALL, state_size=6, head_size=8, lstm_size=4, projection_size=8, num_bins=11, simulations=4, frame_stack=2
    ),
    VECTOR,
)
CASES["ppo every core"] = (
    lambda spec, config: agents.ppo.make(spec, config, every_core.network(spec)),
    agents.PPOConfig(),
    BOX,
)
MEMORY = {"ppo": 0, "ppo box": 0, "ppo named": 0, "ppo frames": 1, "ppo lstm": 3, "vtrace lstm frames": 4}
MEMORY |= {"vtrace images": 1, "r2d2": 4, "dqn": 0, "pqn": 0, "sac": 0, "td3": 0, "efficientzero": 1, "muzero": 1}


class Case:
    """An agent that was never trained, but whose head is large enough that its actions differ."""

    def __init__(self, name):
        self.name = name
        make, config, self.spec = CASES[name]
        self.agent = make(self.spec, config)
        hyper = {key: jnp.float32(value) for key, value in self.agent.hyper.items()}
        learner = jax.jit(self.agent.init)(jax.random.key(3), hyper)
        if name in ("efficientzero", "muzero"):  # their heads begin at 0
            noise = lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)  # noqa: E731
            learner = learner._replace(params=jax.tree.map(lambda x: x + noise(x), learner.params))
        if name != "ppo every core":  # whose gates would be shut
            learner = learner._replace(params=jax.tree.map(lambda x: 20.0 * x, learner.params))
        self.params = self.agent.actor_params(learner, jnp.float32(1.0))
        keys = jax.random.split(jax.random.key(1), (T, B))
        self.observations = jax.device_get(jax.vmap(jax.vmap(self.spec.observation_space.sample))(keys))
        rng = np.random.default_rng(0)
        self.first = rng.random((T, B)) < 0.25
        self.first[0] = True
        self.reward = np.where(self.first, 0.0, rng.normal(size=(T, B))).astype(np.float32)

    def policy(self, **settings):
        return policy.from_agent(self.agent, self.spec, self.params, **settings)

    def row(self, t, lane=None):
        pick = lambda x: x[t] if lane is None else x[t, lane]  # noqa: E731
        return jax.tree.map(pick, self.observations)

    @functools.cache  # noqa: B019 - as long as the module's cases
    def evaluated(self):
        """The actions of an evaluation without random actions for these rows, [T, B, ...]: the agent's own functions,
        all of its memory, and a key for each row."""
        agent = self.agent
        if hasattr(agent.config, "evaluation_epsilon"):
            make, config, spec = CASES[self.name]
            agent = make(spec, dataclasses.replace(config, evaluation_epsilon=0.0))
        act = jax.jit(lambda memory, row, key: agent.act(self.params, memory, row, key, True))
        memory, actions = agent.start(jnp.arange(B, dtype=jnp.int32), B), []
        for t in range(T):
            ones = np.ones(B, np.float32)
            row = TimeStep(self.row(t), self.reward[t], ones, self.first[t], np.zeros(B, bool))
            action, _, memory = act(memory, row, jax.random.key(t))
            actions.append(np.asarray(action))
        return np.stack(actions)


@pytest.fixture(scope="module")
def case():
    made = {}
    return lambda name: made.setdefault(name, Case(name))


@pytest.mark.parametrize(
    "name",
    [
        *("vtrace lstm frames", "dqn"),
        *tiers.slow("ppo box", "r2d2", "ppo frames", "ppo lstm", "vtrace images", "pqn", "sac", "td3", "muzero"),
        *tiers.nightly("efficientzero"),
    ],
)
def test_actors_act_as_evaluation_does(case, name):
    case = case(name)
    expected = case.evaluated()
    assert (expected != expected[0, 0]).any()
    actor = policy.Actor(case.policy(), batch=B)
    rewards = np.where(case.first, 99.0, case.reward)  # those of first rows do not count
    actions = [actor(case.row(t), rewards[t], case.first[t]) for t in range(T)]
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    assert len(case.policy().start(1)) == MEMORY[name]


@pytest.mark.parametrize("name", ["ppo box", "vtrace lstm frames"])
def test_one_lane_acts_alone(case, name):
    """Its episodes open where `reset` says so."""
    case = case(name)
    expected = case.evaluated()
    actor = policy.Actor(case.policy())
    for t in range(T):
        if case.first[t, 1]:
            actor.reset()
        action = actor(case.row(t, 1), case.reward[t, 1])
        np.testing.assert_allclose(action, expected[t, 1], rtol=1e-5)
        if isinstance(case.spec.action_space, spaces.Discrete):
            assert type(action) is int
        else:
            assert case.spec.action_space.contains(action)


@pytest.mark.parametrize(
    "name",
    [
        "r2d2",
        *tiers.slow("ppo box", "ppo every core", "vtrace images", "sac"),
        *tiers.nightly("efficientzero", "muzero"),
    ],
)
def test_exported_policies_act_alike(case, name, tmp_path):
    case = case(name)
    card = {"agent": name, "environment": case.spec.name, "source": "Never trained.", "evaluation": None, "mean": None}
    export.save(case.policy(), tmp_path / "new", card)
    actor = load_policy(tmp_path / "new", batch=B)
    actions = [actor(case.row(t), case.reward[t], case.first[t]) for t in range(T)]
    np.testing.assert_allclose(actions, case.evaluated(), rtol=1e-4, atol=1e-5)
    # The check would notice another policy.
    with np.load(tmp_path / "new" / "check.npz") as rows:
        changed = dict(rows)
    changed["action"] = changed["action"] + np.eye(1, export.CHECK_ROWS, 5, dtype=int)[0].reshape(
        -1, *(1,) * (changed["action"].ndim - 1)
    )
    np.savez(tmp_path / "new" / "check.npz", **changed)
    with pytest.raises(RuntimeError, match=r"rows \[5\]"):
        export.check(tmp_path / "new")


def test_exported_policies_need_no_agents(case, tmp_path):
    case = case("ppo lstm")
    card = {"agent": "ppo", "environment": "box", "source": "", "evaluation": "Mean return 1.", "mean": 1.0}
    export.save(case.policy(), tmp_path, card)
    script = f"""
        import sys
        sys.modules["podracer.agents"] = sys.modules["podracer.nets"] = sys.modules["flax"] = None
        import numpy as np, podracer
        actor = podracer.load_policy({str(tmp_path)!r}, batch=5)
        rows = np.load({str(tmp_path / "check.npz")!r})
        same = lambda x: np.repeat(x[None], 5, 0)
        for i in range(16):
            action = actor(same(rows["observation"][i]), same(rows["reward"][i]), same(rows["first"][i]))
            np.testing.assert_allclose(action, same(rows["action"][i]), rtol=1e-4, atol=1e-5)
        print("same", *(m for m in sys.modules if m.startswith("podracer.a")))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert ran.stdout.split() == ["same", "podracer.agents"], ran.stderr
    text = (tmp_path / "MODEL_CARD.md").read_text()
    assert text.startswith('---\nlibrary_name: "podracer"\n')
    assert "value: 1, verified: false" in text
    assert json.loads((tmp_path / "spec.json").read_text())["uses_reward"] is True


def test_what_is_no_export_is_refused(case, tmp_path):
    with pytest.raises(ValueError, match="holds no exported policy"):
        load_policy(tmp_path)
    case = case("ppo")
    card = {"agent": "ppo", "environment": "vector", "source": "", "evaluation": None, "mean": None}
    export.save(case.policy(), tmp_path, card)
    spec = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps(spec | {"format": 2}))
    with pytest.raises(ValueError, match="has format 2, and podracer .* reads format 1"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="cannot write to"):
        export.save(case.policy(), tmp_path / "spec.json" / "below", card)
    (tmp_path / "policy.stablehlo").write_bytes(b"nothing")
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"policy\.stablehlo is damaged \(.*\); export it anew\.$"):
        load_policy(tmp_path)
    foreign, row = 'callback @"somewhere"', jax.ShapeDtypeStruct((1, 3), jnp.float32)
    native = jax.ffi.ffi_call(foreign, jax.ShapeDtypeStruct((1,), jnp.int32))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(foreign)]
    exported = jax.export.export(jax.jit(native), platforms=["cpu"], disabled_checks=unchecked)(row)
    (tmp_path / "policy.stablehlo").write_bytes(exported.serialize())
    with pytest.raises(ValueError, match=r"calls native code by the name of callback .*: it was not run\.$"):
        load_policy(tmp_path)


def test_what_jax_exports_by_itself_may_be_called():
    """Also by a network of one's own."""

    def f(x):
        return jnp.linalg.qr(x)[0], jax.lax.top_k(x, 2), jnp.linalg.eigh(x), jax.random.normal(jax.random.key(0), (3,))

    exported = jax.export.export(jax.jit(f), platforms=export.PLATFORMS)(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    called = export._call_targets(exported.mlir_module())
    assert {"lapack_sgeqrf_ffi", "cusolver_syevd_ffi", "Eigh"} <= called <= export.STABLE_CALLS
    assert export._call_targets('"stablehlo.custom_call"(%0) {call_target_name = "Qr"}') - export.STABLE_CALLS


def test_an_export_that_fails_leaves_the_one_before(case, tmp_path, monkeypatch):
    case = case("ppo")
    card = {"agent": "ppo", "environment": "vector", "source": "", "evaluation": None, "mean": None}
    export.save(case.policy(), tmp_path, card)
    files = lambda: {(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}  # noqa: E731
    before = files()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def other(*_):
        raise RuntimeError("the policy acts differently here")

    for name, problem in (("_card", full), ("check", other)):
        with monkeypatch.context() as patch:
            patch.setattr(export, name, problem)
            with pytest.raises((ValueError, RuntimeError), match="No space left on device|acts differently"):
                export.save(case.policy(), tmp_path, card)
        assert files() == before
    export.save(case.policy(), tmp_path, card)
    assert {name for name, *_ in files()} == {name for name, *_ in before}
    assert not files() & before, "and one that does not fail replaces all of it"


def test_samples_follow_the_policy(case):
    case = case("ppo")
    case.params = case.params._replace(params=jax.tree.map(lambda x: x / 20, case.params.params))
    n = 4000
    observation = np.broadcast_to(case.row(0)[0], (n, 3))
    draw = lambda seed: policy.Actor(case.policy(greedy=False, seed=seed), batch=n)  # noqa: E731
    actor = draw(5)
    first, second = actor(observation), actor(observation)
    assert (first != second).any(), "every call has a key of its own"
    np.testing.assert_array_equal(first, draw(5)(observation))
    assert (first != draw(6)(observation)).any()
    network = nets.make(VECTOR, hidden_sizes=(8,), activation="tanh", separate=True)
    memory = nets.start(network, VECTOR, n)
    zeros = np.zeros(n, np.float32)
    row = TimeStep(observation, zeros, zeros + 1, np.ones(n, bool), np.zeros(n, bool))
    probabilities = jax.nn.softmax(nets.step(network, case.params.params, memory, row)[0][0])
    counts = np.bincount(first, minlength=4)
    assert np.all(np.abs(counts / n - probabilities) < 4.0 * np.sqrt(probabilities * (1 - probabilities) / n))


def test_agents_that_need_a_key_in_evaluation_have_another_at_every_step(case, tmp_path):
    """One of one's own, without its best actions: they are drawn, and not written to files."""
    case = case("pqn")
    drawn = policy.from_agent(case.agent._replace(best=None), VECTOR, case.params)
    n, known = 256, case.policy()
    actor, best = policy.Actor(drawn, batch=n), policy.Actor(known, batch=n)
    row = np.broadcast_to(case.row(0)[0], (n, 3))
    random = np.stack([actor(row) != best(row) for _ in range(4)])
    assert (known.deterministic, drawn.deterministic) == (True, False)
    np.testing.assert_allclose(random.mean(axis=1), 0.5 * 3 / 4, atol=0.15)
    assert np.mean(random[0] == random[1]) < 0.7, "each step draws anew"
    with pytest.raises(ValueError, match="the actions of this one depend on chance"):
        export.save(drawn, tmp_path, {})


@pytest.mark.slow
def test_what_an_actor_needs_is_said(case):
    recurrent = policy.Actor(case("ppo lstm").policy())
    recurrent(np.zeros(3))
    with pytest.raises(ValueError, match=r"this policy sees rewards: actor\(observation, reward\)"):
        recurrent(np.zeros(3))
    frames = policy.Actor(case("ppo frames").policy(), batch=2)
    frames(np.zeros((2, 3)))
    frames(np.zeros((2, 3)))  # without rewards: it does not see them
    with pytest.raises(ValueError, match=r"first has shape \[3\]; this actor has a batch of 2"):
        frames(np.zeros((2, 3)), first=np.zeros(3, bool))
    with pytest.raises(ValueError, match=r"float64 \(3,\); the environment shows Box.* in a batch of 2"):
        frames(np.zeros(3))
    named = policy.Actor(case("ppo named").policy())
    assert named({"a": 1, "b": [0.5, 0.5]}) in (0, 1)
    with pytest.raises(ValueError, match=r"the observation is \['a'\]; the environment shows Dict"):
        named({"a": 1})
    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        policy.Actor(case("ppo").policy(), batch=0)


def test_a_mask_may_have_the_environments_axes():
    space = spaces.Dict({"t": spaces.Discrete(9), "action_mask": spaces.Box(0, 1, (6,), np.int8)})
    mask = np.array([[1, 0], [0, 1], [1, 1]], bool)
    for lanes, shown in ((None, mask), (2, np.stack([mask, ~mask])), (None, mask.ravel())):
        t = np.zeros(() if lanes is None else lanes, np.int32)
        found = policy.fit(space, {"t": t, "action_mask": shown}, lanes)["action_mask"]
        np.testing.assert_array_equal(found, shown.reshape(-1, 6))
        assert found.dtype == np.int8
    with pytest.raises(ValueError, match=r"the observation\['action_mask'\] holds bool \(2, 2\)"):
        policy.fit(space, {"t": np.int32(0), "action_mask": mask[:2]}, None)


PARTS = {"a": spaces.Box(-1.0, 1.0, (3,)), "b": spaces.Box(-1.0, 1.0, (2,)), "c": spaces.Discrete(3)}
APART = agents.PPOConfig(
    **SMALL, policy_observations=("a",), value_observations=("b", "c"), normalize_observations=True
)


def test_a_policy_asks_for_what_it_sees():
    """Members that the value alone sees are no part of it, and may be given all the same."""
    spec = BOX._replace(observation_space=spaces.Dict(PARTS))
    agent = agents.ppo.make(spec, APART)
    learner = jax.jit(agent.init)(jax.random.key(3), {name: jnp.float32(x) for name, x in agent.hyper.items()})
    learner = learner._replace(params=jax.tree.map(lambda x: 20.0 * x, learner.params))
    found = policy.from_agent(agent, spec, agent.actor_params(learner, jnp.float32(0)))
    assert found.spec.observation_space == spaces.Dict({"a": PARTS["a"]})
    actor, a = policy.Actor(found), np.array([0.3, -0.2, 0.9], np.float32)
    alone = actor({"a": a})
    np.testing.assert_array_equal(alone, actor({"a": a, "b": np.ones(2, np.float32), "c": np.int32(2)}))
    assert np.any(alone != actor({"a": -a}))
    with pytest.raises(ValueError, match=r"the observation is \['b'\]; the environment shows Dict"):
        actor({"b": np.ones(2, np.float32)})


@pytest.mark.slow
def test_an_export_has_what_it_needs(tmp_path):
    """No weight of a value's large network, and one member of three."""
    spec = BOX._replace(observation_space=spaces.Dict(PARTS))
    agent = agents.ppo.make(spec, dataclasses.replace(APART, value_hidden_sizes=(256, 256)))
    learner = jax.jit(agent.init)(jax.random.key(3), {name: jnp.float32(x) for name, x in agent.hyper.items()})
    found = policy.from_agent(agent, spec, agent.actor_params(learner, jnp.float32(0)))
    card = {"agent": "ppo", "environment": "box", "source": "", "evaluation": None, "mean": None}
    export.save(found, tmp_path, card)
    assert (tmp_path / "policy.stablehlo").stat().st_size < 4 * 256 * 256 / 2
    assert load_policy(tmp_path).policy.spec.observation_space == found.spec.observation_space
