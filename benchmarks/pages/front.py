"""Figures of README, of the site's first page and of the first page of results."""

from __future__ import annotations

from pages import mujoco, read, short, speed, table

CPU = "two CPU cores"


def cartpole_seconds() -> str:
    """The training time of the three seeds of the first command."""
    seconds = [seed["train_seconds"] for seed in read("learning/cartpole-ppo")["seeds"]]
    return f"{min(seconds):.1f} to {max(seconds):.1f} seconds"


def numbers() -> list[str]:
    """Four results, one a row."""
    gpu = [row for one in read("accelerator")["results"]["anakin"].values() for row in one["results"]]
    fastest = max((row for row in gpu if row["agent"] == "ppo"), key=lambda row: row["training"])
    plain = max(read("anakin")["results"], key=lambda row: row["ratio"])
    low, high = plain["ratio_range"]
    ratios = speed.search_ratios()
    halfcheetah = f"a return of {mujoco.mean('HalfCheetah', 'preset')}, mean of five seeds"
    beside = f"{plain['ratio']:.2f} times as fast ({low:.2f} to {high:.2f})"
    searches = f"PUCT {ratios['puct']}, Gumbel {ratios['gumbel']} times as fast"
    return table(
        ("measured", "result", "on"),
        [
            ("PPO on HalfCheetah, 1M steps", halfcheetah, CPU),
            (f"PPO on {fastest['num_envs']:,} CartPoles", f"{short(fastest['training'])} steps a second", "an H100"),
            (f"PPO on {plain['devices']} CPU devices beside a hand-written loop on one", beside, CPU),
            ("Tree search beside mctx", searches, CPU),
        ],
    )


TABLES = {"numbers": numbers}
VALUES = {"cartpole-seconds": cartpole_seconds}
