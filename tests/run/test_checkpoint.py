"""A checkpoint is whole, or it is passed over and people are told: every file of one is damaged in turn."""

import contextlib
import errno
import logging
import os
import pathlib
import resource
import shutil
import sys
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.errors import CheckpointError
from podracer.run import checkpoint, orbax_calls
from podracer.run.checkpoint import Checkpoints, UnknownStepError
from tests.support import hosts


def state(n):
    """Something of each kind: an array above and one below Orbax's inline limit, an empty one, a random key, a counter."""
    big = jnp.asarray(np.random.default_rng(n).normal(size=(50, 60)), jnp.float32)
    small, empty = jnp.full((3,), n, jnp.float32), jnp.zeros((2, 0))
    return {"big": big, "small": small, "empty": empty, "key": jax.random.key(n), "n": jnp.int32(n)}


def equal(a, b):
    data = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(data(x), data(y)), a, b))


@contextlib.contextmanager
def opened(directory, keep=3, read_only=False):
    checkpoints = Checkpoints(directory, keep, read_only=read_only)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@contextlib.contextmanager
def full_disk(limit=512):
    """The operating system refuses to write files of more than `limit` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_all_are_kept_until_what_follows_is_done_again(tmp_path):
    with opened(tmp_path, keep=None) as checkpoints:
        for step in (1, 3, 4, 6, 9):
            checkpoints.save(step, {"n": jnp.int32(step)})
        assert checkpoints.steps() == [1, 3, 4, 6, 9]
        checkpoints.forget(4)
        assert checkpoints.steps() == [1, 3, 4]
        checkpoints.save(6, {"n": jnp.int32(60)})
        _, found, _ = checkpoints.restore({"n": jnp.int32(0)}, 6)
        assert int(found["n"]) == 60
        with pytest.raises(UnknownStepError, match=r"no checkpoint 9 in .*; there are 1, 3, 4, 6\."):
            checkpoints.restore({"n": jnp.int32(0)}, 9)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run directory with checkpoints 1 and 2."""
    directory = tmp_path_factory.mktemp("written")
    with opened(directory) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(2, state(2))
    return directory


def files(directory, step):
    return sorted(path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file())


def delete(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 6] = bytes(255 - x for x in data[middle : middle + 6])
    path.write_bytes(data)


def test_it_comes_back_bit_by_bit(written):
    with opened(written) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        step, restored, problems = checkpoints.restore(state(0))
    assert (step, problems) == (2, [])
    assert equal(restored, state(2))


@pytest.mark.slow
def test_parts_are_read_without_the_others(written, tmp_path):
    directory = pathlib.Path(shutil.copytree(written, tmp_path / "run"))
    with opened(directory, read_only=True) as checkpoints:
        parts = {name: state(0)[name] for name in ("small", "key")}
        step, restored, problems = checkpoints.restore(parts)
        assert (step, problems) == (2, [])
        assert equal(restored, {name: state(2)[name] for name in parts})
        with pytest.raises(CheckpointError, match="no checkpoint in .* can be read"):
            checkpoints.restore(parts | {"more": jnp.zeros(3)})
    with opened(directory) as checkpoints:
        for other in (jnp.zeros(4), jnp.zeros(3, jnp.int32)):
            with pytest.raises(
                CheckpointError, match=r"checkpoint 2 .* another layout: small is float32 \[3\] there and"
            ):
                checkpoints.restore(parts | {"small": other})
        assert checkpoints.steps() == [1, 2], "nothing is damaged"


def test_only_the_newest_are_kept(tmp_path):
    with opened(tmp_path, keep=2) as checkpoints:
        for n in range(4):
            checkpoints.save(n, state(n))
        assert checkpoints.steps() == [2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip, marks=pytest.mark.slow),
        *(pytest.param(damage, marks=[pytest.mark.slow, pytest.mark.nightly]) for damage in (delete, truncate)),
    ],
)
def test_any_damaged_file_is_noticed_or_harmless(written, tmp_path, damage, capfd):
    noticed = 0
    for path in files(written, 2):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(written, directory)
        damage(directory / path.relative_to(written))
        with opened(directory) as checkpoints:
            step, restored, problems = checkpoints.restore(state(0))
            assert equal(restored, state(step)), f"{path.name}: a wrong state without a word"
            assert (step == 1) == bool(problems), path.name
            if problems:
                noticed += 1
                (line,) = problems
                assert line.startswith("checkpoint 2 is damaged (")
                assert line.endswith("used 1.")
                assert "\n" not in line
                assert checkpoints.steps() == [1]
                assert (directory / "damaged" / "2").is_dir(), "what was damaged is kept"
                if noticed == 1:
                    checkpoints.save(2, state(2))  # the run goes on and passes there again
                    assert checkpoints.restore(state(0))[0] == 2
    assert noticed >= 4
    assert capfd.readouterr() == ("", ""), "Orbax has something to say that nobody asked for"


def test_an_error_that_passes_is_no_damage(written, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", (0.0,))
    monkeypatch.setattr(orbax_calls.gc, "collect", lambda: None)  # which takes long in a process of many tests
    shutil.copytree(written, tmp_path / "run")
    read, errors = Checkpoints._read, []

    def failing(self, step, like):
        if errors:
            code = errors.pop()
            raise OSError(code, f"reading a file: {os.strerror(code)}")
        return read(self, step, like)

    monkeypatch.setattr(Checkpoints, "_read", failing)
    with opened(tmp_path / "run") as checkpoints:
        errors[:] = [errno.ESTALE]
        assert checkpoints.restore(state(0))[::2] == (2, [])
        errors[:] = [errno.EMFILE] * 2
        with pytest.raises(
            CheckpointError, match=r"cannot read checkpoint 2 in .*: Too many open files\. It may be whole"
        ):
            checkpoints.restore(state(0))
        assert checkpoints.steps() == [1, 2]
        errors[:] = [errno.EIO] * 2
        step, _, said = checkpoints.restore(state(0))
        assert (step, len(said)) == (1, 1), "what lasts is damage"


def test_an_old_one_that_cannot_be_removed_is_said(tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with opened(tmp_path, keep=1) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, {"n": jnp.int32(step)})
            assert checkpoints.steps() == [3]
    told = "an old checkpoint cannot be removed, and stays: {}; newer ones are whole.\n"
    assert capfd.readouterr().err == told.format(tmp_path / "removed"), "once"
    with opened(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [3], "it is out of the way"
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "rename", mock.Mock(side_effect=PermissionError(errno.EACCES, "denied")))
            checkpoints.save(4, {"n": jnp.int32(4)})
        assert int(checkpoints.restore({"n": jnp.int32(0)})[1]["n"]) == 4
    assert capfd.readouterr().err == told.format(f"{tmp_path / 'checkpoints' / '3'} (denied)")
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, {"n": jnp.int32(5)})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]


def test_reading_moves_nothing(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    truncate(max(files(tmp_path / "run", 2), key=lambda path: path.stat().st_size))
    unfinished = tmp_path / "run" / "checkpoints" / "3.orbax-checkpoint-tmp"  # a run that is writing just now
    unfinished.mkdir()
    with opened(tmp_path / "run", read_only=True) as checkpoints:
        step, _, problems = checkpoints.restore(state(0))
        assert (step, len(problems)) == (1, 1)
        assert checkpoints.steps() == [1, 2]
    assert not (tmp_path / "run" / "damaged").exists()
    assert unfinished.exists()


def test_what_a_killed_process_had_begun_is_cleared(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    shutil.copytree(written / "checkpoints" / "2", tmp_path / "run" / "checkpoints" / "3.orbax-checkpoint-tmp")
    with opened(tmp_path / "run") as checkpoints:
        assert checkpoints.restore(state(0))[0] == 2
        # Orbax clears it on the side.
        names = lambda: sorted(path.name for path in checkpoints.directory.iterdir())  # noqa: E731
        assert hosts.within(10.0, lambda: names() == ["1", "2"]), names()


@pytest.mark.slow
def test_if_none_can_be_read_all_stay(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    with opened(tmp_path / "run") as checkpoints:
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read: checkpoint 2 .*checkpoint 1 "):
            checkpoints.restore({"another": jnp.zeros(3)})
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore(state(0))[0] == 2


def test_no_checkpoint_yet(tmp_path):
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"no checkpoint in .* yet"):
        checkpoints.restore(state(0))


def test_a_full_disk_loses_nothing(written, tmp_path, capfd):
    shutil.copytree(written, tmp_path / "run")
    with opened(tmp_path / "run") as checkpoints:
        with full_disk(), pytest.raises(CheckpointError, match=r"could not write checkpoint 3 in .*intact") as caught:
            checkpoints.save(3, state(3))
        where = tmp_path / "run" / "checkpoints"
        problem = "File too large. Earlier checkpoints are intact."
        assert str(caught.value) == f"could not write checkpoint 3 in {where}: {problem}"
    with opened(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == [1, 2]
        step, restored, problems = checkpoints.restore(state(0))
        assert (step, problems) == (2, [])
        assert equal(restored, state(2))
        checkpoints.save(3, state(3))
    with opened(tmp_path / "run") as checkpoints:
        assert equal(checkpoints.restore(state(0))[1], state(3))
    assert capfd.readouterr() == ("", "")


def test_one_stays_until_another_of_its_step_is_whole(written, tmp_path, monkeypatch):
    directory = pathlib.Path(shutil.copytree(written, tmp_path / "run"))
    with opened(directory, keep=1) as checkpoints:
        with full_disk(), pytest.raises(CheckpointError, match="could not write checkpoint 2 in .*intact"):
            checkpoints.replace(2, state(3))
        assert equal(checkpoints.restore(state(0), 2)[1], state(2))
        with monkeypatch.context() as patch:  # killed between the two moves
            patch.setattr(Checkpoints, "_finish_replacing", mock.Mock(side_effect=[None, KeyboardInterrupt]))
            with pytest.raises(KeyboardInterrupt):
                checkpoints.replace(2, state(3))
    with opened(directory, keep=1) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert equal(checkpoints.restore(state(0))[1], state(3))
        checkpoints.replace(2, state(4))
        assert equal(checkpoints.restore(state(0))[1], state(4))
    assert [path.name for path in directory.iterdir()] == ["checkpoints"]


@pytest.mark.slow
def test_any_error_of_a_write_is_reported(tmp_path, monkeypatch):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state(1))

        path = "/long" * 100  # no part of a reason is cut off
        for problem, reason in (
            (OSError(errno.ENOSPC, "No space left on device", path), r": No space left on device\. Earlier"),
            (ValueError(f"something else about {path}.\nand more"), rf": something else about {path}\. Earlier"),
        ):
            monkeypatch.setattr(checkpoints._manager, "save", mock.Mock(side_effect=problem))
            with pytest.raises(CheckpointError, match=reason):
                checkpoints.save(2, state(2))
        assert checkpoints.steps() == [1]


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot use"):
        Checkpoints(pathlib.Path(tmp_path))


def test_silence_ends_with_the_last_who_asked_for_it(caplog):
    """Threads that write or read checkpoints overlap in any order: each gave back what it found, the last one silence.

    What others log meanwhile is not silenced.
    """
    absl = logging.getLogger("absl")
    before = absl.level, sys.unraisablehook, list(warnings.filters)
    first, second = (contextlib.ExitStack() for _ in range(2))
    for stack in (first, second):
        stack.enter_context(orbax_calls.QUIET)
    first.close()
    absl.error("is not seen")
    warnings.warn("is not seen", stacklevel=1)
    logging.getLogger("mine").error("is seen")
    second.close()
    assert (absl.level, sys.unraisablehook, list(warnings.filters)) == before
    assert caplog.messages == ["is seen"]


def test_a_package_that_is_not_there_is_missed_before_training(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match="orbax"):
        Checkpoints(tmp_path)
    # One that breaks later is an error like a disk's.
    with pytest.raises(CheckpointError, match="could not write checkpoint 1 .*orbax"):
        checkpoints.save(1, state(1))
    assert checkpoints.newest() is None
