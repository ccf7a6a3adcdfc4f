"""Runs measurements on a GPU, part by part; docs/gpu.md has the commands in order.

    python -m bench.gpu --list                            lists the parts and their measurements
    python -m bench.gpu --part 1 --out DIR                measures; resumes an interrupted part
    python -m bench.gpu --part 2 --out DIR --peers DIR    DIR/purejaxrl is a checkout
    python -m bench.gpu --table DIR                       prints the figures, as Markdown
    python -m bench.gpu --part 1 --out DIR --tiny         a rehearsal on a CPU

Each figure is written to DIR/part-N.json as soon as it is measured.
"""

import contextlib
import os
import time
from pathlib import Path

from bench import harness
from bench.gpu.measuring import MeasuringProcess, Record, Settings, measure
from bench.gpu.parts import PARTS
from bench.gpu.tables import markdown, record_of
from fdg.errors import FdgError


def main() -> None:
    parser = harness.parser("bench.gpu", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--part", type=int, choices=PARTS, help="measure this part")
    what.add_argument("--list", action="store_true", help="print the parts and run nothing")
    what.add_argument("--table", type=Path, metavar="DIR", help="print the figures in a folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the figures")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="a folder with checkouts of peers")
    parser.add_argument("--seconds", type=float, help="time limit, in place of the default of the part")
    parser.add_argument("--tiny", action="store_true", help="use the small sizes of a rehearsal")
    args = parser.parse_args()
    if args.part and args.out is None:
        parser.error("--part needs --out DIR, a folder for the figures")
    try:
        if args.part:
            run(args.part, Settings(args.out, args.tiny, args.peers), args.seconds)
        else:
            show(args.table, args.tiny)
    except FdgError as error:
        raise SystemExit(f"error: {error}") from None


def run(number: int, settings: Settings, seconds: float | None) -> None:
    """Measures a part and prints its tables."""
    begun = time.monotonic()
    # Some parts have several processes on the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    record = Record(record_of(settings.out, number), settings.tiny)
    with contextlib.closing(MeasuringProcess()) as process:
        measure(PARTS[number], settings, record, process, seconds)
    print("", *markdown(PARTS[number], number, settings.out), sep="\n")
    print(f"part {number}: {time.monotonic() - begun:.0f} s")


def show(folder: Path | None, tiny: bool) -> None:
    """Prints the tables in a folder; without a folder, the names of all measurements."""
    for number, part in PARTS.items():
        if folder is not None:
            print(*markdown(part, number, folder), sep="\n")
            continue
        print(f"{number}: {part.title}, {part.seconds:g} s")
        for measurement in part.measurements(Settings(Path(), tiny)):
            print(f"   {measurement.name}, about {measurement.seconds:g} s")


if __name__ == "__main__":
    main()
