"""The examples do what they say, made small."""

import importlib.util
import pathlib

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SMALL = {"num_envs": 8, "eval_episodes": 4, "progress": False}


def example(name):
    """An example as a module; what it does as a script is not done."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_loss_of_ones_own():
    result = example("own_loss").main(total_steps=8 * 64 * 2, **SMALL)
    rows = [row for row in result.history if "loss/total" in row]
    assert len(rows) >= 2
    for row in rows:  # every name has its own number
        terms = row["loss/policy"] + row["loss/kl_penalty"] + 0.5 * row["loss/value"] - 0.01 * row["policy/entropy"]
        assert row["loss/total"] == pytest.approx(terms, rel=1e-4)
        assert row["loss/kl_penalty"] == pytest.approx(row["policy/kl"])
        assert row["policy/kl"] > 0
