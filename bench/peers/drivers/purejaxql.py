"""purejaxql's `pqn_gymnax.py` and `pqn_minatar.py`, from a checkout (github.com/mttga/purejaxql).

Configuration: `{"checkout": PATH, "script": "pqn_gymnax", "config": {...}}`, the latter as in the checkout's
`config/`. Evaluations during training are off unless it says `TEST_DURING_TRAINING`; with them a return is
that of the last one, of greedy actions, else of the last twentieth of training.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gymnax.wrappers import purerl

from bench.peers.drivers.old_gymnax import OldStep
from bench.peers.serve import Stopwatch, serve


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training, as it does itself."""
    # The wrappers that it takes from gymnax step as gymnax does today; the outermost one gives five values.
    log_wrapper = purerl.LogWrapper
    purerl.LogWrapper = lambda env: OldStep(log_wrapper(env))
    sys.path.insert(0, str(Path(config["checkout"]) / "purejaxql"))
    script = importlib.import_module(config["script"])
    settings = {"TEST_DURING_TRAINING": False, **config["config"], "WANDB_MODE": "disabled"}
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        if settings["TEST_DURING_TRAINING"]:
            returns = np.asarray(result["metrics"]["test/returned_episode_returns"][-1])
        else:
            last = -max(1, settings["NUM_UPDATES"] // 20)
            returns = np.asarray(result["metrics"]["returned_episode_returns"][last:])
        return {"steps": steps, "seconds": watch.seconds, "return": float(returns.mean())}

    return one_round, {"compile_seconds": watch.seconds}


if __name__ == "__main__":
    serve(prepare)
