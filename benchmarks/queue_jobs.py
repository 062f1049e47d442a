"""The jobs of `benchmarks/job_queue.py`, in their order: what must be seen to learn, and what it must reach."""

from __future__ import annotations

from typing import NamedTuple


class Job(NamedTuple):
    """Runs of one setting, with a seed each.

    Attributes:
      name: of the files of results, before the seed.
      train: what follows `podracer train`: agent, environment, preset and lanes.
      steps: rows to train for.
      bound: the mean return that the last policy must reach; None where no number is required.
      at_most: whether the bound is from above, as a control's is.
      games: games that the last policy plays.
      hours: of one run on two quiet cores, about. After a job of more than one, further seeds wait until the first seed
        has reached the bound and every other job has had its turn.
      seeds: the seeds, in order.
      samples: whether the policy samples in these games, as the papers of V-trace and PPO have it for Atari, where the
        emulator is deterministic.
      reference: a number of others, and its source.
    """

    name: str
    train: str
    steps: int
    bound: float | None
    games: int
    hours: float
    at_most: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: bool = False
    reference: str = ""

    @property
    def claim(self) -> str:
        """The bound in words."""
        return "" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:g}"

    def holds(self, mean: float) -> bool:
        """True where a mean return reaches the bound, or there is none."""
        return self.bound is None or (mean <= self.bound if self.at_most else mean >= self.bound)


class Run(NamedTuple):
    """One job with one seed, which is one run directory and one file of results."""

    job: Job
    seed: int

    @property
    def name(self) -> str:
        return f"{self.job.name}-{self.seed}"

    @property
    def command(self) -> str:
        """The line that a user would type, without the run directory."""
        every = max(1, self.job.steps // EVALUATIONS)
        evaluations = f"--eval-every {every} --eval-episodes {self.job.games} --checkpoint-every {every}"
        return f"podracer train {self.job.train} --total-steps {self.job.steps} --seed {self.seed} {evaluations}"


EVALUATIONS = 20
"""Evaluations of a run; a checkpoint goes with each."""

WHOLE_GAMES = "--env-timeout 100000"
"""An evaluation of whole games on busy cores is no hung environment."""

MINIGRID = (
    "r2d2 envpool:MiniGrid-MemoryS7-v0 --agent.discount 0.98 --agent.n-step 10 --agent.replay-ratio 16 "
    "--agent.epsilon-base 0.6 --agent.epsilon-alpha 4 --agent.learning-rate 5e-4 --agent.optimizer-eps 1e-5"
)

CLEANRL = "CleanRL's documentation, at as many rows"

# Eight lanes make four times the updates of the paper's 32 of as many rows. With 32 the policy of Pong is still uniform
# after 1.5M rows and 2,300 updates.
JOBS = (
    Job(
        "vtrace-pong",
        f"vtrace envpool:Pong-v5 --preset atari --num-envs 8 {WHOLE_GAMES}",
        10_000_000,
        18,
        30,
        2,
        samples=True,
    ),
    Job(
        "vtrace-breakout",
        f"vtrace envpool:Breakout-v5 --preset atari --num-envs 8 {WHOLE_GAMES}",
        20_000_000,
        100,
        30,
        4.5,
        samples=True,
    ),
    # Two cores do 4M rows in two hours or so; PQN and PPO with earlier settings were at 20 and 4 after 3.3M and 2.2M.
    Job("pqn-pong", f"pqn envpool:Pong-v5 --preset atari {WHOLE_GAMES}", 4_000_000, 18, 30, 2.5),
    Job(
        "ppo-pong",
        f"ppo envpool:Pong-v5 --preset atari {WHOLE_GAMES}",
        4_000_000,
        18,
        30,
        2.5,
        samples=True,
        reference="20.4 at 10M (CleanRL)",
    ),
    Job(
        "ppo-pendulum-tanh",
        "ppo envpool:Pendulum-v1 --preset classic --agent.policy tanh",
        500_000,
        -200,
        1000,
        0.05,
        reference="-168.6 of the clipped policy, in docs/results/learning.md; -175 (SLM-Lab)",
    ),
    Job(
        "ppo-halfcheetah",
        "ppo envpool:HalfCheetah-v4 --preset mujoco",
        1_000_000,
        1300,
        100,
        0.1,
        reference=f"1,443 ({CLEANRL})",
    ),
    Job(
        "ppo-hopper",
        "ppo envpool:Hopper-v4 --preset mujoco",
        1_000_000,
        2000,
        100,
        0.1,
        reference=f"2,383 ({CLEANRL})",
    ),
    Job(
        "ppo-walker2d",
        "ppo envpool:Walker2d-v4 --preset mujoco",
        1_000_000,
        1600,
        100,
        0.1,
        reference=f"2,288 ({CLEANRL})",
    ),
    Job(
        "sac-halfcheetah",
        "sac envpool:HalfCheetah-v4",
        200_000,
        3500,
        100,
        0.5,
        reference="9,535 at 1M (rl-zoo); 9,635 at 1M (CleanRL)",
    ),
    Job("r2d2-pixel_catch", "r2d2 pixel_catch", 50_000, 0.9, 1000, 0.1),
    # A frame of this task shows all there is, so that memory is not needed.
    Job("r2d2-pixel_catch-feed-forward", "r2d2 pixel_catch --agent.core none", 50_000, 0.9, 1000, 0.1),
    Job("r2d2-minigrid_memory", f"{MINIGRID} --agent.core lstm --agent.core-size 128", 1_000_000, 0.8, 1000, 0.25),
    Job("r2d2-minigrid_memory-feed-forward", f"{MINIGRID} --agent.core none", 1_000_000, 0.6, 1000, 0.25, True),
    Job(
        "dqn-pong-fast_dqn",
        f"dqn envpool:Pong-v5 --preset fast_dqn {WHOLE_GAMES}",
        5_000_000,
        None,
        30,
        8,
        seeds=(0,),
        reference="18.7 at 50M rows (Daley and Amato 2021, table 4)",
    ),
)
"""The presets are what they are: a job changes no more than lanes. The settings of MiniGrid are those of
`benchmarks/learn.py`."""


def runs(jobs: tuple[Job, ...], held: set[str]) -> list[Run]:
    """The runs of jobs, in order.

    Args:
      jobs: the jobs.
      held: names of the runs whose result reaches its bound.
    """
    first = [Run(job, seed) for job in jobs for seed in (job.seeds if job.hours <= 1 else job.seeds[:1])]
    long = [job for job in jobs if job.hours > 1 and Run(job, job.seeds[0]).name in held]
    return first + [Run(job, seed) for job in long for seed in job.seeds[1:]]
