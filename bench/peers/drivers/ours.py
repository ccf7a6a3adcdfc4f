"""fdg as `python -m fdg.train` runs it: the same flags, presets and devices, without a run directory.

Configuration: `{"flags": [words], "continues": bool}`; `--total-steps` among the flags is a round's length. A
round is a whole training, from its first parameters on, or goes on where the last one ended.
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
from fdg.training.starting import compile_and_init


def compiled(flags: Sequence[str]) -> tuple[Job, fdg.Engine, Any]:
    """What flags of the command line say, with all that training needs compiled: job, engine, first state."""
    job = parse(flags, "ours", "")
    settled = prepare_job(job)
    job = settled.job
    engine = fdg.compile(job.algorithm, job.policy, settled.devices, job.agents, settled.graph)
    return job, engine, jax.block_until_ready(compile_and_init(engine, 0))


def prepare(config: dict[str, Any]):
    """Compiles what the flags say."""
    with Stopwatch() as watch:
        job, engine, _ = compiled(config["flags"])
    steps = job.num_iterations * job.steps_per_iteration * (job.agents or 1)

    # Speed is measured for as long as it takes, beyond where the step size has fallen to zero.
    warnings.simplefilter("ignore", fdg.FdgWarning)
    states = [engine.init(0)]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            worked = time.process_time()
            begun = states.pop() if config["continues"] else engine.init(seed)
            state, metrics = engine.run(begun, job.num_iterations)
            jax.block_until_ready((state, metrics))
            work = time.process_time() - worked
        states[:] = [state]
        returns = np.asarray(metrics["episode_return"])
        ended = returns[~np.isnan(returns)]
        last = ended[-max(1, len(ended) // 20) :]
        return {
            "steps": steps,
            "seconds": watch.seconds,
            "cpu_seconds": work,
            "return": float(last.mean()) if len(last) else None,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    return one_round, {"compile_seconds": watch.seconds, "devices": len(engine.devices)}
