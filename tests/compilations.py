"""Hearing JAX trace and compile."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX traces, lowers and compiles within the block, by its own events' names."""
    found: list[str] = []

    def hear(name, *_, **__):
        if "compile" in name or "trace" in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
