"""Strict numerics for every test, and one compilation cache for all of them."""

import gc
import importlib.metadata
import os
import pathlib

# Before JAX is imported, which reads them once. Nearly all the time of these tests is compilation of small programs.
# Unoptimised, and without the emitters that fuse operations, they are compiled several times faster and run a little
# slower. Two passes over loops copy all that a loop calls, for every loop, to count its steps: they were 2/5 of what the
# compilation of an agent that searches takes. Whoever sets XLA_FLAGS has those alone. A flag that is unknown ends the
# process: from 0.11 on there are no other emitters.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    cheap = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    cheap += " --xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops"
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
        cheap += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", cheap)

import jax
import pytest

pytest_plugins = ["tests.support.budget"]

# Environment variables, so that subprocesses of a test run under the same rules.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("XDG_CACHE_HOME", str(pathlib.Path(__file__).parent.parent / ".cache"))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ["XDG_CACHE_HOME"] + "/podracer/xla")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
gc.set_threshold(100_000, 20, 100)  # tracing makes many objects and little garbage: a tenth of its time was collection


LONG = (
    "bench/test_compile_only.py",
    "pod/test_pod_failures.py",
    "training/test_resume.py",
    "test_shards.py",
    "test_notebooks.py",
    "sebulba/test_reanalysers.py",
    "agents/test_efficientzero_loss.py",
    "agents/test_efficientzero_search.py",
    "agents/test_efficientzero_statistics.py",
    "sebulba/test_driver.py",
    "sebulba/test_replays.py",
    "remote/test_remote_processes.py",
    "sebulba/test_devices.py",
    "pod/test_pod_equality.py",
    "agents/test_probes.py",
    "pod/test_pod_replicas.py",
    "test_docs.py",
    "test_release.py",
    "run/test_checkpoint.py",
    "environments/test_pgx.py",
    "remote/test_remote_training.py",
    "bench/test_bench.py",
)
"""Files that take minutes in the slow tier, which gives whole files to its processes, the longest first: begun last, one
would keep the others waiting."""


def pytest_collection_modifyitems(config, items):
    """Puts long files of the slow tier first; the order of all else, and within files, stays."""
    if config.option.markexpr.startswith(("slow", "nightly")):
        here, place = pathlib.Path(__file__).parent, {name: i for i, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(item.path.relative_to(here).as_posix(), len(LONG)))


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path, monkeypatch):
    """Nothing that a test writes by default lands in the checkout."""
    monkeypatch.chdir(tmp_path)
