"""Where a run writes: its directory, made or opened again by process 0."""

import datetime
import re
from pathlib import Path

from fdg import ctrl_c
from fdg.processes import distributed
from fdg.training.job import Job
from fdg.training.run_directory import RunDirectory, Unwritten


def open_run(job: Job) -> RunDirectory:
    """The run's directory; one that writes nothing in the processes that do not."""
    if not distributed.is_first():
        return Unwritten(job.out or Path())
    path = _directory(job)
    run = RunDirectory.reopen(path) if job.resumes else RunDirectory.create(path, job.config)
    ctrl_c.going_on(f"go on with --resume {path}")
    return run


def _directory(job: Job) -> Path:
    if job.out is not None:
        return job.out
    parts = [
        part
        for part in (job.config["env"], job.config["algo"].rpartition(":")[2], job.seed)
        if part is not None
    ]
    name = "-".join(re.sub(r"[^\w.-]+", "_", str(part)) for part in parts)
    path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    copies = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(copy for copy in copies if not copy.exists())


def title(job: Job) -> str:
    """What was trained, for the picture."""
    return " on ".join(filter(None, (job.config["algo"].rpartition(":")[2], job.config["env"])))
