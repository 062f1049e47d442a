"""Processes that another one starts."""

import pathlib
import subprocess
import sys

import pytest

PARENT = """
import os, sys
from podracer.system import children
os.nice(7)
sys.exit(children.start(["sh", "-c", "cat /proc/self/autogroup; nice"], sys.stdout.fileno()).wait())
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/autogroup").exists(), reason="Linux weighs no sessions here")
def test_the_session_of_a_child_keeps_the_priority_of_its_parent():
    """Or a queue at the lowest priority would take half of a core from what somebody works on."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    group, own = done.stdout.split("\n")[0], done.stdout.split()[-1]
    assert group.endswith(f" nice {own}"), group
    assert int(own) >= 7
