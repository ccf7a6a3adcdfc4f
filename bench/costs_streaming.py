"""Predicted against measured for lags in micro-batches, and what `--lag auto` would take.

    python -m bench.costs_streaming            # or --again; or report, of what was measured

Forty cells: eight jobs of two groups, a host device each, five lags a job. Of a job, the smallest lag that is
predicted to be within 5% of the best is compared with the one that was quickest by the clock. Measure on a
quiet machine, after `python -m fdg.calibrate` on the same.
"""

import itertools
import sys

import fdg
from bench import costs
from bench.costs import Cell, Machine
from fdg.costs.choosing import TIE
from fdg.costs.prediction import predict

_SIZES = (("group_size", 4), ("hidden_size", 32), ("num_layers", 2), ("num_heads", 4))


def cells() -> list[Cell]:
    """Language models in micro-batches, and rollouts, whose micro-batches are steps."""
    jobs: list[tuple] = [
        ("GRPO", f"text:{task}", (("num_prompts", prompts), ("micro_batches", parts), *_SIZES),
         "Split", parts)
        for task, prompts, parts in (
            ("sorting", 16, 4), ("sorting", 64, 8), ("addition", 32, 4), ("addition", 128, 8),
        )
    ] + [
        (name, env, (("num_envs", envs), ("num_steps", steps)), "SingleLearnerCoarse", steps)
        for name, env, envs, steps in (
            ("PPO", "CartPole-v1", 256, 32), ("PPO", "Acrobot-v1", 512, 16),
            ("IMPALA", "CartPole-v1", 256, 32), ("IMPALA", "Acrobot-v1", 128, 64),
        )
    ]  # fmt: skip
    return [
        Cell(name, env, fields, policy, (("lag", lag),), 2)
        for name, env, fields, policy, parts in jobs
        for lag in (0, 1, parts // 2, parts, 2 * parts)
    ]


def report(one: Machine) -> None:
    """Of a machine: the median error of predictions; how far the lags that are taken are from the best."""
    rows = [
        (cell, seconds, predict(fdg.place(*cell.build(), 2), one.calibration.cluster(2)).seconds)
        for cell, seconds in one.found(one.streaming_file)
    ]
    for cell, s, p in rows:
        print(f"{p / s:6.2f}  measured {s * 1e3:9.3f} ms  predicted {p * 1e3:9.3f} ms  {cell}")
    losses = []
    for _, some in itertools.groupby(rows, key=lambda row: row[0].group):
        of_job = sorted(some, key=lambda row: dict(row[0].sizes)["lag"])
        enough = TIE * min(p for *_, p in of_job)
        taken = next(s for _, s, p in of_job if p <= enough)
        losses.append(taken / min(s for _, s, _ in of_job))
    if rows:
        good = sum(loss <= TIE for loss in losses)
        print(f"{one.name}: {len(rows)} cells of lags: median error {costs.median_error(rows)};")
        print(f"{good} of {len(losses)} lags within {TIE - 1:.0%} of the best, the worst {max(losses):.2f}")


if __name__ == "__main__":
    if "report" not in sys.argv:
        file = costs.this_machine().streaming_file
        costs.measure(cells(), file, again="--again" in sys.argv)
    for each in costs.machines():
        report(each)
