"""Craftax_Baselines' `ppo.py`, from a checkout (github.com/MichaelTMatthews/Craftax_Baselines).

Configuration: `{"checkout": PATH, "config": {...}}`, the latter as its command line has it, in capitals. A
return is the mean of the episodes that ended in its last eight updates, with drawn actions.
"""

import collections
import importlib
import sys
from typing import Any

import jax
import numpy as np

from bench.peers.serve import Stopwatch, serve


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training, as it does itself."""
    sys.path.insert(0, config["checkout"])
    logged: collections.deque[float] = collections.deque(maxlen=8)
    script: Any = importlib.import_module("ppo")
    script.batch_log = lambda step, log, settings: logged.append(float(log["episode_return"]))
    settings = {**config["config"], "DEBUG": True, "USE_WANDB": True}  # else it logs nothing; nothing is sent
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            jax.block_until_ready(train(jax.random.PRNGKey(seed)))
            jax.effects_barrier()
        return {"steps": steps, "seconds": watch.seconds, "return": float(np.nanmean(logged))}

    return one_round, {"compile_seconds": watch.seconds}


if __name__ == "__main__":
    serve(prepare)
