"""Between one device and a pod there is one word: the examples and the commands of the reference, with it."""

import ast

import pytest

from tests.support import pods
from tests.test_docs import ROOT, command_lines

EXAMPLES = ROOT / "examples"


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


@pytest.mark.slow
@pytest.mark.nightly
def test_every_example_runs_on_a_pod(tmp_path):
    # The others train by `anakin.update` or in sweeps, which belong to one process.
    sources = [path.read_text() for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "optuna_sweep"]
    parts = [small(source) for source in sources if "podracer.train(" in source]
    assert len(parts) == 4
    script = tmp_path / "examples.py"
    runs = [f"exec({part!r}, {{'__name__': '__main__'}})" for part in parts]
    script.write_text("\n".join(["import os", f"os.chdir({str(tmp_path)!r})", *runs]))
    code, said = pods.finish(pods.start(script), timeout=400)
    assert code == 0, said[-4000:]
    assert said.count("[0] ppo on cartpole: return") >= 2
    assert "[0] learning rate 0.00010" in said
    assert "[1] compiling" not in said, "process 0 speaks for all"


# Later flags win over those of a command.
FEW = "--num-envs 8 --total-steps 160 --agent.rollout-length 8 --eval-every 160 --eval-episodes 2"
REPLAY = "--agent.batch-size 8 --agent.replay-min-size 16"
# Agents that search are compared in test_pod_equality.py.
FEWER = {
    "vtrace": "",
    "ppo": "--agent.num-epochs 1 --agent.num-minibatches 1",
    "r2d2": "--agent.batch-size 8 --agent.replay-min-size 128 --agent.replay-capacity 3200 --agent.replay-ratio 16 "
    "--agent.burn-in 2 --agent.trace-length 8 --agent.torso shallow",
    "dqn": f"{REPLAY} --agent.replay-ratio 2 --agent.replay-capacity 800 --agent.target-interval 16 --agent.torso shallow",
}
MY_MODULE = """
import gymnasium

gymnasium.register("MyEnv-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
"""


def runs(commands):
    """A script of commands, made smaller, and with the word."""
    yield "import sys"
    yield "sys.path.insert(0, '.')"
    yield "from podracer import cli"
    for command in commands:
        short = ["--env.max-episode-steps", "50"] * command[2].startswith("envpool:")
        line = [*command, *FEW.split(), *FEWER[command[1]].split(), *short, "--topology", "pod"]
        yield f"assert cli.run({line!r}) == 0, {line!r}"


@pytest.mark.slow
@pytest.mark.nightly
def test_every_command_of_the_reference_runs_on_a_pod(tmp_path):
    # Those that differ in these alone are the same on a pod.
    alike = ("--seed", "--seeds", "--run-dir", "--topology")
    lines = [
        line
        for line in command_lines(ROOT / "docs" / "reference" / "commands.md")
        if line[0] == "train" and line[1] in FEWER
    ]
    commands = list({tuple(line if line[3:4] and line[3] not in alike else line[:3]): line for line in lines}.values())
    assert {line[1] for line in commands} == FEWER.keys()
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    script = tmp_path / "commands.py"
    script.write_text("\n".join(["import os", f"os.chdir({str(tmp_path)!r})", *runs(commands)]))
    code, said = pods.finish(pods.start(script), timeout=400)
    assert code == 0, said[-4000:]
    assert said.count("[0] compiling") == len(commands) >= 9
    assert "[1] compiling" not in said, "process 0 speaks for all"
