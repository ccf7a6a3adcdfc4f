"""Memory: the estimate that plans have, beside what XLA sets aside on a device.

    python -m bench.costs memory                   each job in a process of its own; continues
    python -m bench.costs memory --only staleness  jobs whose name holds this
    python -m bench.costs memory --again           compiles what was compiled before

No clock is involved, so a busy machine does as well. The jobs are those of `bench/costs_memory.json`, with
what XLA says of each program, which the tests read: a further job is an entry `"NAME": {}`. Estimates
are made each time. Of each group the program that needs most is compared.
"""

import ast
import json
import re
import subprocess
import sys

import fdg
from bench.harness import ROOT, run_module
from fdg.training.reference_jobs import ReferenceJob

KEPT = ROOT / "bench" / "costs_memory.json"
WITHIN = 0.3
LEAST = 0.6


def kept() -> dict[str, dict[str, int]]:
    """What XLA said so far, by job and program: bytes on one device."""
    return json.loads(KEPT.read_text())


def job_of(name: str) -> ReferenceJob:
    """The job of a name.

    >>> job_of("PPO CartPole-v1 GPUOnly on 2 (num_envs=4, hidden=(8,), staleness=1)").sizes
    (('staleness', 1),)
    """
    parts = re.fullmatch(r"(\S+) (\S+) (\S+) on (\d+) \((.*)\)", name)
    assert parts is not None, name
    algorithm, env, policy, devices, words = parts.groups()
    call = ast.parse(f"f({words})", mode="eval").body
    assert isinstance(call, ast.Call)
    values = [
        (str(one.arg), one.value.id if isinstance(one.value, ast.Name) else ast.literal_eval(one.value))
        for one in call.keywords
    ]
    fields, sizes = (tuple(v for v in values if (v[0] == "staleness") == of_policy) for of_policy in (0, 1))
    return ReferenceJob(algorithm, env, fields, policy, sizes, int(devices))


def most(job: ReferenceJob) -> float:
    """The largest estimate by XLA's. Gradients in tiles, where devices have a core each, need less."""
    return 1.5 if job.devices == 1 else 2.6


def jobs() -> list[ReferenceJob]:
    """All of them."""
    return [job_of(name) for name in kept()]


def compiled(job: ReferenceJob) -> dict[str, int]:
    """By program, bytes on one device as XLA counts them."""
    import jax

    fdg.host_devices(job.devices)
    engine = fdg.compile(*job.build(), jax.devices("cpu")[: job.devices])
    names = {program.name for program in engine.plan.programs}
    peaks: dict[str, int] = {}
    for program in engine.programs:
        if program.name in names:
            peaks[program.name] = int(program.cost()["peak_bytes"])
    return peaks


def compared(job: ReferenceJob) -> list[tuple[str, int, int]]:
    """Group, estimated and XLA's bytes: of each group, of the program that XLA says needs most."""
    plan, measured = fdg.place(*job.build(), job.devices), kept()[str(job)]
    estimated, largest = dict(plan.memory), dict.fromkeys((group.name for group in plan.groups), 0)
    for program in plan.programs:
        largest[program.group] = max(largest[program.group], measured[program.name])
    return [(group, estimated[group], size) for group, size in largest.items()]


def memory(only: str, again: bool) -> None:
    """Compiles what was not yet, and prints estimates by XLA's."""
    ratios = []
    for job in jobs():
        if only not in str(job):
            continue
        if again or not kept()[str(job)]:
            try:
                peaks = run_module("bench.costs_memory", str(job), seconds=900)
            except subprocess.SubprocessError as error:
                print(f"{job}: {error}", flush=True)
                continue
            KEPT.write_text(json.dumps({**kept(), str(job): peaks}, indent=1) + "\n")
        for group, estimated, size in compared(job):
            ratios.append(estimated / size)
            print(f"  {ratios[-1]:.2f} of {size / 1e6:8.3f} MB  {group} of {job}", flush=True)
    good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"{len(ratios)} groups: {good} within {WITHIN:.0%}, all {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    print(json.dumps(compiled(job_of(sys.argv[1]))))
