"""Sample Factory's APPO (2.1.1, torch): environment workers, a policy worker and a learner, in processes.

A round resumes training from its checkpoint in new processes; it is timed from the first update to the last.
Configuration: `{"env", "options" of gymnasium.make, "steps", "flags" of Sample Factory}`.
"""

import functools
import itertools
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner


def make(env, options, *_, render_mode=None, **__):
    return gymnasium.make(env, render_mode=render_mode, **options)


class Clock(AlgoObserver):
    def __init__(self):
        self.seen: list[tuple[float, int]] = []  # seconds and environment steps, after each update

    def on_training_step(self, runner, training_iteration_since_resume):
        self.seen.append((time.perf_counter(), sum(runner.env_steps.values())))


def prepare(config: dict[str, Any]):
    register_env("task", functools.partial(make, config["env"], config["options"]))
    folder, rounds = tempfile.mkdtemp(), itertools.count(1)

    def one_round(seed: int) -> dict[str, Any]:
        until = next(rounds) * config["steps"]
        flags = [*config["flags"], "--env=task", f"--train_dir={folder}", f"--train_for_env_steps={until}"]
        runner = make_runner(parse_full_cfg(parse_sf_args(flags)[0], flags))[1]
        clock = Clock()
        runner.register_observer(clock)
        failed = runner.init() or runner.run()
        if failed:
            raise RuntimeError(f"Sample Factory ended with status {failed}: its log says why")
        (begun, first), (ended, last) = clock.seen[0], clock.seen[-1]
        returns = runner.policy_avg_stats["reward"][0]
        return {"steps": last - first, "seconds": ended - begun, "return": float(np.mean(returns))}

    return one_round, {"compile_seconds": 0.0}
