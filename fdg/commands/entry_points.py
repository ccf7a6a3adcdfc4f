"""Commands of installed packages: entry points of the group `fdg.commands` (docs/how-to/command.md)."""

import importlib.metadata
import textwrap
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from fdg.commands.cli import guarded
from fdg.errors import FdgError, listed, one_line

GROUP = "fdg.commands"
_WIDTH = 60  # most characters of a package's summary in the help

Commands = Mapping[str, Sequence[EntryPoint]]  # by name; several where packages register the same name


_OURS = {"codesign": "searches networks and an accelerator that meet specs."}


def commands() -> Commands:
    """The commands that installed packages register, read from metadata without importing the packages."""
    found: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return {name: sorted(points, key=_package) for name, points in sorted(found.items())}


def help_lines(found: Commands, built_in: Collection[str]) -> list[str]:
    """One help line for each command: its package and the package's summary, or why it cannot be used."""
    lines = []
    for name, points in found.items():
        owners = listed(map(_package, points), "and")
        if name in built_in:
            text = f"of {owners}: not used, for fdg has a command of this name"
        elif len(points) > 1:
            text = f"of {owners}: not used, for a name is of one package; uninstall the others"
        else:
            about: Any = points[0].dist.metadata if points[0].dist else {}
            summary = about.get("Summary") or ""
            said = textwrap.shorten(summary, _WIDTH, placeholder=" ...")
            text = f"of {owners}: {said}".removesuffix(": ")
            if {point.dist.name for point in points if point.dist} == {"fdg"}:
                text = _OURS.get(name, text)
        lines.append(f"{name:10} {text}")
    return lines


def run(name: str, points: Sequence[EntryPoint], words: Sequence[str]) -> int:
    """Imports a package's command, calls it with the words after its name, and returns its exit status.

    Errors are printed as one line on standard error, as for every command: failure to import or call it, and
    any `FdgError` that it raises. A result of None means exit status 0.
    """

    def call(words: Sequence[str]) -> int:
        if len(points) > 1:
            owners = listed(map(_package, points), "and")
            raise FdgError(f"command '{name}' is of {owners}: uninstall all of them but one")
        (point,) = points
        what = f"command '{name}' of {_package(point)}"
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
                f"group {GROUP} must name one that takes the words of the command line"
            )
        status = function(list(words))
        if not isinstance(status, int | None):
            raise FdgError(
                f"{what}: it returned {status!r:.60}: a command returns its exit status, a whole number"
            )
        return status or 0

    return guarded(call, words)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
