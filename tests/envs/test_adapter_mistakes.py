"""Mistakes with environments of other libraries: what is absent, unknown, wrapped or impossible, in one line each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from typing import NamedTuple

import pytest

import podracer
from envs_jax import adapters
from envs_jax.adapters import convert, navix, xminigrid
from podracer import environments
from tests.support.foreign import NAME, Lock, Params, Walk

PREFIXES = tuple(adapters.LIBRARIES)


def installed(monkeypatch, *, absent=(), version="999"):
    """Lets every library look installed, except some."""
    find = importlib.util.find_spec
    known = {name for library in adapters.LIBRARIES.values() for name in (library.package, *library.also)}

    def found(name, *args):
        return (None if name in absent else True) if name in known else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_library_that_is_absent_or_old(prefix, monkeypatch, capsys):
    library = adapters.LIBRARIES[prefix]
    distribution, _, oldest = library.requirements[0].partition(">=")
    installed(monkeypatch, absent=(library.package,))
    with pytest.raises(
        ValueError,
        match=rf"^{prefix}: environments need {library.package}, not .*: pip install '{distribution}>={oldest}'",
    ):
        environments.make(f"{prefix}:Any")
    assert podracer_envs(prefix) == 2
    said = capsys.readouterr().err  # one line, and not where this library raised it
    assert re.fullmatch(
        rf"podracer: error: {prefix}: environments need {library.package}, not .*: pip install '[^'\n]*'.*\n", said
    )
    assert ".py" not in said
    installed(monkeypatch, version="0.0.9")
    with pytest.raises(
        ValueError, match=rf"^{prefix}: .*{oldest} or later, but 0\.0\.9 is installed.*: pip install -U '"
    ):
        environments.make(f"{prefix}:Any")
    installed(monkeypatch)
    monkeypatch.setitem(sys.modules, library.package, None)
    with pytest.raises(ValueError, match=rf"^{prefix}: environments cannot be used here \(ModuleNotFoundError: "):
        environments.make(f"{prefix}:Any")


def podracer_envs(*argv):
    from podracer import cli

    return cli.run(["envs", *argv])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_unknown_id_gets_the_nearest(prefix, monkeypatch, capsys):
    installed(monkeypatch)
    monkeypatch.setitem(sys.modules, adapters.LIBRARIES[prefix].package, types.ModuleType("fake"))
    module = importlib.import_module(f"envs_jax.adapters.{prefix}")
    monkeypatch.setattr(module, "tasks", lambda: ["Walk-v1", "Run-v1"])
    monkeypatch.setattr(module, "TASKS", ("Walk-v1", "Run-v1"), raising=False)
    with pytest.raises(ValueError, match=rf"^{prefix} has no environment 'Wlak-v1'; did you mean 'Walk-v1'\? known: "):
        environments.make(f"{prefix}:Wlak-v1")
    assert podracer_envs(prefix) == 0
    assert capsys.readouterr().out.split() == [f"{prefix}:Walk-v1", f"{prefix}:Run-v1"]
    with pytest.raises(ValueError, match="max_steps=0: "):
        environments.make(f"{prefix}:Walk-v1", max_steps=0)


def test_wrappers_are_refused():
    inner, vmap = Walk(), type("VmapWrapper", (), {"__slots__": ()})
    convert.check_bare(NAME(env=type("Bare", (), {"__slots__": ()})()), "it")
    wrapper = type("AutoResetWrapper", (), {"__init__": lambda self: setattr(self, "env", inner)})
    for adapt in (podracer.from_brax, podracer.from_jumanji, podracer.from_playground):
        with pytest.raises(ValueError, match="is wrapped in AutoResetWrapper: .* give the environment inside of it"):
            adapt(wrapper())
    for base, adapt in (("EpisodeWrapper", podracer.from_brax), ("GymAutoResetWrapper", xminigrid.from_xminigrid)):
        kind = type("Mine", (type(base, (), {}),), {})
        with pytest.raises(ValueError, match="^Mine is wrapped in Mine: resets"):
            adapt(kind(), **({"params": None} if adapt is xminigrid.from_xminigrid else {}))
    with pytest.raises(ValueError, match="^Navix is wrapped in VmapWrapper: "):
        navix.from_navix(type("Navix", (), {"__init__": lambda self: setattr(self, "_env", vmap())})())
    logging = type("LogWrapper", (Walk,), {"_env": inner})
    with pytest.raises(ValueError, match=r"^LogWrapper is a wrapper, .*; give what is inside\.$"):
        podracer.from_gymnax(logging())


def test_options_are_refused():
    """Before a library is imported, in the options' own words."""
    for name, options, message in (
        ("xminigrid:MiniGrid-Empty-5x5", {"ruleset": "trivial-21k"}, "ruleset='trivial-21k': write BENCHMARK:NUMBER"),
        ("playground:CheetahRun", {"config": ("ctrl_dt",)}, "^config='ctrl_dt': write name=value"),
        ("brax:ant", {"backend": "warp"}, r"BraxOptions\.backend='warp': expected"),
        ("navix:Navix-Empty-5x5-v0", {"observation": "all"}, r"NavixOptions\.observation='all': expected"),
    ):
        with pytest.raises(ValueError, match=message):
            environments.options(name)(**options)


def test_time_limits_are_refused():
    for max_steps, adapt in ((0, podracer.from_gymnax), (-1, podracer.from_gymnax), (0, podracer.from_jumanji)):
        thing = Lock() if adapt is podracer.from_jumanji else Walk()
        with pytest.raises(ValueError, match=rf"^max_steps={max_steps}: an episode of \w+ has at least 1 step"):
            adapt(thing, max_steps=max_steps)
    with pytest.raises(
        ValueError, match=r"^Walk: params=LockParams: must be a dataclass, so that max_timesteps can be"
    ):
        podracer.from_gymnax(Walk(), NamedTuple("LockParams", [("max_timesteps", int)])(3))
    for params in (None, Params(max_steps_in_episode=None)):
        with pytest.raises(ValueError, match=r"^(Nothing|Walk) cannot be used here \((AttributeError|TypeError): "):
            podracer.from_gymnax(Walk() if params else type("Nothing", (), {})(), params)
    with pytest.raises(ValueError, match=r"^object cannot be used here \(AttributeError: "):
        xminigrid.from_xminigrid(object(), NAME())
    with pytest.raises(ValueError, match=r"^object cannot be used here \(AttributeError: .*max_steps"):
        navix.from_navix(object())
    room = type("Room", (Lock,), {"_generator": NAME(_max_step=3)})()
    assert podracer.from_jumanji(room).spec.max_episode_steps == 3
    with pytest.raises(ValueError, match=r"^Room: max_steps=4: its states have room for 3 steps; .* time_limit=4"):
        podracer.from_jumanji(room, max_steps=4)


def test_warp_needs_cuda():
    robot = NAME(mjx_model=NAME(impl=NAME(value="warp")))
    with pytest.raises(ValueError, match=r'^Robot: impl="warp" runs on CUDA alone, and this is cpu; give impl="jax"'):
        podracer.from_playground(robot, name="Robot")
