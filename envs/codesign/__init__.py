"""Co-design of networks and accelerators: layers, what they cost on an accelerator, and when they run."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`search`, which imports algorithms, when it is first used."""
    if name != "search":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from envs.codesign.searching import search

    return search
