"""Drives Sample Factory's APPO (2.1.1, torch): processes for environments, a policy and a learner.

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


def make_env(env, options, *_, render_mode=None, **__):
    """Makes an environment for Sample Factory, whose further arguments have no effect."""
    return gymnasium.make(env, render_mode=render_mode, **options)


class UpdateTimes(AlgoObserver):
    """Records when the learner updates; Sample Factory calls `on_training_step` after each update."""

    def __init__(self):
        self.updates: list[tuple[float, int]] = []  # seconds and environment steps, after each update

    def on_training_step(self, runner, training_iteration_since_resume):
        self.updates.append((time.perf_counter(), sum(runner.env_steps.values())))


def prepare(config: dict[str, Any]):
    """Registers the environment; returns what `bench.peers.serve` needs. Each round starts the processes."""
    register_env("task", functools.partial(make_env, config["env"], config["options"]))
    folder, rounds = tempfile.mkdtemp(), itertools.count(1)

    def one_round(seed: int) -> dict[str, Any]:
        last_step = next(rounds) * config["steps"]
        flags = [
            *config["flags"],
            "--env=task",
            f"--train_dir={folder}",
            f"--train_for_env_steps={last_step}",
        ]
        runner = make_runner(parse_full_cfg(parse_sf_args(flags)[0], flags))[1]
        update_times = UpdateTimes()
        runner.register_observer(update_times)
        status = runner.init() or runner.run()
        if status:
            raise RuntimeError(f"Sample Factory ended with status {status}: see its log")
        (start, first_step), (end, final_step) = update_times.updates[0], update_times.updates[-1]
        returns = runner.policy_avg_stats["reward"][0]
        return {"steps": final_step - first_step, "seconds": end - start, "return": float(np.mean(returns))}

    return one_round, {"compile_seconds": 0.0}
