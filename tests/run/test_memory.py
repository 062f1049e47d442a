"""The memory use that both drivers promise, and their errors where there is too little."""

import types

import jax
import numpy as np
import pytest

import podracer
from podracer import topology
from podracer.anakin import runner
from podracer.anakin.driver import Anakin, _idle_cores, _too_small
from podracer.learning import learner
from podracer.run import driver
from podracer.sebulba.learner_devices import OnDevices
from podracer.system import machine


class Accelerator:
    """A device that says how much memory it has, or cannot."""

    platform = "gpu"

    def __init__(self, stats=None):
        self.stats = stats

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats

    def __repr__(self):
        return "gpu:0"


SMALL = Accelerator({"bytes_limit": 2 * 2**30})
TOO_SMALL = r"the program needs 3\.0 GiB on each device, and gpu:0 has 2\.0 GiB: lower num_envs, rollout_length"


def compiled(needed):
    """A compiled program of so many bytes."""
    analysis = types.SimpleNamespace(temp_size_in_bytes=needed - 5, argument_size_in_bytes=5)
    return types.SimpleNamespace(memory_analysis=lambda: analysis)


def test_a_program_must_fit():
    with pytest.raises(podracer.OutOfMemoryError, match=TOO_SMALL):
        driver.require_memory(driver.program_bytes(compiled(3 * 2**30)), SMALL)
    driver.require_memory(2**30, SMALL)
    driver.require_memory(None, SMALL)
    little = learner.ReplayState((), jax.ShapeDtypeStruct((8,), np.uint8))
    for unknown in (None, {}, jax.errors.JaxRuntimeError("UNIMPLEMENTED: a device that is not there")):
        driver.require_memory(2**50, Accelerator(unknown))
        learner.require_room(little, [Accelerator(unknown)])
    assert driver.program_bytes(types.SimpleNamespace(memory_analysis=lambda: None)) is None
    doubled = jax.jit(lambda x: x + x).lower(jax.ShapeDtypeStruct((1000,), np.float32)).compile()
    assert driver.program_bytes(doubled) >= 4000


def test_anakin_asks_before_it_runs(monkeypatch):
    much = runner.Compiled(lambda *args: None, None, 0.0, 3 * 2**30)
    monkeypatch.setattr(Anakin, "devices", [SMALL])
    monkeypatch.setattr(runner, "start_step", lambda *args: types.SimpleNamespace(result=lambda: much))
    with pytest.raises(podracer.OutOfMemoryError, match=TOO_SMALL):
        podracer.train("vtrace", "catch", total_steps=100, num_envs=8, progress=False)


def test_sebulba_asks_before_it_runs():
    update = types.SimpleNamespace(lower=lambda *args: types.SimpleNamespace(compile=lambda: compiled(3 * 2**30)))
    layout = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array([SMALL])))
    learning = types.SimpleNamespace(_learn=update, _layout=layout, _core=types.SimpleNamespace(defers_updates=False))
    with pytest.raises(podracer.OutOfMemoryError, match=TOO_SMALL):
        OnDevices.compile(learning, None, None, None)


def test_what_happens_later_is_explained_too():
    """On the learner's side or in an actor; anything else is left as it is."""
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\nand many lines")
    acting = podracer.ActorError("actor 0 failed")
    acting.__cause__ = full
    for error in (full, acting):
        with pytest.raises(podracer.OutOfMemoryError) as caught, driver.memory_explained():
            raise error
        assert str(caught.value) == (
            "a device is out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes): " + driver.WHAT_TO_LOWER
        )
    for error in (jax.errors.JaxRuntimeError("INTERNAL: something"), podracer.ActorError("actor 1"), ValueError("no")):
        with pytest.raises(type(error)) as caught, driver.memory_explained():
            raise error
        assert caught.value is error


def test_few_rows_on_an_accelerator():
    assert "4,096 rows an update leave it idle" in _too_small("gpu", 4096, 64)
    assert "num_envs of 2,048 to 16,384" in _too_small("tpu", 99_999, 16_383)
    assert _too_small("gpu", 100_000, 64) == _too_small("cpu", 10, 64) == _too_small("gpu", 99_999, 16_384) == ""


def test_agents_that_replay_have_no_hint():
    layout = topology.make(num_envs=64, envs_per_device=64, devices=jax.devices()[:1])
    run = types.SimpleNamespace(devices=[Accelerator()], _layout=layout, _rows_on_a_device=512, _replays=False)
    assert "512 rows an update leave it idle" in Anakin.describe(run)
    run._replays = True
    assert Anakin.describe(run) == layout.describe()


def test_idle_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 16)
    assert "about one of 16 cores busy: JAX_NUM_CPU_DEVICES=2 makes 2" in _idle_cores("cpu", 256, 1, 1)
    assert "JAX_NUM_CPU_DEVICES=16 makes 16" in _idle_cores("cpu", 4096, 1, 1)
    # A number of devices that divides the lanes, or the shards.
    for case, better in (((1000, 1, 1), 5), ((4092, 1, 6), 6), ((257, 7, 1), 7), ((2048, 3, 4), 12)):
        assert f"JAX_NUM_CPU_DEVICES={better} makes {better}" in _idle_cores("cpu", *case)
        num_envs, population, num_shards = case
        topology.make(
            num_envs=num_envs,
            envs_per_device=1,
            num_shards=num_shards if num_shards > 1 else None,
            population=population,
            devices=list(range(better)),
        )
    for case in ((255, 1, 1), (257, 1, 1)):
        assert _idle_cores("cpu", *case) == ""
    assert _idle_cores("gpu", 256, 1, 1) == ""
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    assert _idle_cores("cpu", 256, 1, 1) == ""
