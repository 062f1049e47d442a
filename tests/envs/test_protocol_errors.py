"""A custom environment that breaks the protocol: one line says what and where, before anything is compiled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from envs_jax import testing
from podracer import spaces
from podracer.anakin import runner
from podracer.types import EnvSpec, Transition

SPACE = spaces.Box(-1.0, 1.0, (2,))
SPEC = EnvSpec("mine", SPACE, spaces.Discrete(2), 3)


@dataclasses.dataclass(frozen=True)
class Mine:
    """An environment that keeps the protocol, unless a part of it is replaced."""

    spec: Any = SPEC
    first: Any = lambda key: {"time": jnp.int32(0)}
    after: Any = lambda state: state | {"time": state["time"] + 1}
    transition: Any = lambda state: Transition(jnp.float32(1), jnp.float32(1), state["time"] >= 3)
    observation: Any = lambda state: jnp.zeros(2)

    def reset(self, key):
        return self.first(key)

    def step(self, state, action, key):
        state = self.after(state)
        return state, self.transition(state)

    def observe(self, state):
        return self.observation(state)


class WithoutStep:
    spec = EnvSpec("without_step", SPACE, spaces.Discrete(2), 3)
    reset = observe = lambda self, x: x


class ReturnsThree(Mine):
    def step(self, state, action, key):
        return state, jnp.float32(1), jnp.asarray(False)


class WrongArguments(Mine):
    def step(self, state, action):
        return state, self.transition(state)


class PythonIf(Mine):
    def step(self, state, action, key):
        if action > 0:
            state = self.after(state)
        return state, self.transition(state)


class NumPyInside(Mine):
    def observe(self, state):
        return np.asarray(state["time"]) * np.ones(2)


class AList(Mine):
    def observe(self, state):
        return [jnp.zeros(2), jnp.ones(2)][state["time"]]


class PythonNumber(Mine):
    def observe(self, state):
        return jnp.full(2, float(state["time"]))


class AMask(Mine):
    def observe(self, state):
        return jnp.zeros(2)[jnp.zeros(2) > state["time"].astype(jnp.float32)]


class BadRender(Mine):
    def render(self, state):
        return jnp.zeros((8, 8, 3))


BROKEN = {
    "no spec": (Mine(spec=None), r"Mine\.spec is None .*expected a podracer\.types\.EnvSpec"),
    "no name": (Mine(spec=SPEC._replace(name="")), r"Mine\.spec\.name is ''"),
    "a space of another library": (Mine(spec=SPEC._replace(observation_space=3)), "observation_space is a int"),
    "a limit of zero": (Mine(spec=SPEC._replace(max_episode_steps=0)), "max_episode_steps is 0"),
    "a missing method": (WithoutStep(), r"WithoutStep\.step is missing"),
    "wrong arguments": (WrongArguments(), r"WrongArguments\.step cannot be traced: TypeError"),
    "Python control flow": (
        PythonIf(),
        r"PythonIf\.step cannot be traced: TracerBoolConversionError: .*, in .*test_protocol_errors\.py, line \d+, "
        r"`if action > 0:`: use jnp\.where or jax\.lax\.cond instead of if",
    ),
    "NumPy inside": (
        NumPyInside(),
        r"NumPyInside\.observe cannot be traced: TracerArrayConversionError: .*, in .*test_protocol_errors\.py, line "
        r"\d+, `return np\.asarray\(state\[\"time\"\]\) \* np\.ones\(2\)`: use jax\.numpy instead of numpy\.$",
    ),
    "a list": (AList(), r"TracerIntegerConversionError: .*`return \[jnp.*: index an array \(jnp\.asarray\) instead of"),
    "a number of Python": (PythonNumber(), r"`return jnp\.full.*: use \.astype\(\.\.\.\) instead of int\(\) or float"),
    "a mask": (AMask(), r"NonConcreteBooleanIndexError: .*: use jnp\.where instead of indexing with a mask"),
    "an error of its own": (
        Mine(first=lambda key: {}["no"]),
        r"Mine\.reset cannot be traced: KeyError: 'no', in .*test_protocol_errors\.py, line \d+, `.*`\.$",
    ),
    "three results": (ReturnsThree(), r"ReturnsThree\.step returned a tuple of 3 \(expected a pair"),
    "no Transition": (Mine(transition=lambda s: (1, 2, 3)), r"Mine\.step returned a tuple of 3 second"),
    "a key in the state": (
        Mine(first=lambda key: {"key": key}),
        r"Mine\.reset returned a random key in state\['key'\]",
    ),
    "a state that grows": (Mine(after=lambda s: s | {"more": 1}), r"Mine\.step returned a state of"),
    "a state that changes dtype": (
        Mine(after=lambda s: {"time": s["time"].astype(jnp.float32)}),
        r"Mine\.step returned state\['time'\] float32 \[\] \(expected int32 \[\] as from reset\)",
    ),
    "a state that changes shape": (
        Mine(after=lambda s: {"time": s["time"][None]}, transition=lambda s: None),
        r"Mine\.step returned state\['time'\] int32 \[1\] \(expected int32 \[\]",
    ),
    "an observation of the wrong shape": (
        Mine(observation=lambda s: jnp.zeros(3)),
        r"Mine\.observe \(after reset\) returned observation float32 \[3\] \(expected float32 \[2\]",
    ),
    "an observation of the wrong dtype": (
        Mine(observation=lambda s: jnp.zeros(2, jnp.int32)),
        r"returned observation int32 \[2\] \(expected float32 \[2\]",
    ),
    "a dict without a name": (
        Mine(
            spec=SPEC._replace(observation_space=spaces.Dict({"a": SPACE, "b": SPACE})),
            observation=lambda s: {"a": jnp.zeros(2)},
        ),
        r"returned observation \['a'\] \(expected a dict of \['a', 'b'\]",
    ),
    "a reward of Python": (
        Mine(transition=lambda s: Transition(1, jnp.float32(1), s["time"] >= 3)),
        r"Mine\.step returned reward .*expected float32 \[\]",
    ),
    "a reward for two": (
        Mine(transition=lambda s: Transition(jnp.ones(2), jnp.float32(1), s["time"] >= 3)),
        r"returned reward float32 \[2\] \(expected float32 \[\]\)",
    ),
    "done instead of discount": (
        Mine(transition=lambda s: Transition(jnp.float32(1), s["time"] >= 3, s["time"] >= 3)),
        r"returned discount bool \[\] \(expected float32 \[\]\)",
    ),
    "a last that is a number": (
        Mine(transition=lambda s: Transition(jnp.float32(1), jnp.float32(1), jnp.float32(0))),
        r"returned last float32 \[\] \(expected bool \[\]\)",
    ),
    "a render of floats": (
        BadRender(),
        r"BadRender\.render returned float32 \[8, 8, 3\] \(expected uint8 \[H, W, 3\]\)",
    ),
}


def test_the_one_that_keeps_it():
    testing.validate_protocol(Mine())
    testing.check_environment(Mine(), episodes=2)


@pytest.mark.parametrize("name", BROKEN)
def test_train_says_what_and_where(name, tmp_path, monkeypatch):
    environment, message = BROKEN[name]

    def compile_step(*args):
        raise AssertionError("it got as far as compiling")

    monkeypatch.setattr(runner, "start_step", compile_step)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        podracer.train("vtrace", environment, run_dir=tmp_path / "run", total_steps=100, num_envs=8, progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises((TypeError, ValueError), match=message):
        testing.validate_protocol(environment)
    with pytest.raises(testing.ConformanceError, match=message):
        testing.check_environment(environment)


def test_train_plays_what_is_ones_own(monkeypatch):
    """Unless it has a name, or one says not to."""

    class CompiledError(Exception):
        pass

    def compile_step(*args):
        raise CompiledError

    monkeypatch.setattr(runner, "start_step", compile_step)
    endless = Mine(transition=lambda s: Transition(jnp.float32(1), jnp.float32(1), jnp.asarray(False)))
    train = functools.partial(podracer.train, "vtrace", total_steps=100, num_envs=8, progress=False)
    message = (
        r"^envs_jax conformance: Mine\.step returned last False .*max_episode_steps = 3\); check=False trains all the"
    )
    with pytest.raises(ValueError, match=message):
        train(endless)
    with pytest.raises(CompiledError):
        train(endless, check=False)
    monkeypatch.setattr(testing, "check_briefly", lambda environment: pytest.fail("it has a name"))
    with pytest.raises(CompiledError):
        train("catch")


def test_weak_types_are_not_an_error(monkeypatch):
    """`{"time": 0}` is a state, and `state["time"] + 1` its successor: JAX keeps such numbers weakly typed."""
    environment = Mine(first=lambda key: {"time": 0})
    testing.validate_protocol(environment)
    compiled = []

    def compile_step(program, state, finish):
        compiled.append(jax.eval_shape(program.step, program.like(), program.like_limits()))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "start_step", compile_step)
    with pytest.raises(KeyboardInterrupt):
        podracer.train("vtrace", environment, total_steps=100, num_envs=8, progress=False)
    assert compiled
