"""Record JAX's trace and compile events."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list of JAX's monitoring events for tracing, lowering and compilation within the block."""
    found: list[str] = []

    def record(name, *_, **__):
        if "compile" in name or "trace" in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
