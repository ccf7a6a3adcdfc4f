"""`fdg train ...` or `python -m fdg train ...`: runs a command by its name.

Commands of installed packages are entry points of the group `fdg.commands`: functions that take the words
after the name and return the exit status (docs/how-to/command.md). A package is imported only when its
command runs.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import fdg
from fdg.commands import entry_points, using
from fdg.errors import unknown_name
from fdg.process_exit import exit_with

# Built-in commands: those of `_COMMANDS` are modules of `fdg`, so `python -m fdg.NAME` runs them too.
_COMMANDS = ("train", "plan", "launch", "evaluate", "answer", "play", "export", "plot", "calibrate")
_SUBMODULE_COMMANDS = {name: f"fdg.commands.{name}" for name in ("demo", "study")}
# Commands of other tools, and what to write instead.
_OTHER_TOOLS_COMMANDS = {
    "sweep": "fdg train --sweep learning_rate=1e-4,1e-3",
    "search": "fdg train --optuna 20 --search hidden=64,64/128,128",
    "tune": "fdg train --optuna 20 --search hidden=64,64/128,128",
    "resume": "fdg train --resume RUN",
    "enjoy": "fdg play RUN",
    "record": "fdg play RUN",
    "render": "fdg play RUN",
    "test": "fdg evaluate RUN",
    "generate": 'fdg answer RUN "PROMPT"',
    "chat": 'fdg answer RUN "PROMPT"',
    "profile": "fdg train --profile",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first word names, with the remaining words; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    modules = {name: f"fdg.{name}" for name in _COMMANDS} | _SUBMODULE_COMMANDS
    modules |= dict.fromkeys(using.SUMMARIES, using.__name__)
    if not words or words[0] in ("-h", "--help"):
        print("usage: fdg COMMAND [flags]\n")
        for name, module in modules.items():
            summary = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
            print(f"  {name:10} {using.SUMMARIES.get(name) or summary.partition(': ')[2] or summary}")
        for line in entry_points.help_lines(entry_points.commands(), modules):
            print(f"  {line}")
        print("\n`fdg COMMAND --help` lists the flags of a command.")
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"fdg {fdg.__version__}")
        return 0
    package_commands = {} if words[0] in modules else entry_points.commands()
    if words[0] in package_commands:
        return entry_points.run(words[0], package_commands[words[0]], words[1:])
    if words[0] in _OTHER_TOOLS_COMMANDS:
        print(
            f"error: unknown command '{words[0]}': write {_OTHER_TOOLS_COMMANDS[words[0]]}", file=sys.stderr
        )
        return 2
    if words[0] not in modules:
        print("error:", unknown_name("command", words[0], [*modules, *package_commands]), file=sys.stderr)
        return 2
    # Make the user's modules importable, as `python -m fdg.train` does.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if words[0] in using.SUMMARIES:
        return using.COMMANDS[words[0]](words[1:])
    return importlib.import_module(modules[words[0]]).main(words[1:])


def command() -> int:
    """Entry point of the installed `fdg` script."""
    return exit_with(main())


if __name__ == "__main__":
    raise SystemExit(command())
