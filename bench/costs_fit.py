"""The numbers of the cost model that are no rates, from one half of the cells of every machine.

    python -m bench.costs_fit              prints them
    python -m bench.costs_fit --machines   and fits each machine's calibration to its jobs anew, from there on

`program_time.JOINED` and `overheads.OVERHEADS` are what a machine has that was not calibrated, and what a
calibration starts from. How a fit is made: `fdg.costs.fitting`.
"""

import dataclasses
import json
import sys

from bench import costs
from fdg.costs.fitting import fitted
from fdg.training.reference_jobs import REFERENCE_JOBS, fitted_to_jobs

_KNOWN = 0.4  # of two hundred cells a few classes would end far from what a program can lose


def fit(half: str = "fitted") -> None:
    """Prints the numbers to enter in `program_time.JOINED` and `overheads.OVERHEADS`.

    Args:
      half: "fitted"; "all" says how well the model can do at best, and is not to be entered.
    """
    samples = [sample for one in costs.machines() for sample in one.samples(half)]
    found = fitted(samples, known=_KNOWN)
    print(
        f"fitted to {len(samples)} cells: median error {found.before:.1%} before, {found.after:.1%} after;"
        f" enter these:"
    )
    print(f"fdg/costs/program_time.py: {json.dumps(found.joined)}")
    print(f"fdg/costs/overheads.py: {found.overheads}")


def fit_machines() -> None:
    """Each kept calibration, as `python -m fdg.calibrate` would, with the model as it is now.

    A machine that was calibrated before there were jobs has the times of its cells for them.
    """
    for one in costs.machines():
        cells = {cell.key: seconds for cell, seconds in one.measured()}
        jobs = {job.key: cells[job.key] for job in REFERENCE_JOBS if job.key in cells}
        found = one.calibration if one.calibration.jobs else None
        found = fitted_to_jobs(found or dataclasses.replace(one.calibration, jobs=jobs))
        one.calibration_file.write_text(json.dumps(found.as_json(), indent=1) + "\n")
        print(f"{one.name}: fitted to {len(found.jobs)} jobs: {found.kind.joined}, {found.kind.overheads}")


if __name__ == "__main__":
    fit()
    if "--machines" in sys.argv:
        fit_machines()
