"""Drives fdg with the flags, presets and devices of `python -m fdg.train`, without a run directory.

Configuration: `{"flags": [...], "keeps_state": bool}`; `--total-steps` is the length of a round. A round
starts with new parameters, or where the last round ended (`keeps_state`). Its return is the mean over the
last twentieth of the iterations in which an episode ended.
"""

import resource
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import fdg
from bench.peers.serve import Stopwatch
from fdg.commands.parse import parse
from fdg.training.job import Job
from fdg.training.settling import prepare as prepare_job


def compile_job(flags: Sequence[str]) -> tuple[Job, fdg.Engine, Any]:
    """The job of flags of `fdg.train`, its compiled engine, and the first state."""
    job = parse(flags, "ours", "")
    settled = prepare_job(job)
    job = settled.job
    engine = fdg.compile(job.algorithm, job.policy, settled.devices, job.agents, settled.graph)
    return job, engine, jax.block_until_ready(engine.compile_and_init())


def prepare(config: dict[str, Any]):
    """Compiles the job of the flags; returns what `bench.peers.serve` needs."""
    with Stopwatch() as watch:
        job, engine, _ = compile_job(config["flags"])
    steps = job.num_iterations * job.steps_per_iteration * (job.agents or 1)

    # Rounds may go beyond the last step of the learning-rate schedule, of which fdg warns.
    warnings.simplefilter("ignore", fdg.FdgWarning)
    states = [engine.init(0)]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            cpu_before = time.process_time()
            state_before = states.pop() if config["keeps_state"] else engine.init(seed)
            state, metrics = engine.run(state_before, job.num_iterations)
            jax.block_until_ready((state, metrics))
            cpu_seconds = time.process_time() - cpu_before
        states[:] = [state]
        returns = np.asarray(metrics["episode_return"])
        ended = returns[~np.isnan(returns)]
        last = ended[-max(1, len(ended) // 20) :]
        return {
            "steps": steps,
            "seconds": watch.seconds,
            "cpu_seconds": cpu_seconds,
            "return": float(last.mean()) if len(last) else None,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    return one_round, {"compile_seconds": watch.seconds, "devices": len(engine.devices)}
