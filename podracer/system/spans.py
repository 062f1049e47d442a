"""The time of a command by its parts: spans, written to the file that the variable `PODRACER_SPANS` names.

    with span("checkpoint"):
        write()

Without the variable a span costs nothing. `benchmarks/latency.py` reads the file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

FILE = os.environ.pop("PODRACER_SPANS", None)  # of this process alone: others that it starts would write there, too

SPANS: list[dict[str, Any]] = []
"""The spans so far: `name`, `thread`, and seconds: `at` since 1970, `wall`, and `cpu` of the whole process."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A context whose seconds are noted; spans may be nested."""
    if not FILE:
        yield
        return
    at, wall, cpu = time.time(), time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        seconds = {"at": at, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        SPANS.append({"name": name, "thread": threading.current_thread().name, **seconds})


def listen() -> None:
    """Notes what JAX traces, lowers, compiles and reads of its cache, too."""
    if not FILE:
        return
    import jax

    def note(event: str, duration_secs: float, **labels: Any) -> None:
        seconds = duration_secs
        stage = STAGES.get(event)
        if stage:
            name, thread = f"{stage} {labels.get('fun_name', '')}".strip(), threading.current_thread().name
            SPANS.append({"name": name, "thread": thread, "at": time.time() - seconds, "wall": seconds, "cpu": None})

    jax.monitoring.register_event_duration_secs_listener(note)


STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read",
}
"""JAX's events, and the stages that they are called here."""


def write_at_end() -> None:
    """Has the spans written when Python ends, before what was registered with `atexit` until now."""
    if FILE:
        atexit.register(_write)


def _write() -> None:
    with contextlib.suppress(OSError), open(str(FILE), "w") as file:
        json.dump({"ended": time.time(), "cpu": time.process_time(), "spans": SPANS}, file)
