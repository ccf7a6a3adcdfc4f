"""Co-design of networks and accelerators (`envs.make("codesign:w1")`): layers, their costs, schedules."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`search`, imported on first use, since it imports algorithms."""
    if name != "search":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from envs.codesign.searching import search

    return search
