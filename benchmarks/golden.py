"""Checksums of short trainings of every agent, to show that a change of the code changes no numbers.

python benchmarks/golden.py                 # compares with benchmarks/results/golden.json; minutes
python benchmarks/golden.py ppo dqn.anakin  # cases whose names have one of these in them
python benchmarks/golden.py --write         # stores new checksums instead

Each case has three checksums: of the learner's final state (parameters, optimiser state, targets, normalisers), of the
rows of metrics, and of the text of the compiled programs. The first two must stay as they are. A change of the text
alone is a note: the program is written differently and computes the same here.

Checksums hold on one type of machine with one version of JAX. On another, write them at the old commit first:

    git worktree add ../old COMMIT
    PYTHONPATH=../old python benchmarks/golden.py --write --file golden.json
    python benchmarks/golden.py --file golden.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# JAX reads these once, at its import. Two devices make collectives real. The flags after the first two are about the
# time of compilation (tests/conftest.py), and the last one is unknown from 0.11 on.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops "
    + ("--xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else "")
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

import podracer

LIBRARY = pathlib.Path(podracer.__file__).parent
RESULTS = pathlib.Path(__file__).parent / "results" / "golden.json"
KINDS = ("parameters", "metrics", "programs")
NUMBERS = KINDS[:2]
"""These must agree; the text of programs may differ."""

# Settings


REPLAY = {"batch_size": 8, "replay_capacity": 256, "replay_min_size": 64}
MODEL = {"unroll_length": 2, "n_step": 3, "num_bins": 5, "state_size": 8, "head_size": 8}
SEARCH = {"hidden_sizes": (8,), "simulations": 4, "rollout_length": 8}

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"hidden_sizes": (8,), "rollout_length": 8, "num_epochs": 2, "num_minibatches": 2},
    "vtrace": {"hidden_sizes": (8,), "rollout_length": 8},
    "dqn": {**REPLAY, "hidden_sizes": (8,), "replay_ratio": 2.0, "target_interval": 8, "epsilon_decay": 200},
    "pqn": {"hidden_sizes": (8,), "rollout_length": 8, "num_epochs": 2, "num_minibatches": 2},
    "r2d2": REPLAY
    | {"hidden_sizes": (8,), "core": "none", "head_size": 8, "rollout_length": 5, "burn_in": 2, "trace_length": 5}
    | {"n_step": 2, "replay_capacity": 5 * 256, "replay_min_size": 5 * 16, "replay_ratio": 2.0, "target_interval": 4},
    "sac": {**REPLAY, "hidden_sizes": (8,), "replay_ratio": 2.0},
    "alphazero": {**REPLAY, **SEARCH, "replay_ratio": 0.5},
    "muzero": {**REPLAY, **SEARCH, **MODEL, "replay_ratio": 0.5},
    "efficientzero": {
        **REPLAY,
        **SEARCH,
        **MODEL,
        "replay_ratio": 0.5,
        "lstm_size": 8,
        "projection_size": 8,
        "forecast_size": 8,
        "horizon": 2,
        "target_interval": 4,
        "correction_interval": 64,
    },
}
"""Settings of each agent that make it small."""

RUN = {"total_steps": 384, "num_envs": 8, "eval_episodes": 2, "seed": 3}

HOST = {"arch": "sebulba", "mode": "lockstep", "eval_every": 1}
"""A fixed order, with a report after each rollout: otherwise the clock says when there is one."""

ON_POLICY = ("ppo", "vtrace", "pqn")
ONE_BY_ONE = {"updates_per_call": 1}
"""For agents that replay: otherwise the clock says which updates' metrics are summed together."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A short training.

    Attributes:
      agent: its name.
      environment: its name.
      config: settings of the agent that differ from `SMALL`.
      run: settings of the run that differ from `RUN`.
      others: further arguments of `podracer.train`.
    """

    agent: str
    environment: str = "catch"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def train(self) -> podracer.Result:
        """Trains, and shows nothing."""
        return podracer.train(
            self.agent,
            self.environment,
            config={**SMALL[self.agent], **self.config},
            progress=False,
            **self.others,
            **{**RUN, **self.run},
        )


def base() -> dict[str, Case]:
    """Every agent under both architectures."""
    cases = {}
    for agent in SMALL:
        environment = {"alphazero": "tic_tac_toe", "sac": "pendulum"}.get(agent, "catch")
        cases[f"{agent}.anakin"] = Case(agent, environment)
        cases[f"{agent}.sebulba"] = Case(agent, environment, run=HOST if agent in ON_POLICY else HOST | ONE_BY_ONE)
    return cases


def variants() -> dict[str, Case]:
    """Settings that take other ways through the code."""
    host, one_by_one = HOST, HOST | ONE_BY_ONE
    two = {"population": 2}
    return {
        "ppo.population": Case("ppo", run=two, others={"hyper": {"learning_rate": [1e-3, 1e-2]}}),
        "ppo.shards": Case("ppo", run={"num_shards": 4}),
        "ppo.reset_pool": Case("ppo", run={"reset_pool": 4}),
        "ppo.lstm": Case("ppo", "memory_chain", {"core": "lstm", "core_size": 8}),
        "ppo.continuous": Case("ppo", "pendulum", {"normalize_observations": True, "value_clip_epsilon": 0.2}),
        "ppo.tanh": Case("ppo", "pendulum", {"policy": "tanh", "state_dependent_std": True, "activation": "swish"}),
        "ppo.frames": Case("ppo", "pixel_catch", {"frame_stack": 2, "separate": False}),
        "ppo.threads": Case("ppo", run=host | {"actor_threads": 2, "num_shards": 2, "updates_per_batch": 2}),
        "ppo.serial": Case("ppo", run=host | {"mode": "serial"}),
        "ppo.gymnasium": Case("ppo", "gymnasium:CartPole-v1", run=host),
        "vtrace.envpool": Case("vtrace", "envpool:CartPole-v1", run=host),
        "vtrace.lstm": Case("vtrace", "memory_chain", {"core": "lstm", "core_size": 8, "optimizer": "rmsprop"}),
        "vtrace.lstm.sebulba": Case("vtrace", "memory_chain", {"core": "lstm", "core_size": 8}, host),
        "vtrace.replay": Case("vtrace", config={"replay_fraction": 0.5, "replay_capacity": 8 * 32}),
        "vtrace.replay.sebulba": Case(
            "vtrace", config={"replay_fraction": 0.5, "replay_capacity": 8 * 32}, run=host | {"actor_threads": 2}
        ),
        "dqn.population": Case("dqn", run=two, others={"hyper": {"discount": [0.9, 0.99]}}),
        "dqn.categorical": Case("dqn", config={"values": "categorical", "num_bins": 5, "n_step": 3}),
        "dqn.quantile": Case("dqn", config={"values": "quantile", "num_bins": 5, "max_error": 1.0}),
        "dqn.noisy": Case(
            "dqn", config={"noise": 0.5, "dueling": True, "head_size": 8, "epsilon_start": 0.0, "epsilon_final": 0.0}
        ),
        "dqn.priorities": Case("dqn", config={"priority_exponent": 0.5, "n_step": 3}),
        "dqn.frames": Case("dqn", "pixel_catch", {"frame_stack": 2, "optimizer": "rmsprop"}),
        "dqn.final": Case("dqn", config={"final_rate": 0.5}, run={"final_updates": 5}),
        "dqn.lockstep": Case("dqn", run={"mode": "lockstep"}),
        "dqn.host": Case("dqn", config={"priority_exponent": 0.5}, run=one_by_one | {"replay_memory": "host"}),
        "dqn.envpool": Case("dqn", "envpool:CartPole-v1", run=one_by_one),
        "r2d2.lstm": Case("r2d2", "memory_chain", {"core": "lstm", "core_size": 8}),
        "r2d2.lstm.sebulba": Case("r2d2", "memory_chain", {"core": "lstm", "core_size": 8}, one_by_one),
        "sac.population": Case("sac", "pendulum", run=two, others={"hyper": {"tau": [0.01, 0.1]}}),
        "sac.deterministic": Case(
            "sac", "pendulum", {"policy": "deterministic", "noise": (0.1, 0.4), "target_noise": 0.2, "n_step": 3}
        ),
        "alphazero.puct": Case("alphazero", "tic_tac_toe", {"search": "puct", "value_mix": 0.5}),
        "muzero.gumbel": Case("muzero", config={"search": "gumbel", "priority_exponent": 1.0}),
        "muzero.game": Case("muzero", "tic_tac_toe", {"absorbing": True}),
        "muzero.reanalyse": Case("muzero", config={"reanalyse": 0.5, "target_interval": 4}),
        "muzero.reanalyse.sebulba": Case("muzero", config={"reanalyse": 0.5, "target_interval": 4}, run=one_by_one),
        "efficientzero.refresh": Case("efficientzero", config={"refresh_interval": 4, "reanalyse_group": 2}),
        "efficientzero.lars": Case(
            "efficientzero",
            config={
                "optimizer": "clipped_lars",
                "l2_cost": 5e-5,
                "lars_start": 4,
                "warmup_updates": 4,
                "search": "gumbel",
            },
        ),
    }


CASES = base() | variants()


# Checksums


Sums = dict[str, str]
"""Checksums of a case, by kind."""


def checksum(parts: Iterable[bytes]) -> str:
    """SHA-256 of parts in their order, 64 bits of it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def leaf_bytes(tree: Any) -> Iterator[bytes]:
    """Every leaf in the order of the tree, with its dtype and shape."""
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        yield f"{array.dtype} {array.shape} ".encode() + array.tobytes()


def row_bytes(rows: list[dict[str, Any]]) -> Iterator[bytes]:
    """Every row of metrics, without seconds and shares of time."""
    for row in rows:
        untimed = {name: value for name, value in row.items() if not is_timing(name)}
        yield json.dumps(untimed, sort_keys=True).encode()


def is_timing(name: str) -> bool:
    """True for a metric that depends on the clock."""
    return name.startswith("time/") or name.endswith("_share") or name == "sebulba/queue_depth"


def text_bytes(texts: list[str]) -> list[bytes]:
    """The text of every program, without names, in an order that does not depend on the order of compilation."""
    return sorted(without_names(text).encode() for text in texts)


def without_names(text: str) -> str:
    """StableHLO with numbers for names of functions, and without the tree paths of results.

    Targets of custom calls keep their names, which say what is computed.
    """
    numbers: dict[str, str] = {}
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    return re.sub(
        r'(?<!custom_call )@("[^"]+"|[\w.$]+)', lambda name: numbers.setdefault(name[0], f"@{len(numbers)}"), text
    )


@contextlib.contextmanager
def program_texts() -> Iterator[list[str]]:
    """Collects the text of every program that is compiled ahead of time, as all programs of drivers are.

    JAX's own method is replaced, so that nothing here depends on where the library keeps its drivers.
    """
    texts: list[str] = []
    plain = Lowered.compile

    def compile_and_keep(self: Lowered, *args: Any, **settings: Any) -> Any:
        texts.append(self.as_text())
        return plain(self, *args, **settings)

    Lowered.compile = compile_and_keep
    try:
        yield texts
    finally:
        Lowered.compile = plain


def checksums(case: Case) -> Sums:
    """Trains, and returns the checksums.

    Raises:
      RuntimeError: where there was no update or no program, whose checksum would always agree.
    """
    jax.clear_caches()  # a function that was traced for another case would change the text
    with program_texts() as texts:
        result = case.train()
    updates = result.summary["updates"]
    if not texts or not updates:
        raise RuntimeError(f"nothing to compare: {len(texts)} programs, {updates} updates")
    parts = (leaf_bytes(result.learner), row_bytes(result.history), text_bytes(texts))
    return {kind: checksum(part) for kind, part in zip(KINDS, parts, strict=True)}


# Comparison


def setting() -> dict[str, Any]:
    """The processor and the versions that numbers depend on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        names = ("vendor_id", "cpu family", "model", "model name")
        lines = [re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE) for name in names]
        cpu = " ".join(line[1] for line in lines if line) or cpu
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "optax")}
    return {"machine": cpu, "versions": versions}


def run(names: list[str]) -> tuple[dict[str, Sums], list[str]]:
    """The checksums of cases by name, and the names of cases with an error."""
    sums: dict[str, Sums] = {}
    errors: list[str] = []
    for name in names:
        start = time.process_time()
        try:
            sums[name] = checksums(CASES[name])
            line = " ".join(sums[name][kind][:8] for kind in KINDS)
        except podracer.Interrupted:
            raise
        except Exception:  # the other cases still tell something
            traceback.print_exc()
            errors.append(name)
            line = "error"
        print(f"{name:26} {line:26} {time.process_time() - start:6.1f} CPU seconds", flush=True)
    return sums, errors


def compare(golden: Mapping[str, Sums], sums: Mapping[str, Sums]) -> bool:
    """Prints a table of the cases that differ.

    Args:
      golden: checksums from the file, by case.
      sums: new ones.

    Returns:
      True where parameters and metrics of all cases agree.
    """
    agreeing = rewritten = 0
    table = []
    for name, new in sums.items():
        old = golden.get(name)
        marks = ["not in file" if old is None else "" if old[kind] == new[kind] else "differs" for kind in KINDS]
        agreeing += not any(marks[: len(NUMBERS)])
        rewritten += any(marks) and not any(marks[: len(NUMBERS)])
        if any(marks):
            table.append(f"{name:26}" + "".join(f"{mark:>13}" for mark in marks))
    if table:
        print("", f"{'case':26}" + "".join(f"{kind:>13}" for kind in KINDS), *table, sep="\n")
    print(f"\n{agreeing} of {len(sums)} cases have the same parameters and metrics.")
    if rewritten:
        print(f"Note: {rewritten} of these have programs with another text.")
    return agreeing == len(sums)


def write(path: pathlib.Path, results: Mapping[str, Sums]) -> None:
    """Stores checksums, in the order of the cases, with the commit of the library."""
    command = ["git", "-C", str(LIBRARY), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    content = {
        "command": "python benchmarks/golden.py --write",
        **setting(),
        "commit": commit,
        "results": {name: results[name] for name in CASES if name in results},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwritten to {path}")


def main() -> int:
    """Compares or writes; returns 1 where numbers differ, a case has an error or nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of cases to run; none for all cases")
    parser.add_argument("--write", action="store_true", help="store checksums instead of comparing them")
    parser.add_argument("--file", type=pathlib.Path, default=RESULTS, help="the file with checksums")
    arguments = parser.parse_args()
    names = [name for name in CASES if any(word in name for word in arguments.words or [""])]
    if not names:
        parser.error(f"no case has {' or '.join(arguments.words)} in its name; cases: {', '.join(CASES)}")
    golden = json.loads(arguments.file.read_text()) if arguments.file.exists() else {**setting(), "results": {}}
    all_cases = len(names) == len(CASES)
    there = {name: golden[name] for name in setting()}
    if there != setting() and not (arguments.write and all_cases):
        print(f"{arguments.file} is of another machine or other versions:\n  {there}\nHere they are:\n  {setting()}")
        print("To compare here, first write the checksums of all cases at the old commit, with --write.")
        return 1
    print(f"podracer in {LIBRARY}")
    sums, errors = run(names)
    if errors:
        print(f"\nerrors in: {', '.join(errors)}")
    if not arguments.write:
        return 0 if compare(golden["results"], sums) and not errors else 1
    if errors:
        print("nothing is written")
        return 1
    write(arguments.file, sums if all_cases else golden["results"] | sums)
    return 0


if __name__ == "__main__":
    sys.exit(main())
