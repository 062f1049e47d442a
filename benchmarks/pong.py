"""Does a value-based agent play Pong, learning on two cores?

    python benchmarks/pong.py pqn --run-dir DIR [--steps 10000000]
    python benchmarks/pong.py dqn --run-dir DIR [--steps 2000000] [--replay 200000]
    python benchmarks/pong.py pqn --run-dir DIR --report

`pqn` has its paper's settings with a shallow network, 16 lanes and minibatches of 128 rows; `dqn` is the `fast_dqn`
preset with a shallow network, Adam, double Q-learning, three-step returns and a replay, a period and an exploration for
two million steps. Both play whole games, unclipped, by the protocols of their presets: with FIRE after up to 29
no-ops.

Stopped by a signal, and started again in the same directory, it goes on where it was. At the end (with `--report`, at
any time) the newest checkpoint and the best one play fresh games, and `benchmarks/results/atari/pong-pqn.json` and
`pong-pqn.png` (or `-dqn`) are written. The exit code says whether the best checkpoint reaches 18, and a shell's how
a signal ended it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import run_result

from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results" / "atari"
BOUND = 18.0
GAMES = 30
EVALUATIONS = 20
"""Over a run of full length; a checkpoint goes with each."""

STEPS = {"pqn": 10_000_000, "dqn": 2_000_000}
SETTINGS = {
    "pqn": "--preset atari --agent.torso shallow --num-envs 16 --agent.num-minibatches 4",
    # At 2.5e-4 and the preset's epsilon, which is RMSProp's, 15 of the first layer's 16 filters are dead after 4,500
    # updates, at 1e-4 half of them (docs/adr/0018).
    "dqn": "--preset fast_dqn --agent.torso shallow --agent.optimizer adam --agent.learning-rate 1e-4 "
    "--agent.optimizer-eps 1e-8 --agent.double --agent.n-step 3 "
    "--agent.replay-min-size 10000 --agent.target-interval 500 --agent.epsilon-final 0.02 --agent.epsilon-decay 100000",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, or goes on, and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("agent", choices=SETTINGS)
    parser.add_argument("--run-dir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, help="10M of PQN, 2M of DQN if left out")
    parser.add_argument("--replay", type=int, default=200_000, help="rows that DQN keeps, 7 KB each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="of what there is, without training on")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON and the picture")
    arguments = parser.parse_args(argv)
    command = training(arguments)
    if not arguments.report:
        note = arguments.run_dir / "started.json"
        if not note.exists():  # the checkout may change while it trains
            arguments.run_dir.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"commit": measure.commit(), "machine": measure.describe_machine()}))
        code = follow([sys.executable, "-m", "podracer", *command])
        if code:
            print(f"not complete (exit code {code}); the same command goes on with it.", file=sys.stderr)
            return code
    return report(arguments, command)


def training(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `podracer`."""
    steps = arguments.steps or STEPS[arguments.agent]
    every = max(1, STEPS[arguments.agent] // EVALUATIONS)
    replay = ["--agent.replay-capacity", str(arguments.replay)] if arguments.agent == "dqn" else []
    return [
        *("train", arguments.agent, "envpool:Pong-v5", *SETTINGS[arguments.agent].split(), *replay),
        *("--total-steps", str(steps), "--seed", str(arguments.seed)),
        *("--eval-every", str(every), "--eval-episodes", str(GAMES), "--checkpoint-every", str(every)),
        *("--env-timeout", "100000", "--run-dir", str(arguments.run_dir), "--resume"),
    ]


def follow(command: Sequence[str]) -> int:
    """Runs a command, which gets this process' signals; returns its exit code."""
    process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C comes once, from here

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = process.wait()
    return code if code >= 0 else 128 - code


def report(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Plays games with the newest checkpoint and the best one; writes JSON and a picture."""
    found = run_result.read(arguments.run_dir, GAMES, seed=arguments.seed + 1)
    results: dict[str, Any] = {
        "command": f"python benchmarks/pong.py {arguments.agent} --run-dir RUN: podracer "
        + " ".join(command).replace(str(arguments.run_dir), "RUN"),
        **found,
        **json.loads((arguments.run_dir / "started.json").read_text()),
        "total_steps": arguments.steps or STEPS[arguments.agent],
        "protocol": protocol(found["settings"]),
        "bound": BOUND,
    }
    for name in ("best", "newest"):
        print(f"{name}: {results[f'{name}_checkpoint']}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"pong-{arguments.agent}.json"
    path.write_text(json.dumps(results, indent=2, default=str) + "\n")
    title = f"{arguments.agent} on Pong, shallow network, seed {arguments.seed}"
    run_result.draw(arguments.run_dir, path.with_suffix(".png"), title)
    print(f"wrote {path}")
    return 0 if results["best_checkpoint"]["mean"] >= BOUND else 1


def protocol(settings: dict[str, Any]) -> str:
    """The protocol of a report's games in words, by the settings of a run."""
    most = settings["env_options"]["noop_max"]
    opening = f"0 to {most - 1} no-ops and FIRE" if settings["env_options"]["fire_reset"] else f"1 to {most} no-ops"
    return (
        f"{settings['protocol']}: {GAMES} fresh games each, whole, behind {opening}, unclipped returns, a share of "
        f"{settings['agent_config']['evaluation_epsilon']:g} of actions random"
    )


if __name__ == "__main__":
    sys.exit(main())
