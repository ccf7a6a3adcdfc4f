"""`fdg train ...` or `python -m fdg train ...`: runs a command by its name.

Commands of installed packages are entry points of the group `fdg.commands`: functions of the words after the
name that return the exit status (docs/how-to/command.md). A package is imported when its command is used.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import fdg
from fdg.commands import entry_points, using
from fdg.errors import unknown_name
from fdg.process_exit import exit_with

# Built-in commands; those in the first line are also `python -m fdg.NAME`.
_COMMANDS = ("train", "plan", "launch", "evaluate", "answer", "play", "export", "plot", "calibrate")
_UNDER = {name: f"fdg.commands.{name}" for name in ("demo", "study")}
# Names that users of other tools try.
_ELSEWHERE = {
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
    """Runs the command named by the first word with the remaining words; returns its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    known = {name: f"fdg.{name}" for name in _COMMANDS if find_spec(f"fdg.{name}")} | _UNDER
    known |= dict.fromkeys(using.SUMMARIES, using.__name__)
    if not words or words[0] in ("-h", "--help"):
        print("usage: fdg COMMAND [flags]\n")
        for name, module in known.items():
            first = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
            print(f"  {name:10} {using.SUMMARIES.get(name) or first.partition(': ')[2] or first}")
        for line in entry_points.help_lines(entry_points.commands(), known):
            print(f"  {line}")
        print("\n`fdg COMMAND --help` lists the flags of one.")
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        print(f"fdg {fdg.__version__}")
        return 0
    others = {} if words[0] in known else entry_points.commands()
    if words[0] in others:
        return entry_points.run(words[0], others[words[0]], words[1:])
    if words[0] in _ELSEWHERE:
        print(f"error: unknown command '{words[0]}': write {_ELSEWHERE[words[0]]}", file=sys.stderr)
        return 2
    if words[0] not in known:
        print("error:", unknown_name("command", words[0], [*known, *others]), file=sys.stderr)
        return 2
    # As with `python -m fdg.train`: the user's modules.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if words[0] in using.SUMMARIES:
        return using.COMMANDS[words[0]](words[1:])
    return importlib.import_module(known[words[0]]).main(words[1:])


def command() -> int:
    """Entry point of the installed `fdg` script."""
    return exit_with(main())


if __name__ == "__main__":
    raise SystemExit(command())
