"""Between one device and a pod there is one word: the examples, with it."""

import ast
import pathlib

import pods
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def small(source):
    """An example with the word, and fewer steps."""
    tree, said = ast.parse(source), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "podracer.train":
            node.keywords.append(ast.keyword("topology", ast.Constant("pod")))
            said += 1
        if isinstance(node, ast.Constant) and node.value in (50_000, 200_000):
            node.value = 20_000
    assert said == 1
    return ast.unparse(tree)


def test_the_difference_is_a_word():
    before = (EXAMPLES / "quickstart.py").read_text()
    without = ast.unparse(ast.parse(before.replace("200_000", "20_000")))
    assert small(before).replace(", topology='pod'", "") == without


@pytest.mark.slow
def test_every_example_runs_on_a_pod(tmp_path):
    parts = [small(path.read_text()) for path in sorted(EXAMPLES.glob("*.py"))]
    assert len(parts) == 4
    script = tmp_path / "examples.py"
    runs = [f"exec({part!r}, {{'__name__': '__main__'}})" for part in parts]
    script.write_text("\n".join(["import os", f"os.chdir({str(tmp_path)!r})", *runs]))
    code, said = pods.finish(pods.start(script), timeout=400)
    assert code == 0, said[-4000:]
    assert said.count("[0] ppo on cartpole: return") >= 2
    assert "[0] learning rate 0.00010" in said
    assert "[1] compiling" not in said, "process 0 speaks for all"
