"""Where a run writes: its directory, made or opened again by process 0, and what is noted of its start."""

import datetime
import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

from fdg import ctrl_c
from fdg.errors import FdgError
from fdg.processes import distributed
from fdg.training.checkpoint import Checkpoints
from fdg.training.job import Job
from fdg.training.run_directory import RunDirectory, Unwritten, read_config
from fdg.training.settings import changes
from fdg.training.summary import versions
from fdg.training.sweep import Sweep

_OF_A_SITTING = ("command", "versions", "git_commit")  # what is noted of each, beside the job itself


def open_run(job: Job) -> RunDirectory:
    """The run's directory; one that writes nothing in the processes that do not."""
    if not distributed.is_first():
        return Unwritten(job.out or Path())
    sitting = {**job.record, "versions": versions(), "git_commit": git_commit()}
    path = job.out or free_directory(job.described["env"], job.described["algo"], job.seed)
    if not job.resumes:
        run = RunDirectory.create(path, {"id": secrets.token_hex(8), **job.config, **sitting})
    else:
        run = RunDirectory.reopen(path)
        checkpoints = Checkpoints(run.checkpoints)
        own = list(filter(checkpoints.is_own, checkpoints.iterations()))
        try:
            if not own:
                checkpoints.latest()  # refuses one that has lost all of them, before anything is written
        except FdgError:
            run.close()
            raise
        done = max(own, default=0)
        if done > job.num_iterations:
            run.close()
            raise FdgError(
                f"{path} has done {done:,} iterations, and --total-steps makes {job.num_iterations:,}:"
                f" give more"
            )
        before = read_config(path)
        changed = changes(before, job.config)
        noted = {name: sitting[name] for name in _OF_A_SITTING if name in sitting}
        at = {"at": f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}", "changes": changed, **noted}
        run.write_config({**before, **job.config, "resumes": [*before.get("resumes", ()), at]})
    ctrl_c.going_on(f"go on with --resume {path}")
    return run


def git_commit() -> str | None:
    """The commit of the folder that the run was started in, `-dirty` if files differ; None outside of any."""
    try:
        said = subprocess.run(
            # A folder's own settings may name a program to ask for changes: it is not started.
            [
                "git",
                "-c",
                "core.fsmonitor=false",
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if said.returncode == 0 else None


def free_directory(env: str | None, algo: str, seed: Any) -> Path:
    """A run directory that is not there yet: `runs/ENV-ALGO-SEED-TIME`; None and empty parts are left out."""
    env = None if env is None else re.sub(r"[^?&=]*/", "", env)  # of a file, its own name is enough
    parts = [str(part) for part in (env, algo.rpartition(":")[2], seed) if part not in (None, "")]
    name = "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts)
    path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    copies = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(copy for copy in copies if not copy.exists())


def title(job: Job) -> str:
    """What was trained, for the picture: algorithm and environment, policy and seeds."""
    what = " on ".join(filter(None, (job.described["algo"].rpartition(":")[2], job.described["env"])))
    seeds = f"seed {job.seed}"
    if isinstance(job.algorithm, Sweep):
        names = ", ".join(name for name, _ in job.algorithm.grid)
        seeds = f"sweep of {names}, {job.agents} agents"
    elif job.agents is not None and job.agents > 1:
        seeds = f"seeds {job.seed} to {job.seed + job.agents - 1}"
    return f"{what}\n{job.policy}, {seeds}"
