"""Compares plans' estimates of memory with the memory that XLA allocates on a device.

    python -m bench.costs memory                   compiles each job in its own process; resumes
    python -m bench.costs memory --only staleness  jobs whose name contains this
    python -m bench.costs memory --again           compiles all jobs again

Nothing is timed, so a busy machine is fine. `bench/costs_memory.json` has the jobs, with XLA's peak bytes of
each program; the tests read this file. To add a job, add an entry `"NAME": {}`. The estimate of a group is
compared with the program of the group that needs most memory.
"""

import ast
import json
import re
import subprocess
import sys

import fdg
from bench.harness import ROOT, run_module
from fdg.training.reference_jobs import ReferenceJob

RESULTS = ROOT / "bench" / "costs_memory.json"
TOLERANCE = 0.3  # an estimate is good if its ratio to XLA's bytes differs from 1 by at most this


def xla_bytes() -> dict[str, dict[str, int]]:
    """XLA's peak bytes on one device, by job and program; a job without programs is not compiled yet."""
    return json.loads(RESULTS.read_text())


def job_of(name: str) -> ReferenceJob:
    """The job with a name, as `str(job)` writes it; only the argument `staleness` is the policy's.

    >>> job_of("PPO CartPole-v1 GPUOnly on 2 (num_envs=4, hidden=(8,), staleness=1)").policy_fields
    (('staleness', 1),)
    """
    parts = re.fullmatch(r"(\S+) (\S+) (\S+) on (\d+) \((.*)\)", name)
    assert parts is not None, name
    algorithm, env, policy, devices, argument_text = parts.groups()
    call = ast.parse(f"f({argument_text})", mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = [  # (name, value); a bare word is a string
        (str(x.arg), x.value.id if isinstance(x.value, ast.Name) else ast.literal_eval(x.value))
        for x in call.keywords
    ]
    fields = tuple(pair for pair in arguments if pair[0] != "staleness")
    policy_fields = tuple(pair for pair in arguments if pair[0] == "staleness")
    return ReferenceJob(algorithm, env, fields, policy, policy_fields, int(devices))


def jobs() -> list[ReferenceJob]:
    return [job_of(name) for name in xla_bytes()]


def compiled_bytes(job: ReferenceJob) -> dict[str, int]:
    """Compiles a job; returns XLA's peak bytes on one device, by program."""
    import jax

    fdg.host_devices(job.devices)
    engine = fdg.compile(*job.build(), jax.devices("cpu")[: job.devices])
    names = {program.name for program in engine.plan.programs}
    return {p.name: int(p.cost()["peak_bytes"]) for p in engine.programs if p.name in names}


def compare(job: ReferenceJob) -> list[tuple[str, int, int]]:
    """For each group: its name, its estimated bytes, and XLA's peak bytes of its largest program."""
    plan, measured = fdg.place(*job.build(), job.devices), xla_bytes()[str(job)]
    estimated, largest = dict(plan.memory), dict.fromkeys((group.name for group in plan.groups), 0)
    for program in plan.programs:
        largest[program.group] = max(largest[program.group], measured[program.name])
    return [(group, estimated[group], size) for group, size in largest.items()]


def memory(only: str, again: bool) -> None:
    """Compiles missing jobs whose name contains `only` (`again`: all of them); prints estimates / XLA's."""
    ratios = []
    for job in jobs():
        if only not in str(job):
            continue
        if again or not xla_bytes()[str(job)]:
            try:
                peaks = run_module("bench.costs_memory", str(job), seconds=900)
            except subprocess.SubprocessError as error:
                print(f"{job}: {error}", flush=True)
                continue
            RESULTS.write_text(json.dumps({**xla_bytes(), str(job): peaks}, indent=1) + "\n")
        for group, estimated, size in compare(job):
            ratios.append(estimated / size)
            print(f"  {ratios[-1]:.2f} of {size / 1e6:8.3f} MB  {group} of {job}", flush=True)
    good = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    print(f"{len(ratios)} groups: {good} within {TOLERANCE:.0%}, all {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    print(json.dumps(compiled_bytes(job_of(sys.argv[1]))))
