"""`fdg diff`: finds where two runs part: the iteration, the fragment and the array.

It has no module `fdg.diff`, which is the function.
"""

import contextlib
from pathlib import Path
from typing import Any

from fdg.commands.command import Command
from fdg.commands.flags import Flag
from fdg.errors import FdgError
from fdg.running.host_devices import make_host_devices
from fdg.running.program_cache import keep_programs

FLAGS = (
    Flag("record", str | None, None, "write a recording of one run to this file, for another machine"),
    Flag("iterations", int | None, None, "how many to replay (None: as many as the metrics say, else 1)"),
    Flag("checkpoint", int | None, None, "of which iteration to start from, 0 for init (None: chosen)"),
    Flag("tolerance", float, 0.0, "x and y are equal where |x - y| <= tolerance * (1 + |y|); 0: equal bits"),
    Flag("limit_mb", int, 64, "of --record: mebibytes of arrays to keep; of the others digests alone"),
    Flag("agent", int, 0, "which, of several seeds"),
    Flag("trust", bool, False, "import modules of your own that the runs name"),
)
_ABOUT = (
    "Finds the first iteration, fragment and array whose values differ between two runs. Exit status: 0 for"
    " no difference, 1 for one, 2 for a mistake."
)
_OF_DIFF = ("iterations", "checkpoint", "tolerance", "agent", "trust")


def _diff(given: dict[str, Any]) -> int:
    from fdg.training.difference import diff, record

    runs, file = given["runs"], given["record"]
    if len(runs) != (1 if file else 2):
        wanted = "one run, to be recorded" if file else "two of them, or one and --record FILE"
        raise FdgError(f"diff takes {wanted}, and got {len(runs)}: {' '.join(runs):.200}")
    keep_programs(None)
    make_host_devices(max(map(_devices_of, runs)))
    if file:
        how = {name: given[name] for name in ("checkpoint", "agent", "trust", "limit_mb")}
        print(
            record(runs[0], file, iterations=1 if given["iterations"] is None else given["iterations"], **how)
        )
        return 0
    found = diff(*runs, **{name: given[name] for name in _OF_DIFF})
    print(found)
    return int(found.differs)


def _devices_of(run: str) -> int:
    """How many host devices a run had; 1 of a recording, and of what cannot be read, as is said later."""
    from fdg.training.run_directory import read_config, read_summary

    with contextlib.suppress(FdgError):
        config = read_config(Path(run), prefix="")
        chosen = config.get("devices") or config.get("devices_chosen")
        chosen = chosen or len((read_summary(Path(run)) or {}).get("devices") or ())
        return chosen if isinstance(chosen, int) and 1 <= chosen <= 1024 else 1
    return 1


_RUNS = {"nargs": "+", "metavar": "RUN", "help": "run directories or recordings: two"}
main = Command("fdg diff", _ABOUT, FLAGS, _diff, {"runs": _RUNS})
