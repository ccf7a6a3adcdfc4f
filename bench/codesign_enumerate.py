"""All designs of two networks and two sub-accelerators: the optimum, the share that is feasible, seconds.

python -m bench.codesign_enumerate
"""

import time

from envs.codesign import accuracy, space
from envs.codesign.exhaustive import enumerate_all, specs_at
from envs.codesign.problem import Problem

# 5.9 million designs: all 65,536 pairs of networks on 90 chips.
W1 = Problem(
    (space.resnet9(), space.unet()),
    space.Chips(
        templates=("dla", "shi"), pes=(512, 1024, 2048), noc_bytes_per_cycle=(16, 32), buffer_kb=(256,)
    ),
)
LEVELS = {"tight": 0.08, "medium": 0.15, "loose": 0.30}


def main() -> None:
    scores = tuple(accuracy.surrogate(task) / len(W1.tasks) for task in W1.tasks)
    print(f"{W1.count():,} designs; scores are a surrogate's, not measured")
    for name, quantile in LEVELS.items():
        specs = specs_at(W1, quantile)
        before, cpu_before = time.perf_counter(), time.process_time()
        found = enumerate_all(W1, scores, specs)
        seconds, cpu = time.perf_counter() - before, time.process_time() - cpu_before
        share = found.feasible / found.designs
        print(f"{name}: {specs}\n  {share:.3%} feasible, {seconds:.1f} s, {cpu:.1f} s of CPU\n  {found}")
        for task, at in zip(W1.tasks, found.networks, strict=True):
            print(f"  {task.name}: {task.choices()[at]}")
        print(f"  chip: {[W1.chips.kinds()[at] for at in found.kinds]}")


if __name__ == "__main__":
    main()
