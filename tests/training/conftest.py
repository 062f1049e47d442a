"""Runs that the tests of this folder share."""

import pathlib
import shutil

import pytest

from tests.support import harness
from tests.support.small_run import train


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
    with harness.shared_programs():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run: its result, and what `log` was called with."""
    calls = []
    directory = tmp_path_factory.mktemp("finished") / "run"
    with harness.shared_programs():
        result = train(directory, log=lambda steps, row: calls.append((steps, dict(row))))
    return result, calls


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run's directory, to break."""
    return pathlib.Path(shutil.copytree(finished[0].run_dir, tmp_path / "run"))
