"""Figures of docs/results/faults.md: runs whose workers and processes are killed."""

from __future__ import annotations

from pages import commit, read, table


def remote_churn() -> str:
    """Growth over ten minutes of workers that come and die."""
    found = read("remote_churn")["results"]
    most = 100 * (max(found["growth"].values()) - 1)
    killed = f"{found['kills']} worker processes and {found['replacements']} times a supervisor with both of its own"
    return f"{killed} were killed, and " + (f"they grew by up to {most:.1f} %" if most > 0.05 else "nothing of it grew")


def pod_churn() -> str:
    """Starts of a run of two processes that is hit again and again."""
    found = read("pod_churn")["results"]
    good, starts = sum(start["good"] for start in found["starts"]), len(found["starts"])
    slowest = max(start["seconds_to_the_end"] for start in found["starts"])
    went = f"{good} of {starts} starts went on from the newest checkpoint"
    return f"{went}, and ended within {slowest:.1f} s of the signal"


def losses() -> list[str]:
    """Returns of V-trace on CartPole with workers that are killed, and with none killed."""
    found = read("remote_losses")
    rows = []
    for about, seeds in found["results"].items():
        returns = " / ".join(f"{seed['eval_return_mean']:.3g}" for seed in seeds)
        killed, filler = (sum(seed[name] for seed in seeds) for name in ("killed", "filler_rows"))
        rows.append((about, returns, killed, f"{filler:,.0f}", commit(found)))
    return table(("run", "returns, seeds 0 / 1 / 2", "workers killed", "filler rows", "commit"), rows)


TABLES = {"losses": losses}
VALUES = {
    "remote-churn": remote_churn,
    "remote-churn-commit": lambda: commit(read("remote_churn")),
    "pod-churn": pod_churn,
    "pod-churn-commit": lambda: commit(read("pod_churn")),
}
