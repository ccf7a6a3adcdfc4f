"""`fdg compare`: tables of algorithms by environment, with intervals, and what was unequal between them.

It has no module `fdg.compare`, which is the function.
"""

from typing import Any

from fdg.commands.command import RUNS, Command
from fdg.commands.flags import Flag

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


def _compare(given: dict[str, Any]) -> None:
    from fdg.training.comparison import check_folder, compare

    if given["out"] is not None:
        check_folder(given["out"])
    found = compare(given["runs"], labels=given["label"] or ())
    print(found)
    if given["out"] is not None:
        for path in found.write(given["out"]):
            print(path)


main = Command("fdg compare", _ABOUT, FLAGS, _compare, RUNS)
