"""Executables on the disk: equal results, and no file that should not be used."""

import importlib.metadata
import os
import pathlib
import random
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
import podracer
from podracer.system import command
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


def on_two_devices(store):
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), "d")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    for name, devices in (("one", jax.local_devices()[1]), ("two", sharding)):
        x = jax.device_put(np.arange(4.0, dtype=np.float32), devices)
        store.save(name, jax.jit(lambda x: 2.0 * x).lower(x).compile())
        found = store.load(name)(x)
        np.testing.assert_array_equal(found, 2.0 * x)
        assert found.sharding == x.sharding


def test_a_program_is_loaded_for_its_own_devices(tmp_path):
    """An evaluation has one device of several."""
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 2); "
        "from tests.topology import test_executables as tests; "
        f"tests.on_two_devices(tests.executables.Executables(pathlib.Path({str(tmp_path / 'programs')!r}), 'a'))"
    )
    root = pathlib.Path(__file__).parents[2]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)


@pytest.mark.parametrize(
    "harm", ["cut", "changed", "of another program", "of another user", "others may write", "others may add"]
)
def test_a_file_that_cannot_be_used_is_compiled_again(store, tmp_path, harm, monkeypatch, capsys, doubled):
    with executables.using(store):
        ahead.Program("double", doubled(2.0))(X)
        wait(tmp_path)
        (path,) = (tmp_path / "programs").iterdir()
        data = path.read_bytes()
        if harm == "of another user":
            monkeypatch.setattr(os, "getuid", lambda: -1)
        elif harm == "others may write":
            path.chmod(0o620)
        elif harm == "others may add":
            path.parent.chmod(0o722)
        elif harm == "of another program":
            ahead.Program("other", doubled(2.5))(X)
            wait(tmp_path, 2)
            store._path("other").replace(path)
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


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file in the place of all source, as old as this process."""
    path = tmp_path / "module.py"
    path.write_text("")
    monkeypatch.setattr(command, "BEGAN", path.stat().st_mtime + 1.0)
    monkeypatch.setattr(executables, "_sources", lambda: [(tmp_path, path)])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return path


def test_source_that_was_changed_meanwhile_keeps_no_programs(store, source, doubled):
    assert executables.is_sure()
    os.utime(source, (0.0, command.BEGAN + 1.0))
    assert not executables.is_sure()
    store.save("late", doubled(2.0).lower(X).compile())
    assert not store.has("late")


def test_the_source_is_what_was_imported():
    roots = {root for root, _ in executables._sources()}
    assert roots == {pathlib.Path(str(module.__file__)).parents[1] for module in (envs_jax, podracer)}


def test_flags_in_a_file_and_editable_packages_are_not_known(source, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " --xla_cpu_enable_fast_math=true")
    assert executables.is_sure()
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")
    assert not executables.is_sure()
    monkeypatch.delenv("XLA_FLAGS")
    installed = '{"url": "file:///optax", "dir_info": {"editable": true}}'
    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", lambda self, name: installed)
    executables._is_editable.cache_clear()
    try:
        assert not executables.is_sure()
    finally:
        executables._is_editable.cache_clear()


@pytest.mark.parametrize("bound", ["files", "bytes"])
def test_the_oldest_are_removed(store, bound, monkeypatch, doubled):
    compiled = doubled(2.0).lower(X).compile()
    if bound == "files":
        monkeypatch.setattr(executables, "MOST_FILES", 2)
    else:
        store.save("a", compiled)
        monkeypatch.setattr(executables, "MOST_BYTES", int(2.5 * store._path("a").stat().st_size))
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
