"""Search methods on co-design at equal evaluations; each cell (problem, method) is a JSON file, and kept.

python -m bench.codesign_study                  # runs what is missing in runs/codesign-study
python -m bench.codesign_study --only small     # cells whose name matches this expression
"""

import dataclasses

from envs.codesign import exhaustive, reading

SEEDS, TUNING = range(20), range(500, 520)  # reported; settings are chosen on these alone
EVALUATIONS, BUDGETS = 5_000, (500, 2_000, 5_000)
LEVELS = {"tight": 0.08, "medium": 0.15, "loose": 0.30}


def small(level):
    """W1's tasks on 90 chips, 5,898,240 designs; specs are quantiles of 100,000 random designs."""
    w1 = reading.get("w1")
    chips = dataclasses.replace(w1.chips, pes=(0, 128, 256), noc_bytes_per_cycle=(16, 32), buffer_kb=(16,))
    w1 = dataclasses.replace(w1, chips=chips, levels=(), name="small")
    return dataclasses.replace(w1, specs=exhaustive.specs_at(w1, LEVELS[level]))
