"""The table of environments."""

import dataclasses
import subprocess
import sys
import types

import pytest

import envs_jax
from podracer.types import Environment

ALL = (
    *("acrobot", "bandit", "cartpole", "catch", "connect_four", "deep_sea", "discounting_chain", "gridworld"),
    *("memory_chain", "memory_maze"),
    *(
        "minatar_asterix",
        "minatar_breakout",
        "minatar_freeway",
        "minatar_seaquest",
        "minatar_space_invaders",
        "minigrid_crossings",
        "minigrid_doorkey",
        "minigrid_dynamic_obstacles",
        "minigrid_empty",
        "minigrid_four_rooms",
        "minigrid_key_corridor",
        "minigrid_lava_gap",
        "minigrid_memory",
        "minigrid_multi_room",
        "minigrid_unlock",
        "mountain_car",
        "mountain_car_continuous",
        "othello",
    ),
    *("pendulum", "pixel_catch", "t_maze", "tic_tac_toe", "umbrella_chain"),
)


def test_names():
    assert envs_jax.names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_makes_every_environment(name):
    environment = envs_jax.make(name)
    assert isinstance(environment, Environment)
    assert environment.spec.name.startswith(name)  # gridworld's task follows


@pytest.mark.parametrize("name", ALL)
def test_options_are_frozen_dataclasses_with_defaults(name):
    options = envs_jax.options(name)
    assert dataclasses.is_dataclass(options)
    assert type(options()).__dataclass_params__.frozen
    assert options() == options()


def test_an_environment_without_options(monkeypatch):
    module = types.ModuleType("envs_jax.bare")
    module.Bare = type("Bare", (), {})
    monkeypatch.setitem(sys.modules, "envs_jax.bare", module)
    monkeypatch.setitem(envs_jax._CLASSES, "bare", "Bare")
    assert type(envs_jax.make("bare")) is module.Bare
    assert dataclasses.fields(envs_jax.options("bare")) == ()
    with pytest.raises(ValueError, match="environment 'bare' has no option 'size'; Known: "):
        envs_jax.make("bare", size=3)


def test_options_reach_the_environment():
    assert envs_jax.make("catch", rows=7, columns=3).spec.observation_space.shape == (7, 3)
    with pytest.raises(ValueError, match=r"CatchOptions\(rows=1\)"):
        envs_jax.make("catch", rows=1)


def test_unknown_names_get_a_suggestion():
    for function in (envs_jax.make, envs_jax.options):
        with pytest.raises(ValueError, match=r"unknown environment 'cach'; did you mean 'catch'.*\? Known: acrobot, "):
            function("cach")
        with pytest.raises(ValueError, match="unknown environment 'zzz'; Known: acrobot, "):
            function("zzz")


def test_unknown_options_get_a_suggestion():
    message = r"environment 'catch' has no option 'row'; did you mean 'rows'\? Known: columns, rows\."
    with pytest.raises(ValueError, match=message):
        envs_jax.make("catch", row=3)


def test_importing_the_registry_imports_nothing_else():
    program = "import sys, envs_jax; print(sorted({'jax', 'podracer', 'gymnasium'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
