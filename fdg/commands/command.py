"""`Command`: a command with flags and positional arguments of its own, such as `fdg pack`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fdg.arguments import as_flags
from fdg.commands.cli import guarded
from fdg.commands.flags import Flag, Parser, add_flags, normalise
from fdg.errors import FdgError

RUN: Mapping[str, Any] = {"run": {"metavar": "RUN_DIR", "help": "a run directory"}}
RUNS: Mapping[str, Any] = {"runs": {"nargs": "+", "metavar": "RUN_DIR", "help": "run directories"}}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command. Called with the words after its name (None: `sys.argv[1:]`), it returns the exit status."""

    name: str  # program and command, for `--help`: "fdg pack"
    description: str  # the description for `--help`
    flags: Sequence[Flag]  # the command's flags
    # Called with the values of all flags and positional arguments by name. Returns the exit status (None: 0).
    # If it raises an `FdgError` that names an argument, the command prints the name as a flag.
    handler: Callable[[dict[str, Any]], int | None]
    # positional arguments by name, with keywords for `argparse.ArgumentParser.add_argument`
    positionals: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parses the words and runs the command."""
        return guarded(self._run, argv)

    def _run(self, argv: Sequence[str]) -> int:
        parser = Parser(prog=self.name, description=self.description, allow_abbrev=False)
        for name, keywords in self.positionals.items():
            parser.add_argument(name, **keywords)
        add_flags(parser, self.flags)
        values = parser.parse_strictly(normalise(argv))
        try:
            return self.handler({**{flag.name: flag.default for flag in self.flags}, **values}) or 0
        except FdgError as error:
            raise type(error)(as_flags(str(error), [flag.name for flag in self.flags])) from error
