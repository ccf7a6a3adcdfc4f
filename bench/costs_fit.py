"""The numbers of the cost model that are no rates, from one half of the cells that were measured.

    python -m bench.costs_fit

`program_time.JOINED` and `overheads.OVERHEADS` explain each other, so they are fitted together: least squares
of the logarithm of predicted by measured, with large errors counted less (soft L1), and a little of what is
known already, for what few cells say anything about.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import fdg
from bench import costs
from fdg.costs.overheads import OVERHEADS, Overheads
from fdg.costs.prediction import predict
from fdg.costs.program_time import CLASSES, JOINED

_NOT_IN_THE_CELLS = ("convolution", "host")  # nothing is said of these
_KNOWN = 0.15  # what a factor of e from what is known counts, beside an error of a factor of e in one cell
_LARGE = 0.2  # errors from here on count less


def fit(half: str = "fitted") -> tuple[Mapping[str, float], Overheads]:
    """Prints the numbers to enter in `program_time.JOINED` and `overheads.OVERHEADS`.

    Args:
      half: "fitted"; "all" says how well the model can do at best, and is not to be entered.
    """
    from scipy.optimize import least_squares

    rows = [row for row in costs.measured_cells() if half == "all" or row[0].is_fitted]
    plans = [fdg.place(*costs.build(cell), cell.devices) for cell, _ in rows]
    clusters = [costs.measured_on(cell.devices) for cell, _ in rows]
    measured = np.array([found["seconds"] for _, found in rows])
    classes = [name for name in CLASSES if name not in _NOT_IN_THE_CELLS]
    fields = [field.name for field in dataclasses.fields(Overheads)]
    now = [JOINED["cpu"][name] for name in classes] + [getattr(OVERHEADS["cpu"], name) for name in fields]
    known = np.log(now)

    def named(values: Sequence[float]) -> tuple[Mapping[str, float], Overheads]:
        joined = {**JOINED["cpu"], **dict(zip(classes, values[: len(classes)], strict=True))}
        return joined, Overheads(**dict(zip(fields, values[len(classes) :], strict=True)))

    def errors(logs: Any) -> Any:
        joined, lost = named(np.exp(logs))
        return np.array(
            [
                math.log(predict(plan, cluster, joined=joined, overheads=lost).seconds / seconds)
                for plan, cluster, seconds in zip(plans, clusters, measured, strict=True)
            ]
        )

    def residuals(logs: Any) -> Any:
        # The loss is soft in what cells say, not in what is known.
        off = errors(logs) / _LARGE
        soft = np.sign(off) * _LARGE * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([soft, _KNOWN * (logs - known)])

    bounds = known - 2.5, known + 2.5
    of_share = [i for i, name in enumerate(classes + fields) if name in ("divided", "shared")]
    bounds[1][of_share] = 0.0
    found = least_squares(residuals, np.minimum(known, bounds[1] - 1e-3), bounds=bounds, diff_step=0.03)
    joined, lost = named([float(f"{math.exp(x):.2g}") for x in found.x])
    before, after = (statistics.median(abs(np.expm1(errors(x)))) for x in (known, found.x))
    print(f"fitted to {len(rows)} cells: median error {before:.1%} before, {after:.1%} after; enter these:")
    print(f"fdg/costs/program_time.py: {json.dumps({name: joined[name] for name in classes})}")
    print(f"fdg/costs/overheads.py: {lost}")
    return joined, lost


if __name__ == "__main__":
    fit()
