"""The table of docs/results/mujoco.md."""

from __future__ import annotations

from pages import commit, origin, read, table


def mean(task: str, arm: str) -> str:
    """The mean return over seeds."""
    return f"{read('mujoco')['results']['summary'][f'{task}, {arm}']['mean']:,.0f}"


def returns() -> list[str]:
    """Returns with the preset and with the defaults."""
    found = read("mujoco")
    rows = []
    for name, arm in found["results"]["summary"].items():
        low, high = arm["interval"]
        task, settings = name.split(", ")
        seeds = ", ".join(f"{value:,.0f}" for value in sorted(arm["seeds"]))
        required = f"{arm['required']:,}" if "required" in arm else ""
        interval = f"{arm['mean']:,.0f} ({low:,.0f} to {high:,.0f})"
        rows.append((task, settings, interval, seeds, required, commit(found)))
    return table(("task", "settings", "mean return (95% interval)", "seeds", "required mean", "commit"), rows)


TABLES = {"mujoco": returns}
VALUES = {"origin": lambda: origin("mujoco")}
