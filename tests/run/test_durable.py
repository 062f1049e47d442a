"""The files of a run outlive a power cut: the run syncs them, and names the losses of the disk."""

import errno
import os
import pathlib

import jax.numpy as jnp
import pytest

from podracer import errors
from podracer.run import checkpoint, metrics, rundir
from podracer.system import files


@pytest.fixture
def asked(monkeypatch):
    """Names of what the disk was asked for."""
    names, fsync = [], os.fsync

    def noted(descriptor):
        names.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return names


def test_descriptions_and_rows(tmp_path, asked):
    rundir.write_json(tmp_path / "config.json", {"a": 1})
    written, *folders = asked
    assert (written.parent, written.suffix, set(folders)) == (tmp_path, ".json", {tmp_path}), "the file before its name"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    log = metrics.Log(tmp_path)
    log.to_disk()
    log.close()
    assert asked[-1] == tmp_path / "metrics.jsonl"


def test_checkpoints(tmp_path, asked, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save(1, {"n": jnp.int32(1)})
    there = tmp_path / "checkpoints" / "1"
    assert {*there.rglob("*"), there, there.parent} <= set(asked)

    def lost(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", lost)
    with pytest.raises(errors.CheckpointError, match=r"could not write checkpoint 2 .*: Input/output error\."):
        checkpoints.save(2, {"n": jnp.int32(2)})
    checkpoints.close()


def test_a_file_system_that_cannot_be_asked(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    files.to_disk(tmp_path)
