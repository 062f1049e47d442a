"""Programs that XLA compiles during a piece of a test."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Lists the compilations in the block. One of its own shows first that JAX reports them."""
    heard: list[str] = []

    def note(event: str, duration: float, **others: object) -> None:
        if "backend_compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x + len(heard))(np.float32(0))
        assert heard, "JAX names the event of a compilation in another way now"
        heard.clear()
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
