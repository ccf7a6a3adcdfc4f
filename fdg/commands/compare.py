"""`fdg compare`: tables of algorithms by environment, with intervals, and what was unequal between them.

It has no module `fdg.compare`, which is the function.
"""

from collections.abc import Sequence
from typing import Any

from fdg.commands.cli import guarded
from fdg.commands.flags import Flag, Parser, add_flags
from fdg.commands.using import carry_out_command

FLAGS = (
    Flag("out", str | None, None, "a folder for Markdown, LaTeX, JSON and pictures (None: print alone)"),
    Flag(
        "label",
        tuple[str, ...] | None,
        None,
        "of the runs, in their order, with commas between (None: what differs between them)",
    ),
)
_ABOUT = (
    "Compares algorithms over environments: final return and area under the curve as interquartile means with"
    " 95% stratified bootstrap intervals, probabilities of improvement, and what was unequal. Of a folder of"
    " runs, all are taken."
)


def main(argv: Sequence[str] | None = None) -> int:
    """`fdg compare RUN...`; `argv` are the words after `compare`, those of the process if None."""

    def run(argv: Sequence[str]) -> int:
        parser = Parser(prog="fdg compare", description=_ABOUT, allow_abbrev=False)
        parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories")
        add_flags(parser, FLAGS)
        return carry_out_command(parser, FLAGS, _compare, argv)

    return guarded(run, argv)


def _compare(given: dict[str, Any]) -> None:
    from fdg.training.comparison import check_folder, compare

    if given["out"] is not None:
        check_folder(given["out"])
    found = compare(given["runs"], labels=given["label"] or ())
    print(found)
    if given["out"] is not None:
        for path in found.write(given["out"]):
            print(path)
