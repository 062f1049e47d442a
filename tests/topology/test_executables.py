"""Executables on the disk: equal results, and no file that should not be used."""

import os
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.topology import ahead, executables


@pytest.fixture
def store(tmp_path):
    return executables.Executables(tmp_path / "programs", executables.kind({"a": 1}, jax.local_devices()[:1]))


@pytest.fixture
def doubled():
    """Makes functions that no program in JAX's own cache computes."""
    new = random.SystemRandom().random()
    return lambda scale: jax.jit(lambda x: {"y": scale * x + new - new})


X = jnp.arange(3.0)


def test_a_program_is_compiled_once(store, tmp_path, doubled):
    """The second function is never traced: the file of the first one answers."""
    with executables.using(store):
        first = ahead.Program("double", doubled(2.0))(X)
    wait(tmp_path)
    assert store.has("double")
    assert not store.has("other")
    with executables.using(store):
        second = ahead.Program("double", doubled(3.0))(X)
        other = ahead.Program("other", doubled(3.0))(X)
    np.testing.assert_array_equal(second["y"], first["y"])
    np.testing.assert_allclose(other["y"], 3.0 * X, rtol=1e-5)


def wait(folder, files=1):
    """Waits for the thread that writes after the result is there."""

    for thread in threading.enumerate():
        if thread.name.startswith("compile "):
            thread.join()
    assert len(list(folder.rglob("*.bin"))) == files


def test_what_jax_has_read_of_its_own_cache_is_not_written_again(store, tmp_path, doubled):
    """Such an executable is not whole: it fails when it is called."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        for there in (True, False):
            (tmp_path / "programs").mkdir(exist_ok=True)
            with executables.using(store):
                result = ahead.Program("triple", doubled(3.5))(X)
            wait(tmp_path, int(there))
            np.testing.assert_allclose(result["y"], 3.5 * X, rtol=1e-5)
            for path in (tmp_path / "programs").iterdir():
                path.unlink()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.parametrize("harm", ["cut", "changed", "of another user"])
def test_a_file_that_cannot_be_used_is_compiled_again(store, tmp_path, harm, monkeypatch, capsys, doubled):
    with executables.using(store):
        ahead.Program("double", doubled(2.0))(X)
        wait(tmp_path)
        (path,) = (tmp_path / "programs").iterdir()
        data = path.read_bytes()
        if harm == "of another user":
            monkeypatch.setattr(os, "getuid", lambda: -1)
        else:
            path.write_bytes(data[:-1] if harm == "cut" else data[:500] + bytes([data[500] ^ 1]) + data[501:])
        assert ahead.Program("double", doubled(3.0))(X)["y"][1] == pytest.approx(3.0)
    said = capsys.readouterr().err
    assert str(path) in said
    assert said.count("\n") == 1
    wait(tmp_path)


def test_the_key_is_all_that_decides_a_program(monkeypatch):
    devices = jax.local_devices()[:1]
    kind = executables.kind({"a": 1}, devices)
    assert executables.kind({"a": 1}, devices) == kind != executables.kind({"a": 2}, devices)
    with jax.default_matmul_precision("float32"):
        assert executables.kind({"a": 1}, devices) != kind
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert executables.kind({"a": 1}, devices) != kind
    monkeypatch.undo()
    monkeypatch.setattr(executables, "_code", lambda: "other code")
    assert executables.kind({"a": 1}, devices) != kind


def test_the_oldest_are_removed(store, tmp_path, monkeypatch, doubled):
    monkeypatch.setattr(executables, "MOST_FILES", 2)
    compiled = doubled(2.0).lower(X).compile()
    for age, name in enumerate(("a", "b", "c")):
        store.save(name, compiled)
        os.utime(store._path(name), (age, age))
    assert [store.has(name) for name in "abc"] == [False, True, True]


def test_an_error_of_the_compiler_is_raised_where_it_is_waited_for():
    class Broken:
        def compile(self):
            raise RuntimeError("no")

    compiling = ahead.Compiling("broken", Broken)
    with pytest.raises(RuntimeError, match="no"):
        compiling.result()
