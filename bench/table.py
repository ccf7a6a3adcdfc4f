"""The table of all algorithms in all small environments: a study (`fdg study bench/table.toml`), or a part.

    python -m bench.table --list                        # its cells
    python -m bench.table                               # all of them, into runs/table
    python -m bench.table --only CartPole-v1 --budget short

The tables are runs/table/short/comparison.md and runs/table/long/comparison.md. A cell that is marked is
at the level of random actions. Those of a part are of that part alone.
"""

import dataclasses
from pathlib import Path

from bench import harness
from fdg.commands.cli import guarded
from fdg.commands.study import Study, carry_out_study, read_study

FILE = Path(__file__).with_suffix(".toml")


def part(study: Study, only: list[str], budgets: list[str], seeds: int | None) -> Study:
    """The cells of some environments or algorithms, and of some budgets; all where nothing is named."""
    cells = [
        cell
        for cell in study.cells
        if (not only or {cell.env, cell.algo} & set(only)) and (not budgets or cell.budget in budgets)
    ]
    chosen = study.seeds if seeds is None else range(study.seeds[0], study.seeds[0] + seeds)
    return dataclasses.replace(study, cells=cells, seeds=chosen)


def main() -> int:
    """The command line."""
    parser = harness.parser("bench.table", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="environments or algorithms")
    parser.add_argument("--budget", nargs="+", default=[], help="short, long")
    parser.add_argument("--seeds", type=int, default=None, help="fewer, or more, than the file's")
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    given = parser.parse_args()
    study = part(read_study(FILE), given.only, given.budget, given.seeds)
    if not study.cells or not study.seeds:
        parser.error("nothing is left of the table: see --list")
    if given.list:
        print(
            *(f"{cell.name}: fdg train {' '.join(cell.command(study.seeds))}" for cell in study.cells),
            sep="\n",
        )
        return 0
    return guarded(lambda _: carry_out_study(study, given.out), [])


if __name__ == "__main__":
    raise SystemExit(main())
