"""The program `podracer`: its exit code, its output pipe, the modules that it finds, and the types that it ships."""

import errno
import os
import pathlib
import signal
import sys
import tomllib

import pytest

import envs_jax
import podracer
from podracer import cli
from tests.support.shell import run


def test_type_checkers_read_our_types():
    """The marker is beside the sources, and a wheel takes it along."""
    for package in (podracer, envs_jax):
        assert (pathlib.Path(package.__file__).parent / "py.typed").exists()
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"] == {"*": ["py.typed", "*.proto"]}


def test_main_exits_with_the_code(monkeypatch):
    monkeypatch.setattr("sys.argv", ["podracer", "nonsense"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2


def test_a_reader_that_has_read_enough(monkeypatch, capsys):
    """As in `podracer agents | head -1`: nothing is said, and a shell sees what it sees of other programs."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as printed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", printed)
        assert run("agents") == 0
        os.close(reader)
        assert run("agents") == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""

    def lost(argv):
        raise BrokenPipeError(errno.EPIPE, "the connection is gone")

    with monkeypatch.context() as patch:
        patch.setattr(cli.commands, "_reader_is_gone", lambda: False)
        patch.setattr("podracer.cli.listing.agents", lost)
        assert run("agents") == 1
        assert "[Errno 32] the connection is gone, in lost" in capsys.readouterr().err


def test_modules_beside_the_shell_are_found_last_and_only_where_one_is_asked_for(tmp_path, monkeypatch):
    """A file tyro.py there would run for every command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run", lambda argv: 0)
    before = [path for path in sys.path if path != str(tmp_path)]
    for command, there in (
        ("--version", []),
        ("eval runs/x", []),
        ("train ppo gymnasium:CartPole-v1", []),
        ("train ppo gymnasium:CartPole-v1,gymnasium:Acrobot-v1", []),
        ("train ppo gymnasium:mine:Reach-v0", [str(tmp_path)]),
        ("train ppo envpool:CartPole-v1,gymnasium:mine:Reach-v0", [str(tmp_path)]),
        ("eval runs/x --trust", [str(tmp_path)]),
    ):
        monkeypatch.setattr(sys, "path", [*before])
        with pytest.raises(SystemExit, match="0"):
            cli.main(command.split())
        assert sys.path == [*before, *there]
