"""Trains all algorithms in all small environments (the study `bench/table.toml`), or a part of them.

    python -m bench.table --list                              # prints the cells
    python -m bench.table                                     # trains all cells, into runs/table
    python -m bench.table --only ppo dqn Acrobot-v1           # two algorithms in one environment
    python -m bench.table --budget short --write              # adds trained cells to those in docs/results.md

A run ends with its tables in runs/table/short/comparison.md and runs/table/long/comparison.md; tables of a
part have only its cells. A † marks a cell at the level of random actions.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench import harness
from fdg.commands.cli import guarded
from fdg.commands.study import Study, carry_out_study, read_study
from fdg.reading import read_json
from fdg.training.comparison import Comparison, compare

FILE = Path(__file__).with_suffix(".toml")
DOCUMENT = harness.ROOT / "docs" / "results.md"
_ENVIRONMENTS_PER_TABLE = 6


def part_of_study(study: Study, only: list[str], budgets: list[str], seeds: int | None) -> Study:
    """The study with the cells of the named environments, algorithms and budgets (all, if none is named).

    `only` has names of environments and algorithms. `seeds` is a number of seeds, counted from the study's
    first; None: the study's seeds.
    """

    def is_named(name: str, known_names: set[str]) -> bool:
        return name in only or not known_names & set(only)

    algorithms, environments = ({getattr(cell, kind) for cell in study.cells} for kind in ("algo", "env"))
    if unknown := set(only) - algorithms - environments:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no cell has this algorithm or environment")
    cells = [
        cell
        for cell in study.cells
        if is_named(cell.algo, algorithms)
        and is_named(cell.env, environments)
        and (not budgets or cell.budget in budgets)
    ]
    chosen = study.seeds if seeds is None else range(study.seeds[0], study.seeds[0] + seeds)
    return dataclasses.replace(study, cells=cells, seeds=chosen)


Cells = dict[str, dict[str, str]]  # texts by algorithm, then environment


def cells_of(comparison: Comparison) -> Cells:
    """The final returns of all trained cells, and those of random actions."""
    envs = comparison.environments
    cells: Cells = {"random": {env: f"{comparison.random_estimate(env).value:.4g}" for env in envs}}
    for side in comparison.sides:
        estimates = {env: comparison.estimate(side, env) for env in envs}
        cells[side] = {
            env: f"{value}{' †' * comparison.is_random(side, env)}"
            for env, value in estimates.items()
            if value is not None
        }
    return cells


def cells_in(text: str) -> Cells:
    """The cells of tables in Markdown, as `tables` writes them."""
    cells: Cells = {}
    envs: list[str] = []
    for line in text.splitlines():
        first, *others = [entry.strip() for entry in line.strip("|").split("|")]
        if first == "algorithm":
            envs = others
        elif others and not first.startswith("---"):
            row = {env: entry for env, entry in zip(envs, others, strict=True) if entry}
            cells.setdefault(first, {}).update(row)
    return cells


def tables(cells: Cells, algorithms: Sequence[str], environments: Sequence[str]) -> str:
    """Cells as Markdown: a row for each algorithm, some environments side by side."""
    tables_of_environments = []
    for i in range(0, len(environments), _ENVIRONMENTS_PER_TABLE):
        envs = environments[i : i + _ENVIRONMENTS_PER_TABLE]
        rows = [[name, *(cells.get(name, {}).get(env, "") for env in envs)] for name in algorithms]
        tables_of_environments.append(
            harness.table(("algorithm", *envs), [row for row in rows if any(row[1:])])
        )
    return "\n\n".join(tables_of_environments)


def write(study: Study, out: Path, document: Path = DOCUMENT) -> int:
    """Writes the trained cells of each budget into the document's table; other cells remain unchanged."""
    random = read_json(out / "random.json")  # returns of random actions
    for budget in dict.fromkeys(cell.budget for cell in study.cells):
        trained = {  # run directory -> side
            out / "cells" / cell.name: cell.side
            for cell in study.cells
            if cell.budget == budget and (out / "cells" / cell.name / "summary.json").exists()
        }
        module = f"bench.table --budget {budget}"
        cells = cells_in(harness.split_at_marks(document, module)[1])
        new_cells = cells_of(compare(list(trained), labels=list(trained.values()), random=random))
        for name, row in new_cells.items():
            cells.setdefault(name, {}).update(row)
        all_cells = read_study(FILE).cells
        algorithms = dict.fromkeys(["random", *(cell.algo for cell in all_cells), *cells])
        environments = dict.fromkeys(cell.env for cell in all_cells)
        harness.rewrite(document, module, tables(cells, list(algorithms), list(environments)))
        print(f"wrote {len(trained)} cells into {document}")
    return 0


def main() -> int:
    parser = harness.parser("bench.table", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="environments or algorithms")
    parser.add_argument("--budget", nargs="+", default=[], help="short, long")
    parser.add_argument("--seeds", type=int, default=None, help="number of seeds, in place of the file's")
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--list", action="store_true", help="print the cells and run nothing")
    parser.add_argument("--write", action="store_true", help="train nothing; write trained cells into docs")
    args = parser.parse_args()
    study = part_of_study(read_study(FILE), args.only, args.budget, args.seeds)
    if not study.cells or not study.seeds:
        parser.error("no cell has these names: see --list")
    if args.list:
        print(
            *(f"{cell.name}: fdg train {' '.join(cell.command(study.seeds))}" for cell in study.cells),
            sep="\n",
        )
        return 0
    return guarded(lambda _: (write if args.write else carry_out_study)(study, args.out), [])


if __name__ == "__main__":
    raise SystemExit(main())
