"""Seconds to compile the default program of each agent, each in a fresh process without any cache."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from typing import Any

ENVIRONMENTS = {"alphazero": "tic_tac_toe", "sac": "pendulum", "muzero": "tic_tac_toe"}
"""Environments of agents that cannot learn CartPole by default."""

SEARCH_AGENTS = ("alphazero", "efficientzero", "muzero")


def measure(only: tuple[str, ...]) -> dict[str, Any]:
    """Compiles each agent's program in a process of its own; prints and returns the table."""
    from podracer.agents.registry import AGENTS

    found = {}
    print(f"{'agent':14} {'environment':14} {'trace':>6} {'lower':>6} {'compile':>8} {'its CPU':>8}")
    for agent in only or AGENTS:
        environment = ENVIRONMENTS.get(agent, "cartpole")
        words = [sys.executable, __file__, agent, environment]
        told = subprocess.run(
            words, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        row = found[agent] = json.loads(told.stdout.splitlines()[-1])
        print(
            f"{agent:14} {environment:14} {row['trace_seconds']:6.2f} {row['lower_seconds']:6.2f} "
            f"{row['compile_seconds']:8.2f} {row['compile_cpu_seconds']:8.2f}",
            flush=True,
        )
    return {"cores": len(os.sched_getaffinity(0)), "agents": found}


def compile_one(agent: str, environment: str) -> dict[str, Any]:
    """Traces, lowers and compiles the step of an agent's default program in this process."""
    import jax

    from podracer.run.config import RunConfig
    from podracer.training.resolve import resolve

    jax.config.update("jax_enable_compilation_cache", False)
    experiment: Any = resolve(agent, environment, RunConfig(), devices=jax.local_devices()[:1])
    program = experiment.driver.program
    like, limits = program.like(), program.like_limits()
    clocks = [(time.perf_counter(), time.process_time())]
    traced = program.step.trace(like, limits)
    clocks.append((time.perf_counter(), time.process_time()))
    lowered = traced.lower()
    clocks.append((time.perf_counter(), time.process_time()))
    lowered.compile()
    clocks.append((time.perf_counter(), time.process_time()))
    walls = [after[0] - before[0] for before, after in itertools.pairwise(clocks)]
    return {
        "environment": environment,
        "trace_seconds": walls[0],
        "lower_seconds": walls[1],
        "compile_seconds": walls[2],
        "compile_cpu_seconds": clocks[3][1] - clocks[2][1],
        "stablehlo_lines": lowered.as_text().count("\n"),
    }


if __name__ == "__main__":
    print(json.dumps(compile_one(*sys.argv[1:3])))
