"""Memory of a process that trains for long: measured for a while, and what ten days of it come to.

    python benchmarks/long_run.py --minutes 60

Trains a population in a process of its own, whose members give so many rows of metrics that memory holds its limit of
rows (`podracer/run/history.py`) after a third of the time. Every 15 seconds the resident memory, the open descriptors
and the threads of the process are read from `/proc`. The slope after the limit is a least-squares line. Ten days at
that slope must stay below 200 MB. Writes `benchmarks/results/long_run.json` and `.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from podracer.bench import measure
from podracer.run import history

RESULTS = pathlib.Path(__file__).parent / "results"
SAMPLE_SECONDS = 15.0
DAYS = 10
LIMIT_MB = 200.0

RUN = (
    "train vtrace catch --population 16 --num-envs 4 --agent.hidden-sizes 8 --eval-every 2000 --eval-episodes 4 "
    "--total-steps 100000000000 --checkpoint-minutes 5 --quiet"
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Settings of the measurement.

    Attributes:
      minutes: length of the run.
    """

    minutes: float = 60.0


def main() -> int:
    """Runs, samples, fits the slope and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = Arguments(**vars(parser.parse_args()))
    minutes = arguments.minutes
    with tempfile.TemporaryDirectory(prefix="podracer-long-run-") as scratch:
        samples = _sample(pathlib.Path(scratch) / "run", 60.0 * minutes)
    found = _summary(samples)
    print(found["claim"], flush=True)
    command = f"python benchmarks/long_run.py --minutes {minutes:g}"
    results = {"run": f"podracer {RUN}", **found, "samples": samples}
    measure.write(RESULTS / "long_run.json", command, arguments, results)
    _draw(samples, found)
    return 0 if found["holds"] else 1


def _sample(directory: pathlib.Path, seconds: float) -> list[dict[str, float]]:
    """Starts the run and reads its process until the time is over; then stops it as Ctrl-C does."""
    command = [sys.executable, "-m", "podracer", *RUN.split(), "--run-dir", str(directory)]
    process = subprocess.Popen(command)
    began, samples = time.monotonic(), []
    rows = _Rows(directory / "metrics.jsonl")
    while time.monotonic() - began < seconds:
        time.sleep(SAMPLE_SECONDS)
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself with code {process.returncode}")
        samples.append({"seconds": time.monotonic() - began, "rows": rows.count(), **_process(process.pid)})
        print(" ".join(f"{name} {value:,.0f}" for name, value in samples[-1].items()), flush=True)
    process.send_signal(signal.SIGINT)
    if (code := process.wait(120)) != -signal.SIGINT:  # which a shell shows as 130
        raise SystemExit(f"the run was stopped, and ended with code {code} instead of by SIGINT")
    return samples


class _Rows:
    """Lines of a growing file, counted without reading any part of it twice."""

    def __init__(self, path: pathlib.Path):
        self._path, self._read, self._lines = path, 0, 0

    def count(self) -> int:
        """The number of lines so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                while block := file.read(1 << 20):
                    self._read += len(block)
                    self._lines += block.count(b"\n")
        return self._lines


def _process(pid: int) -> dict[str, float]:
    """Resident memory (MB), descriptors and threads of a process (Linux)."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    descriptors = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    memory = int(fields["VmRSS"].split()[0]) / 1024
    return {"memory_mb": memory, "descriptors": descriptors, "threads": int(fields["Threads"])}


def _summary(samples: list[dict[str, float]]) -> dict[str, object]:
    """The slope after the limit of rows was reached, and what it comes to in ten days."""
    late = [sample for sample in samples if sample["rows"] > history.MAX_ROWS]
    if len(late) < 20:
        raise SystemExit(f"only {len(late)} samples after {history.MAX_ROWS:,} rows; give more --minutes")
    seconds, memory = (np.array([sample[name] for sample in late]) for name in ("seconds", "memory_mb"))
    (slope, _), covariance = np.polyfit(seconds, memory, 1, cov=True)
    error = float(np.sqrt(covariance[0, 0]))
    scale = 86400.0 * DAYS
    claim = (
        f"after {history.MAX_ROWS:,} rows, in {(seconds[-1] - seconds[0]) / 60:.0f} minutes and "
        f"{late[-1]['rows'] - late[0]['rows']:,.0f} rows more: {memory.min():.0f} to {memory.max():.0f} MB, "
        f"{slope * 3600:+.2f} MB an hour, {slope * scale:+.0f} MB (95%: {1.96 * error * scale:.0f}) in {DAYS} days"
    )
    descriptors = sorted({int(sample["descriptors"]) for sample in late})
    return {
        "claim": claim,
        "holds": bool(slope * scale < LIMIT_MB),
        "mb_per_hour": slope * 3600,
        "mb_in_ten_days": slope * scale,
        "descriptors": descriptors,
        "limit_of_rows": history.MAX_ROWS,
    }


def _draw(samples: list[dict[str, float]], found: dict[str, object]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    minutes = [sample["seconds"] / 60 for sample in samples]
    axes.plot(minutes, [sample["memory_mb"] for sample in samples], color="tab:blue")
    full = next(sample["seconds"] / 60 for sample in samples if sample["rows"] > found["limit_of_rows"])
    axes.axvline(full, color="gray", linestyle="--", linewidth=1)
    axes.text(full, 0, f" {found['limit_of_rows']:,} rows in memory", va="bottom", color="gray")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory (MB)")
    figure.savefig(RESULTS / "long_run.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
