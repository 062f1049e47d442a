"""Figures of README, of the site's first page and of the first page of results."""

from __future__ import annotations

from pages import mujoco, read, short, speed, table

CPU = "two CPU cores"


def cartpole_seconds() -> str:
    """The training time of the three seeds of the first command."""
    seconds = [seed["train_seconds"] for seed in read("learning/cartpole-ppo")["seeds"]]
    return f"{min(seconds):.1f} to {max(seconds):.1f} seconds"


def pong() -> str:
    """The scores of V-trace's last policies on Pong."""
    scores = [read(f"queue/vtrace-pong-{seed}")["newest_checkpoint"]["mean"] for seed in (0, 1, 2)]
    return f"{', '.join(f'{score:.1f}' for score in scores)} of 21 with three seeds"


def numbers() -> list[str]:
    """Four results, one a row."""
    gpu = [row for one in read("accelerator")["results"]["anakin"].values() for row in one["results"]]
    fastest = max((row for row in gpu if row["agent"] == "ppo"), key=lambda row: row["training"])
    ratios = speed.search_ratios()
    halfcheetah = f"a return of {mujoco.mean('HalfCheetah', 'preset')}, mean of five seeds"
    searches = f"PUCT {ratios['puct']}, Gumbel {ratios['gumbel']} times as fast"
    return table(
        ("measured", "result", "on"),
        [
            ("V-trace on Pong, 10M steps", pong(), CPU),
            ("PPO on HalfCheetah, 1M steps", halfcheetah, CPU),
            (f"PPO on {fastest['num_envs']:,} CartPoles", f"{short(fastest['training'])} steps a second", "an H100"),
            ("Tree search beside mctx, a network of one layer", searches, CPU),
        ],
    )


TABLES = {"numbers": numbers}
VALUES = {"cartpole-seconds": cartpole_seconds}
