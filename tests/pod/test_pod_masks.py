"""Masks of actions in a pod: DQN learns the masked probe in two processes, and takes no illegal action."""

import json
import pathlib

import jax
import pytest

from tests.support import benchmarks, pods


def on_a_pod(directory):
    result, illegal = benchmarks.load("masks").probed("dqn", topology="pod")
    assert result.summary["processes"] == 2
    if jax.process_index() == 0:
        found = {"return": result.summary["eval_return_mean"], "illegal": illegal}
        pathlib.Path(directory, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.nightly
def test_two_processes_learn_the_masked_probe(tmp_path):
    pods.call(on_a_pod, tmp_path, directory=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["return"] >= 0.99
    assert found["illegal"] == 0.0
