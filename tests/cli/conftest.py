"""The small run that the tests of this folder share, and a `podracer.train` that trains nothing."""

import pathlib
import shutil

import pytest

import podracer
from tests.support import harness
from tests.support.shell import TRAIN, run


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
    with harness.shared_programs():
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a finished run: tests look at it, and change copies."""
    directory = tmp_path_factory.mktemp("cli") / "catch-run"
    with harness.shared_programs():
        assert run(f"{TRAIN} --quiet --run-dir {directory}") == 0
    return directory


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the finished run's directory, to change."""
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def asked(monkeypatch):
    """The settings of every `podracer.train`, which goes no further."""
    settings_of_all = []

    def train(agent, environment, **settings):
        settings_of_all.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(podracer, "train", train)
    return settings_of_all
