"""Drives purejaxql's `pqn_gymnax.py` and `pqn_minatar.py`, from a checkout (github.com/mttga/purejaxql).

Configuration: `{"checkout": PATH, "script": "pqn_gymnax", "config": {...}}`; `config` has settings of the
checkout's `config/`. Training has no evaluations; the return is the mean over its last twentieth.
"""

import importlib
from typing import Any

from gymnax.wrappers import purerl

from bench.peers.drivers.old_gymnax import OldStep
from bench.peers.drivers.scripts import add_to_path, compile_script, last_twentieth


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training; returns what `bench.peers.serve` needs."""
    # gymnax's wrappers have the new `step`, but the script expects five values of the outermost wrapper.
    log_wrapper = purerl.LogWrapper
    purerl.LogWrapper = lambda env: OldStep(log_wrapper(env))
    add_to_path(config, "purejaxql")
    script = importlib.import_module(config["script"])
    settings = {**config["config"], "TEST_DURING_TRAINING": False, "WANDB_MODE": "disabled"}

    def final_returns(result: Any) -> Any:
        return result["metrics"]["returned_episode_returns"][last_twentieth(settings)]

    return compile_script(script, settings, final_returns)
