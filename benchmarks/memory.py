"""Does memory stay flat? Trains for a while and records the resident set and the number of live arrays.

python benchmarks/memory.py [--env envpool:CartPole-v1] [--minutes 10] [--json benchmarks/results/memory.json]
"""

import argparse
import contextlib
import gc
import json
import pathlib
import tempfile
import time

import jax

import podracer
from podracer.bench.measure import write


def resident_mib():
    """The resident set of this process in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", default="vtrace")
    parser.add_argument("--env", default="envpool:CartPole-v1")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows, begun = [], time.perf_counter()

    class EnoughError(Exception):
        pass

    def log(steps, metrics):
        minutes = (time.perf_counter() - begun) / 60
        if not rows or minutes - rows[-1]["minutes"] > args.minutes / 40:
            gc.collect()
            rows.append(
                {
                    "minutes": minutes,
                    "env_steps": steps,
                    "rss_mib": resident_mib(),
                    "live_arrays": len(jax.live_arrays()),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        if minutes > args.minutes:
            raise EnoughError

    with tempfile.TemporaryDirectory() as folder:
        never = 2**40
        with contextlib.suppress(EnoughError):
            podracer.train(
                args.agent,
                args.env,
                total_steps=2**50,
                eval_every=never,
                checkpoint_every=never,
                run_dir=folder,
                log=log,
            )
    # The first tenth is warming up: allocators grow to their size.
    settled = [row for row in rows if row["minutes"] > args.minutes / 10]
    first, last = settled[: len(settled) // 3], settled[-len(settled) // 3 :]

    def mean(rows, name):
        return sum(row[name] for row in rows) / len(rows)

    growth = {name: mean(last, name) - mean(first, name) for name in ("rss_mib", "live_arrays")}
    print(
        f"last third against first: {growth['rss_mib']:+.1f} MiB of {mean(last, 'rss_mib'):.0f}, "
        f"{growth['live_arrays']:+.1f} arrays of {mean(last, 'live_arrays'):.0f}"
    )
    if args.json:
        write(args.json, "python benchmarks/memory.py", vars(args), {"growth": growth, "rows": rows})


if __name__ == "__main__":
    main()
