"""Compiles our programs for an H200 and for TPU v5e, without such a device (see `tests/support/compilers.py`).

The bounds say what was gained and must not be lost again (docs/adr/0011 and 0043). They are of launches, bytes and the compiler's
own estimates: nothing here is a measurement of time. What is for a target whose compiler is not installed is skipped:
`make test-nightly` installs both.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.support import compilers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROOT = pathlib.Path(__file__).parents[2]
MIB = 2**20


@functools.cache
def program(target: str, name: str) -> dict[str, Any]:
    """A program, compiled for a target in a process of its own."""
    if not (compilers.COMPILERS / ("libtpu" if target == "v5e" else "jax_plugins")).is_dir():
        pytest.skip(f"no compiler for {target} in {compilers.COMPILERS}: `make compilers` installs it")
    # All of XLA's passes, of which tests on a CPU go without two: what is looked at is what users get.
    found = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/compilers.py"), target, name],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stdout
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    ("name", "most"),
    [("ppo", 1080), ("vtrace", 260), ("vtrace_lstm", 750), ("lstm_unroll", 800), ("resnet_gradient", 150)],
)
def test_launches_of_an_update_on_a_gpu(name: str, most: int) -> None:
    """A small network's update takes as long as its launches, 2 to 3 us each, whatever they compute."""
    assert 0 < program("h200", name)["kernels"] <= most


@pytest.mark.parametrize("name", ["resnet_gradient", "lstm_unroll", "ppo", "vtrace"])
def test_no_gradient_adds_in_an_order_that_nobody_knows(name: str) -> None:
    assert not program("h200", name)["scatter"]


def test_devices_agree_once_a_minibatch() -> None:
    """On 16 gradients; on moments, counts, metrics and whether to go on for all minibatches at once."""
    assert 16 < program("h200", "ppo_8_devices")["reductions"] <= 16 + 8
    assert program("h200", "ppo")["reductions"] == 0


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_ring_of_images_is_written_in_place(target: str) -> None:
    """A copy of it would be another argument's worth of bytes; XLA:TPU once refused to compile what it wanted to copy."""
    found = program(target, "r2d2_images")
    ring = 8192 * 8 * 84 * 84
    assert found["argument_bytes"] > ring
    assert found["aliased_bytes"] > 0.95 * found["argument_bytes"]
    assert found["temp_bytes"] < 0.5 * ring


def test_small_observations_are_not_padded_on_a_tpu() -> None:
    """[10, 5] numbers were a tile of (8, 128): 70 million cycles and 1,613 MiB of temporaries an update."""
    found = program("v5e", "vtrace_16384_lanes")
    assert 0 < found["cycles"] <= 70_200_000 / 5
    assert found["temp_bytes"] <= 1613 * MIB / 5


def test_requirements_name_the_versions_of_this_jax() -> None:
    found = list(compilers.requirements())
    assert [line.split("=")[0].split("<")[0] for line in found] == ["libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt"]
    assert all("==" in line and ";" not in line and " " not in line for line in found)
    assert [*compilers.requirements(["v5e"]), *compilers.requirements(["h200"])] == found
