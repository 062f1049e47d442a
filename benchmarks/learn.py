"""Learning curves: every agent on every environment, three seeds each, against the return it must reach.

    make learn                             # all of them
    python benchmarks/learn.py cartpole    # only rows whose name contains a word; of a row's whole name, that row alone
    python benchmarks/learn.py --draw cartpole-ppo   # the curve alone, of the seeds whose result is there
    python benchmarks/readme.py            # writes the results into docs/results/learning.md

Each row is the command line that a user would type, run once a seed, and then evaluated on 1,000 fresh episodes.
Results go to `benchmarks/results/learning/<row>.json` and `.png`, with versions, seeds, commit and command.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import podracer
from podracer.bench import measure
from podracer.result import plots
from podracer.run import metrics

RESULTS = pathlib.Path(__file__).parent / "results" / "learning"
SEEDS = (0, 1, 2)
EPISODES = 1000


@dataclasses.dataclass(frozen=True)
class Row:
    """One learning claim.

    Attributes:
      name: of the result's files.
      arguments: what follows `podracer train`.
      bound: every seed's mean evaluation return must reach it (or stay below, with `at_most`).
      at_most: whether the bound is from above.
      at_least: what must be reached beside a bound from above, so that an agent that does nothing does not pass.
    """

    name: str
    arguments: str
    bound: float
    at_most: bool = False
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        """Says that a mean return satisfies the claim."""
        if self.at_least is not None and value < self.at_least:
            return False
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def claim(self) -> str:
        """In words."""
        least = "" if self.at_least is None else f"{self.at_least} <= "
        return f"{least}mean return {'<=' if self.at_most else '>='} {self.bound}"


MINIGRID_ROWS = "r2d2 envpool:MiniGrid-MemoryS7-v0 --total-steps 1000000"
MINIGRID_RETURNS = "--agent.discount 0.98 --agent.n-step 10 --agent.replay-ratio 16"
MINIGRID_ADAM = "--agent.learning-rate 5e-4 --agent.optimizer-eps 1e-5"
MINIGRID = f"{MINIGRID_ROWS} {MINIGRID_RETURNS} --agent.epsilon-base 0.6 --agent.epsilon-alpha 4 {MINIGRID_ADAM}"
# As `LINEAR` in benchmarks/memory_tasks.py: else a seed ended at 0.48, which is half of the return.
MINIGRID_LINEAR = (
    f"{MINIGRID_ROWS} {MINIGRID_RETURNS} {MINIGRID_ADAM} --agent.epsilon-base 0.95 --agent.epsilon-alpha 30 "
    "--agent.target-interval 20"
)

# Three of four starts lie beyond the object: an agent must turn round to see it, which pays nothing until it remembers
# objects. So it explores until then; with an entropy cost of 0.03 some seeds stay at half of the return.
MEMORY = (
    "ppo minigrid_memory --total-steps 1000000 --num-envs 64 --agent.torso mlp --agent.hidden-sizes 64 "
    "--agent.rollout-length 64 --agent.learning-rate 2e-3 --agent.entropy-cost 0.1 --agent.discount 0.98 "
    "--agent.no-normalize-rewards"
)

T_MAZE = "t_maze --total-steps 20000 --env.wrong-reward 0 --env.min-length 2 --env.max-length 2"

# Carts leave the track at 130 steps long before they stay for 500, and with values of 10 rewards (the default) that is
# learnt slowly: with lockstep one of two seeds ended at 178 after 200,000 steps (batches of 256, a replay of all rows).
SCALED = (
    "--total-steps 20000 --num-envs 16 --agent.batch-size 128 --agent.replay-ratio 64 --agent.replay-capacity 100000 "
    "--agent.replay-min-size 1000 --agent.learning-rate 1e-3 --agent.hidden-sizes 64 --agent.value-hidden-sizes 64 64"
)
"""Presets of `sac` for accelerators, for 16 lanes and two cores."""

MUZERO_CARTPOLE = "muzero envpool:CartPole-v1 --total-steps 200000 --agent.n-step 50"

# The optima of the gridworlds are 1.0 by exact value iteration (tests/support/value_iteration.py).
ROWS = (
    Row("catch-ppo", "ppo catch --total-steps 500000", 0.95),
    Row("catch-vtrace", "vtrace catch --total-steps 500000", 0.95),
    Row("cartpole-ppo", "ppo cartpole", 475),
    Row("cartpole-ppo-adamw", "ppo cartpole --agent.optimizer adamw", 475),
    Row("cartpole-ppo-muon", "ppo cartpole --agent.optimizer muon", 475),
    Row("cartpole-vtrace", "vtrace cartpole --total-steps 1000000", 475),
    Row("pendulum-ppo", "ppo pendulum --total-steps 1000000 --agent.discount 0.95", -300),
    Row(
        "memory_chain-ppo-lstm",
        "ppo memory_chain --env.length 10 --agent.core lstm --agent.core-size 64 --total-steps 200000",
        0.9,
    ),
    Row("memory_chain-vtrace-lstm", "vtrace memory_chain --env.length 10 --agent.core lstm --agent.core-size 64", 0.9),
    Row("acrobot-ppo", "ppo acrobot --preset classic", -100),
    Row("mountain_car-ppo", "ppo mountain_car --preset classic", -130),
    Row("mountain_car_continuous-ppo", "ppo mountain_car_continuous --preset classic", 90),
    Row("memory_chain-ppo", "ppo memory_chain --env.length 10", 0.1, at_most=True),
    Row("memory_chain-vtrace", "vtrace memory_chain --env.length 10", 0.1, at_most=True),
    Row("gridworld-tabular-ppo", "ppo gridworld --env.task tabular", 0.95),
    Row("gridworld-tabular-vtrace", "vtrace gridworld --env.task tabular", 0.95),
    Row(
        "gridworld-random_goals-vtrace",
        "vtrace gridworld --env.task random_goals --total-steps 2000000 "
        "--agent.hidden-sizes 128 128 --agent.learning-rate 3e-3",
        0.95,
    ),
    Row("gridworld-delayed_chain-ppo", "ppo gridworld --env.task delayed_chain", 0.95),
    Row("gridworld-delayed_chain-vtrace", "vtrace gridworld --env.task delayed_chain", 0.95),
    Row("deep_sea-ppo", "ppo deep_sea --env.size 6", 0.95),
    Row("deep_sea-vtrace", "vtrace deep_sea --env.size 6", 0.95),
    Row("minigrid_doorkey-ppo", "ppo minigrid_doorkey --env.size 6 --total-steps 500000", 0.9),
    Row("minigrid_memory-ppo-lstm", f"{MEMORY} --agent.core lstm", 0.9),
    Row("minigrid_memory-ppo", MEMORY, 0.6, at_most=True),
    Row("minatar_breakout-ppo", "ppo minatar_breakout --preset minatar --total-steps 5000000", 10),
    Row("pixel_catch-vtrace", "vtrace pixel_catch --total-steps 100000", 0.9),
    Row("catch-r2d2", "r2d2 catch --total-steps 100000", 0.95),
    Row("catch-pqn", "pqn catch --total-steps 100000", 0.95),
    Row("cartpole-pqn", "pqn cartpole", 475),
    *(
        Row(f"catch-dqn{name}", f"dqn catch --total-steps 100000{flags}", 0.95)
        for name, flags in {
            "": "",
            "-categorical": " --agent.values categorical",
            "-quantile": " --agent.values quantile",
            "-noise": " --agent.noise 0.5 --agent.epsilon-start 0 --agent.epsilon-final 0",
            "-priorities": " --agent.priority-exponent 0.5",
            "-n_step": " --agent.n-step 3",
        }.items()
    ),
    Row("cartpole-dqn", "dqn cartpole --total-steps 300000", 475),
    Row("deep_sea-dqn", "dqn deep_sea --env.size 6", 0.95),
    # Random actions all but never reach the far corner, and cost .005 on the way, which it learns to keep.
    Row("deep_sea-dqn-20", "dqn deep_sea --env.size 20", 0.05, at_most=True, at_least=-0.002),
    Row("gridworld-delayed_chain-dqn", "dqn gridworld --env.task delayed_chain --agent.n-step 3", 0.95),
    Row("pixel_catch-dqn", "dqn pixel_catch --total-steps 100000 --agent.torso shallow", 0.9),
    Row("catch-muzero", "muzero catch --total-steps 30000", 0.95),
    Row("catch-muzero-reanalyse", "muzero catch --total-steps 30000 --agent.reanalyse 1", 0.95),
    Row("cartpole-muzero", "muzero cartpole --total-steps 200000", 475),
    Row(
        "pixel_catch-muzero",
        "muzero pixel_catch --total-steps 30000 --agent.channels 16",
        0.9,
    ),
    Row("catch-efficientzero", "efficientzero catch --total-steps 20000", 0.95),
    Row("cartpole-efficientzero", "efficientzero cartpole --total-steps 60000", 475),
    Row(
        "pixel_catch-efficientzero",
        "efficientzero pixel_catch --total-steps 12000 --agent.channels 16 --agent.batch-size 32 "
        "--agent.replay-ratio 8",
        0.9,
    ),
    # A state that is made of one observation cannot know the sign: half of the turns are wrong, and no more, for the
    # wrong arm costs nothing. Eight frames are a whole episode.
    Row("t_maze-muzero", f"muzero {T_MAZE}", 0.6, at_most=True, at_least=0.3),
    Row("t_maze-muzero-stacked", f"muzero {T_MAZE} --agent.frame-stack 8", 0.9),
    # With a discount of 0.99 to turn a step later costs 0.005, and it may walk up and down until time is up.
    Row("t_maze-efficientzero", f"efficientzero {T_MAZE} --agent.discount 0.9", 0.6, at_most=True, at_least=0.3),
    # Sebulba, on environments in C++.
    Row("envpool-cartpole-muzero", MUZERO_CARTPOLE, 475),
    Row("envpool-cartpole-muzero-lockstep", f"{MUZERO_CARTPOLE} --mode lockstep", 475),
    Row(
        "envpool-cartpole-dqn-lockstep",
        "dqn envpool:CartPole-v1 --mode lockstep --num-envs 8 --agent.rollout-length 125 --agent.target-interval 250 "
        "--agent.discount 0.995 --total-steps 300000",
        475,
    ),
    Row("envpool-cartpole-r2d2", "r2d2 envpool:CartPole-v1 --agent.discount 0.99", 475),
    # Without memory, half of the episodes end at the wrong object.
    Row("envpool-minigrid-r2d2", f"{MINIGRID} --agent.core lstm --agent.core-size 128", 0.8),
    Row("envpool-minigrid-r2d2-gru", f"{MINIGRID} --agent.core gru --agent.core-size 128", 0.8),
    Row("envpool-minigrid-r2d2-lru", f"{MINIGRID_LINEAR} --agent.core lru --agent.core-size 128", 0.8),
    Row("envpool-minigrid-r2d2-feed-forward", f"{MINIGRID} --agent.core none", 0.6, at_most=True),
    Row("envpool-cartpole-vtrace", "vtrace envpool:CartPole-v1 --total-steps 1000000", 475),
    Row("envpool-cartpole-lockstep", "vtrace envpool:CartPole-v1 --total-steps 1000000 --mode lockstep", 475),
    Row("envpool-cartpole-ppo", "ppo envpool:CartPole-v1 --total-steps 1000000", 475),
    # The bounds of Acrobot and LunarLander are Gymnasium's thresholds.
    Row("envpool-acrobot-pqn", "pqn envpool:Acrobot-v1", -100),
    Row("envpool-mountain_car-pqn", "pqn envpool:MountainCar-v0", -130),
    # Settings by name.
    Row("envpool-acrobot-ppo", "ppo envpool:Acrobot-v1 --preset classic", -100),
    Row("gymnasium-acrobot-ppo", "ppo gymnasium:Acrobot-v1 --preset classic", -100),
    Row("envpool-mountain_car-ppo", "ppo envpool:MountainCar-v0 --preset classic", -130),
    Row("envpool-lunar_lander-ppo", "ppo envpool:LunarLander-v3 --preset classic", 200),
    Row("envpool-lunar_lander-pqn", "pqn envpool:LunarLander-v3 --preset classic", 200),
    Row("envpool-lunar_lander_continuous-ppo", "ppo envpool:LunarLanderContinuous-v3 --preset classic", 200),
    Row("pendulum-sac", "sac pendulum --preset classic", -200),
    Row("envpool-pendulum-sac", "sac envpool:Pendulum-v1 --preset classic", -200),
    Row("pendulum-td3", "sac pendulum --preset td3 --total-steps 30000", -200),
    # Presets for accelerators, scaled down.
    Row("pendulum-fast_td3", f"sac pendulum --preset fast_td3 {SCALED} --agent.max-value 500", -200),
    Row("pendulum-fast_sac", f"sac pendulum --preset fast_sac {SCALED} --agent.max-value 500", -200),
    Row("pendulum-sac-playground", f"sac pendulum --preset playground {SCALED}", -200),
    Row("pendulum-simba_v2", f"sac pendulum --preset simba_v2 {SCALED} --agent.discount 0.975", -200),
    Row("envpool-pendulum-ppo", "ppo envpool:Pendulum-v1 --preset classic", -200),
    Row("envpool-pendulum-ppo-tanh", "ppo envpool:Pendulum-v1 --preset classic --agent.policy tanh", -200),
    Row("envpool-catch-vtrace", "vtrace envpool:Catch-v0", 0.95),
    Row("envpool-catch-ppo", "ppo envpool:Catch-v0", 0.95),
)


def run(row: Row) -> bool:
    """Trains and evaluates a row's seeds, writes its result, and says whether the claim holds."""
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="podracer-learn-"))
    seeds = []
    for seed, result in trained(row, scratch):
        evaluation = result.evaluate(EPISODES, seed=1000 + seed)
        seeds.append({"seed": seed, "mean": evaluation.mean, "std": evaluation.std, "interval": evaluation.interval})
        seeds[-1] |= {k: result.summary[k] for k in ("env_steps", "train_seconds", "steps_per_second")}
        print(f"{row.name} seed {seed}: {evaluation}", flush=True)
    holds = all(row.holds(s["mean"]) for s in seeds)
    RESULTS.mkdir(parents=True, exist_ok=True)
    curve(row, scratch)
    report = {
        "command": f"podracer train {row.arguments}",
        "claim": row.claim,
        "holds": holds,
        "episodes": EPISODES,
        "seeds": seeds,
        "podracer": podracer.__version__,
        "commit": measure.commit(),
        "machine": measure.describe_machine(),
        "versions": measure.versions(),
    }
    (RESULTS / f"{row.name}.json").write_text(json.dumps(report, indent=2) + "\n")
    shutil.rmtree(scratch)
    return holds


def trained(row: Row, scratch: pathlib.Path) -> Iterator[tuple[int, podracer.Result]]:
    """Trains each seed by the command line, in a run directory named like the seed."""
    for seed in SEEDS:
        directory = scratch / str(seed)
        command = ["train", *row.arguments.split(), "--seed", str(seed), "--run-dir", str(directory), "--quiet"]
        subprocess.run([sys.executable, "-m", "podracer", *command], check=True)
        yield seed, podracer.load(directory)


def curve(row: Row, scratch: pathlib.Path) -> None:
    """Draws the mean of the seeds, with a band from the least to the most."""
    rows = [found | {"member": seed} for seed in SEEDS for found in metrics.read(scratch / str(seed) / "metrics.jsonl")]
    label = " on ".join(row.arguments.split()[:2])
    plots.learning_curve({label: rows}, RESULTS / f"{row.name}.png", title=f"podracer train {row.arguments}")


def draw(row: Row) -> None:
    """Draws a row's curve again; its result stays as it is.

    Raises:
      ValueError: where a seed ends with other steps than the result says, so that the curve would be of another run.
    """
    measured = json.loads((RESULTS / f"{row.name}.json").read_text())["seeds"]
    with tempfile.TemporaryDirectory(prefix="podracer-learn-") as scratch:
        for seed, result in trained(row, pathlib.Path(scratch)):
            steps, before = result.summary["env_steps"], measured[seed]["env_steps"]
            if steps != before:
                raise ValueError(f"{row.name}, seed {seed}: {steps} steps, but the result has {before}; run the row.")
        curve(row, pathlib.Path(scratch))


LATER_FLAGS = {
    "--agent.target-period 1000": "--agent.target-interval 250",
    "--agent.samples-per-row": "--agent.replay-ratio",
    "--agent.replay-ratio 8 --agent.epsilon-base": "--agent.replay-ratio 16 --agent.epsilon-base",
    "--agent.adam-eps": "--agent.optimizer-eps",
}
"""Settings that have another name or another unit since results were stored, as a reader has to type them now."""


def typed(command: str) -> str:
    """A stored command with today's settings."""
    for stored, today in LATER_FLAGS.items():
        command = command.replace(stored, today)
    return command


def table() -> list[str]:
    """The lines of docs/results/learning.md: a result for each command."""
    measured = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    lines = ["| command | required | seeds 0 / 1 / 2 | commit |", "|---|---|---|---|"]
    for result in sorted(measured, key=lambda result: result["command"]):
        command = typed(result["command"].removeprefix("podracer "))
        means = " / ".join(f"{round(seed['mean'], 3) + 0.0:.3g}" for seed in result["seeds"])
        lines.append(f"| `{command}` | {result['claim']} | {means} | {result['commit'][:7]}{result['commit'][12:]} |")
    return lines


def main(words: list[str]) -> int:
    """Runs the rows that have one of the words as their name, or in it, or all. `--draw` draws their curves alone."""
    only_draw, words = "--draw" in words, [word for word in words if word != "--draw"]
    names = {row.name for row in ROWS}
    fits = lambda name: any(word == name if word in names else word in name for word in words)  # noqa: E731
    chosen = [row for row in ROWS if not words or fits(row.name)]
    if only_draw:
        for row in chosen:
            draw(row)
        return 0
    missed = [row.name for row in chosen if not run(row)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} claims hold")
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
