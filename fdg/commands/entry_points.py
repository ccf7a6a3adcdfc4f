"""Commands of installed packages: the entry points of the group `fdg.commands` (docs/how-to/command.md)."""

import importlib.metadata
import textwrap
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from fdg.commands.cli import guarded
from fdg.errors import FdgError, listed, one_line

GROUP = "fdg.commands"
_SUMMARY_WIDTH = 60  # characters of a package's summary in the help

Commands = Mapping[str, Sequence[EntryPoint]]  # by name; packages may register the same name

# Summaries of commands that the package fdg itself registers.
_FDG_SUMMARIES = {"codesign": "searches for networks and an accelerator that meet specs."}


def commands() -> Commands:
    """The commands that installed packages register, read from metadata without importing the packages."""
    points_by_name: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        points_by_name.setdefault(point.name, []).append(point)
    return {name: sorted(points, key=_package_and_version) for name, points in sorted(points_by_name.items())}


def help_lines(registered: Commands, built_in: Collection[str]) -> list[str]:
    """One help line per command: its package and the package's summary, or why it is not used."""
    lines = []
    for name, points in registered.items():
        owners = listed(map(_package_and_version, points), "and")
        if name in built_in:
            text = f"of {owners}: not used, since fdg has a command of this name"
        elif len(points) > 1:
            text = f"of {owners}: not used, since they have the same name: uninstall all of them but one"
        else:
            metadata: Any = points[0].dist.metadata if points[0].dist else {}
            summary = metadata.get("Summary") or ""
            shortened = textwrap.shorten(summary, _SUMMARY_WIDTH, placeholder=" ...")
            text = f"of {owners}: {shortened}".removesuffix(": ")
            if {point.dist.name for point in points if point.dist} == {"fdg"}:
                text = _FDG_SUMMARIES.get(name, text)
        lines.append(f"{name:10} {text}")
    return lines


def run(name: str, points: Sequence[EntryPoint], argv: Sequence[str]) -> int:
    """Imports a package's command, calls it with the words after its name, and returns its exit status.

    If it cannot be imported or called, or raises an `FdgError`, one line is printed on standard error. A
    result None of the command means exit status 0.
    """

    def call(argv: Sequence[str]) -> int:
        if len(points) > 1:
            owners = listed(map(_package_and_version, points), "and")
            raise FdgError(f"command '{name}' is registered by {owners}: uninstall all of them but one")
        (point,) = points
        what = f"command '{name}' of {_package_and_version(point)}"
        try:
            function = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit, from a module that exits on import
            fix = "install what it needs, or uninstall the package"
            raise FdgError(f"{what}: importing {point.value} fails ({one_line(error)}): {fix}") from error
        if not callable(function):
            raise FdgError(
                f"{what}: {point.value} is {type(function).__name__}, not a function: its entry point in the "
                f"group {GROUP} must name a function that takes the command line's words"
            )
        status = function(list(argv))
        if not isinstance(status, int | None):
            raise FdgError(
                f"{what}: it returned {status!r:.60}: a command returns its exit status, a whole number"
            )
        return status or 0

    return guarded(call, argv)


def _package_and_version(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
