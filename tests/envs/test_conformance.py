"""Every environment conforms; environments with one fault each are refused with a sentence about that fault."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax import play
from envs_jax.testing import ConformanceError, check_briefly, check_environment, validate_protocol
from podracer import spaces
from podracer.types import Environment, EnvSpec, Transition
from tests.support.compilations import compilations

QUICK = ("t_maze", "tic_tac_toe")
SEVERAL = ("minigrid_", "minatar_")
"""Families whose members have one interface: one of each is slow, the others are nightly."""


def tier(name):
    if name in QUICK:
        return []
    alike = name.startswith(SEVERAL) and name not in ("minigrid_doorkey", "minatar_breakout")
    return [pytest.mark.slow, pytest.mark.nightly] if alike else [pytest.mark.slow]


VARIANTS = [
    *(pytest.param(name, {}, marks=tier(name)) for name in envs_jax.names()),
    pytest.param("gridworld", {"task": "random_goals", "flatten": False}, marks=pytest.mark.slow),
    pytest.param(
        "gridworld", {"task": "delayed_chain", "noisy_rewards": True, "distractor_bits": 2}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_environment_conforms(name, options):
    environment = envs_jax.make(name, **options)
    assert isinstance(environment, Environment)
    validate_protocol(environment)  # under the strict promotion of these tests
    check_environment(environment, episodes=3)


def test_validation_only_traces():
    """It runs before every training: nothing in it may compile or execute."""
    environment = envs_jax.make("gridworld")
    with compilations() as compiled:
        validate_protocol(environment)
    assert not compiled


class State(NamedTuple):
    x: jax.Array
    steps: jax.Array


class Good:
    """A walk to the right by a random step: dict observations, ends at 3 or after 5 steps."""

    spec = EnvSpec(
        name="good",
        observation_space=spaces.Dict(
            {
                "place": spaces.Box(-100.0, 100.0, (1,)),
                "clock": spaces.Discrete(6),
                "pair": spaces.MultiDiscrete((6, 2)),
            }
        ),
        action_space=spaces.Box(-1.0, 1.0, ()),
        max_episode_steps=5,
    )

    def reset(self, key):
        return State(x=jax.random.uniform(key), steps=jnp.int32(0))

    def step(self, state, action, key):
        state = State(x=state.x + action + jax.random.uniform(key), steps=state.steps + 1)
        terminated = state.x > 3
        discount = 1.0 - terminated.astype(jnp.float32)
        return state, Transition(reward=state.x, discount=discount, last=terminated | (state.steps >= 5))

    def observe(self, state):
        return {"place": state.x[None], "clock": state.steps, "pair": jnp.stack([state.steps, state.steps % 2])}

    def render(self, state):
        return jnp.zeros((4, 6, 3), jnp.uint8)


def test_a_sound_environment_passes():
    check_environment(Good(), episodes=1, steps=30)


def good_transition(**changes):
    return Transition(jnp.float32(0), jnp.float32(1), jnp.bool_(False))._replace(**changes)


def stepping(change):
    """An environment whose `step` returns `change(state, transition)`."""

    class Mine(Good):
        def step(self, state, action, key):
            return change(*super().step(state, action, key))

    return Mine()


def observing(change):
    """An environment whose observation is changed."""

    class Mine(Good):
        def observe(self, state):
            return change(state, super().observe(state))

    return Mine()


def with_attributes(**attributes):
    return type("Mine", (Good,), attributes)()


def with_spec(**changes):
    return with_attributes(spec=Good.spec._replace(**changes))


class KeyedState(NamedTuple):
    x: jax.Array
    steps: jax.Array
    key: jax.Array


STATIC_FAULTS = {
    "no spec": (with_attributes(spec=None), r"Mine\.spec is None \(expected a podracer\.types\.EnvSpec\)"),
    "name": (with_spec(name=""), r"Mine\.spec\.name is '' "),
    "observation space": (with_spec(observation_space=(4,)), r"Mine\.spec\.observation_space is a tuple of 1 "),
    "action space": (with_spec(action_space=4), r"Mine\.spec\.action_space is a int .*Discrete"),
    "starts": (
        with_spec(action_space=spaces.MultiDiscrete((2, 3), (0, 1))),
        r"Mine\.spec\.action_space is MultiDiscrete\(.*start=\(0, 1\)\) \(expected choices that begin at 0",
    ),
    "64 bits": (
        with_spec(observation_space=spaces.Dict({"clock": spaces.Box(0, 9, (), np.int64)})),
        r"good: the observation\['clock'\] is Box.*and JAX has no int64; use float32 or int32",
    ),
    "limit": (with_spec(max_episode_steps=0), r"Mine\.spec\.max_episode_steps is 0 "),
    "no observe": (with_attributes(observe=None), r"Mine\.observe is missing"),
    "no step": (with_attributes(step=3), r"Mine\.step is missing"),
    "arity": (
        with_attributes(step=lambda self, state, action: (state, good_transition())),
        r"Mine\.step cannot be traced: TypeError: .*takes 3 positional arguments but 4 were given",
    ),
    "python branch": (
        stepping(lambda state, transition: (state, transition if state.x > 0 else good_transition())),
        r"Mine\.step cannot be traced: TracerBoolConversionError: ",
    ),
    "triple": (stepping(lambda state, transition: (state, transition, {})), r"Mine\.step returned a tuple of 3 "),
    "pair": (stepping(lambda state, transition: (state, (0.0, True))), r"Mine\.step returned a tuple of 2 second "),
    "integer reward": (
        stepping(lambda state, transition: (state, transition._replace(reward=jnp.int32(1)))),
        r"Mine\.step returned reward int32 \[\] \(expected float32 \[\]\)",
    ),
    "reward of one": (
        stepping(lambda state, transition: (state, transition._replace(reward=jnp.zeros(1)))),
        r"Mine\.step returned reward float32 \[1\] \(expected float32 \[\]\)",
    ),
    "boolean discount": (
        stepping(lambda state, transition: (state, transition._replace(discount=transition.last))),
        r"Mine\.step returned discount bool \[\] \(expected float32 \[\]\)",
    ),
    "float last": (
        stepping(lambda state, transition: (state, transition._replace(last=transition.discount))),
        r"Mine\.step returned last float32 \[\] \(expected bool \[\]\)",
    ),
    "state structure": (
        stepping(lambda state, transition: (tuple(state), transition)),
        r"Mine\.step returned a state of PyTreeDef\(\(\*, \*\)\) \(expected .*State.* as from reset\)",
    ),
    "state dtype": (
        stepping(lambda state, transition: (state._replace(steps=state.x), transition)),
        r"Mine\.step returned state\.steps float32 \[\] \(expected int32 \[\] as from reset\)",
    ),
    "key in state": (
        with_attributes(reset=lambda self, key: KeyedState(jnp.float32(0), jnp.int32(0), key)),
        r"Mine\.reset returned a random key in state\.key ",
    ),
    "bare key in state": (
        with_attributes(reset=lambda self, key: KeyedState(jnp.float32(0), jnp.int32(0), jax.random.key_data(key))),
        r"Mine\.reset returned state\.key uint32 \[2\], a random key by its name ",
    ),
    "observation names": (
        observing(lambda state, seen: {"place": seen["place"]}),
        r"Mine\.observe \(after reset\) returned observation \['place'\] \(expected a dict of \['clock', 'pair', 'pl",
    ),
    "observation shape": (
        observing(lambda state, seen: seen | {"place": state.x}),
        r"Mine\.observe .* returned observation\['place'\] float32 \[\] \(expected float32 \[1\] as in the spec\)",
    ),
    "observation dtype": (
        observing(lambda state, seen: seen | {"clock": state.x}),
        r"Mine\.observe .* returned observation\['clock'\] float32 \[\] \(expected int32 \[\] as in the spec\)",
    ),
    "picture": (
        with_attributes(render=lambda self, state: jnp.zeros((4, 4))),
        r"Mine\.render returned float32 \[4, 4\] \(expected uint8 \[H, W, 3\]\)",
    ),
}


@pytest.mark.parametrize("fault", STATIC_FAULTS)
def test_validation_names_the_fault(fault):
    environment, message = STATIC_FAULTS[fault]
    with pytest.raises((TypeError, ValueError), match="^envs_jax conformance: " + message) as error:
        validate_protocol(environment)
    assert "\n" not in str(error.value)
    with pytest.raises(ConformanceError, match="^envs_jax conformance: " + message):
        check_environment(environment)


class MutatingState(Good):
    def reset(self, key):
        return dict(super().reset(key)._asdict())

    def step(self, state, action, key):
        new_state, transition = super().step(State(**state), action, key)
        state.update(new_state._asdict())
        return state, transition

    def observe(self, state):
        return super().observe(State(**state))


class Hoarding(Good):
    def step(self, state, action, key):
        self.previous = [state]
        return super().step(state, action, key)


class Counting(Good):
    count = 0

    def step(self, state, action, key):
        Counting.count += 1
        state, transition = super().step(state, action, key)
        return state, transition._replace(reward=jnp.float32(Counting.count))


class HostRandom(Good):
    def reset(self, key):
        return super().reset(key)._replace(x=jnp.float32(np.random.default_rng().uniform()))


class Jitless(Good):
    def step(self, state, action, key):
        state, transition = super().step(state, action, key)
        return state, transition._replace(reward=jnp.float32(isinstance(state.x, jax.core.Tracer)))


def seeing_vmap():
    """An environment whose observation changes under vmap."""

    @jax.custom_batching.custom_vmap
    def shifted(x):
        return x

    shifted.def_vmap(lambda axis_size, in_batched, x: (x + 1, True))
    return observing(lambda state, seen: seen | {"place": shifted(seen["place"])})


PLAYED_FAULTS = {
    "nan reward": (
        stepping(lambda state, transition: (state, transition._replace(reward=jnp.sqrt(-1.0 - state.x**2)))),
        r"Mine\.step returned reward nan after 1 steps .*expected a finite number",
    ),
    "gamma in discount": (
        stepping(lambda state, transition: (state, transition._replace(discount=0.99 * transition.discount))),
        r"Mine\.step returned discount 0\.99.* after 1 steps of an episode \(expected 0 or 1\)",
    ),
    "no last": (
        stepping(lambda state, transition: (state, transition._replace(last=state.steps >= 5))),
        r"Mine\.step returned discount 0 and last False after [1-4] steps .*expected True",
    ),
    "late": (
        stepping(lambda state, transition: (state, good_transition(last=state.steps >= 6))),
        r"Mine\.step returned last False after 5 steps .*max_episode_steps = 5",
    ),
    "above": (
        observing(lambda state, seen: seen | {"clock": state.steps * 2}),
        r"Mine\.observe returned observation\['clock'\] with extremes \[6 6\] after 3 steps",
    ),
    "below, at the first step only": (
        observing(lambda state, seen: seen | {"place": jnp.where(state.steps == 0, -101.0, seen["place"])}),
        r"Mine\.observe returned observation\['place'\] with extremes \[-101\. -101\.\] after 0 steps",
    ),
    "outside one head": (
        observing(lambda state, seen: seen | {"pair": jnp.stack([state.steps, state.steps])}),
        r"Mine\.observe returned observation\['pair'\] with extremes \[2 2\] after 2 steps",
    ),
    "nan observation": (
        observing(lambda state, seen: seen | {"place": seen["place"] / (state.steps != 2).astype(jnp.float32) * 0.0}),
        r"Mine\.observe returned observation\['place'\] with extremes \[nan nan\] after 2 steps",
    ),
    "mutation": (MutatingState(), r"MutatingState\.step changed its arguments in place"),
    "tracer": (Hoarding(), r"Hoarding\.previous kept a value of a traced call"),
    "hidden counter": (Counting(), r"Counting\.step called twice with the same arguments differs in \['transition'\]"),
    "host randomness": (HostRandom(), r"HostRandom\.reset called twice .* differs in \['observation'\]\['place'\]"),
    "jit": (Jitless(), r"Jitless\.step under jit differs from the plain call in \['transition'\]\.reward"),
    "vmap": (seeing_vmap(), r"Mine\.reset under vmap differs from a Python loop over lanes in \['observation'\]"),
}


@pytest.mark.parametrize("fault", PLAYED_FAULTS)
def test_play_names_the_fault(fault):
    environment, message = PLAYED_FAULTS[fault]
    with pytest.raises(ConformanceError, match="^envs_jax conformance: " + message) as error:
        check_environment(environment, episodes=4, steps=20)
    assert "\n" not in str(error.value)


def nan_at(step):
    changed = lambda state, reward: jnp.where(state.steps == step, jnp.nan, reward)  # noqa: E731
    return stepping(lambda state, transition: (state, transition._replace(reward=changed(state, transition.reward))))


BRIEF_FAULTS = {
    "nan reward now and then": (nan_at(2), r"Mine\.step returned reward nan after 2 steps .*expected a finite number"),
    "late": PLAYED_FAULTS["late"],
    "nan observation": PLAYED_FAULTS["nan observation"],
    "host randomness": (HostRandom(), r"HostRandom\.reset is another function each time it is traced"),
    "hidden counter": (Counting(), r"Counting\.step is another function each time it is traced"),
}


@pytest.mark.parametrize("fault", BRIEF_FAULTS)
def test_a_brief_play_names_the_fault(fault):
    environment, message = BRIEF_FAULTS[fault]
    with pytest.raises(ConformanceError, match="^envs_jax conformance: " + message) as error:
        check_briefly(environment)
    assert "\n" not in str(error.value)


TABLE = np.array([np.nan, 1.0, 2.0], np.float32)
HOLDING_NAN = {
    "choice": lambda key: jax.random.choice(key, 3, p=jnp.full(3, 1 / 3)),
    "binomial": lambda key: jax.random.binomial(key, 9.0, 0.5),
    "multinomial": lambda key: jax.random.multinomial(key, 9.0, jnp.full(3, 1 / 3))[0],
    "while": lambda key: jax.lax.while_loop(lambda x: jnp.isfinite(x), lambda x: x * jnp.nan, jax.random.uniform(key)),
    "cond": lambda key: jax.lax.cond(jax.random.bernoulli(key), lambda: jnp.float32(jnp.nan), lambda: jnp.float32(0)),
    "table": lambda key: jnp.nansum(jnp.asarray(TABLE)[jax.random.permutation(key, 3)[:2]]),
    "scan": lambda key: jax.lax.scan(lambda x, row: (x + row, ()), jax.random.uniform(key), jnp.asarray(TABLE))[0],
}


@pytest.mark.parametrize("name", HOLDING_NAN)
def test_nan_among_the_constants_is_no_fault(name):
    """JAX's own functions hold it, and so do tables of one's own."""

    class Drawing(Good):
        def step(self, state, action, key):
            state, transition = super().step(state, action, key)
            drawn = jnp.asarray(HOLDING_NAN[name](key), jnp.float32)
            return state, transition._replace(reward=transition.reward + jnp.nan_to_num(drawn))

    play._check_purity(Drawing())


def test_a_brief_play_is_of_whole_episodes(monkeypatch):
    """As many steps as show that the limit is kept, but for a time limit; constants of one's own are no fault."""
    walls, key = jnp.ones((3, 3)), jax.random.key(3)
    constant = lambda state, seen: seen | {"place": seen["place"] + 0.0 * walls[0, :1] * jax.random.normal(key)}  # noqa: E731
    played = []
    monkeypatch.setattr(play, "_check_record", lambda env, record: played.append(record[1].shape))
    check_briefly(observing(constant), episodes=2)
    long = with_spec(max_episode_steps=70)
    check_briefly(long, episodes=3)
    assert played == [(2, 6), *[(3, 32)] * 3]
    monkeypatch.setattr(play, "BRIEF_SECONDS", -1.0)
    check_briefly(long, episodes=3)
    assert len(played) == 5


def test_promotion_is_jaxs_whatever_the_setting():
    """`state.steps / 9.0` is ordinary JAX; that it is refused under our tests' own rules shows that these are set."""
    ordinary = stepping(lambda state, transition: (state, transition._replace(reward=state.steps / 9.0)))
    with pytest.raises(TypeError, match=r"Mine\.step cannot be traced: TypePromotionError: .*strict"):
        validate_protocol(ordinary)
    ranks = observing(lambda state, seen: seen | {"place": (seen["place"] + jnp.zeros((1, 1)))[0]})
    with pytest.raises(TypeError, match=r"Mine\.observe cannot be traced: ValueError: .*rank_promotion"):
        validate_protocol(ranks)
    ordinary.observe = ranks.observe
    check_environment(ordinary, episodes=1, steps=2)
