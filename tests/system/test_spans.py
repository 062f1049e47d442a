"""Spans of a command: written however it ends."""

import json
import os
import subprocess
import sys

import pytest

COMMAND = """
import os
from podracer import cli
from podracer.system import spans
assert "PODRACER_SPANS" not in os.environ
def run(argv):
    with spans.span("part"):
        return {code}
cli.run = run
cli.main([])
"""


@pytest.mark.parametrize("code", [0, 130])
def test_a_command_writes_its_spans_however_it_ends(code, tmp_path):
    """A run that a signal stopped has them, too; a process that it starts writes none."""
    path = tmp_path / "spans.json"
    variables = os.environ | {"PODRACER_SPANS": str(path)}
    subprocess.run([sys.executable, "-c", COMMAND.format(code=code)], env=variables, check=False)
    assert [span["name"] for span in json.loads(path.read_text())["spans"]] == ["part"]


def test_spans_that_cannot_be_written_are_lost_in_silence(tmp_path):
    variables = os.environ | {"PODRACER_SPANS": str(tmp_path / "gone" / "spans.json")}
    words = [sys.executable, "-c", COMMAND.format(code=0)]
    done = subprocess.run(words, env=variables, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
