"""JaxMARL's baselines, from a checkout (github.com/FLAIROX/JaxMARL); the environments come from the registry.

Configuration: `{"checkout": PATH, "script": "IPPO/ippo_ff_mpe", "config": {...}}`, the latter as in the
checkout's `baselines/*/config/`. What they would log at each update goes nowhere.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import wandb

from bench.peers.serve import Stopwatch, serve


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training, as it does itself."""
    folder, script_name = config["script"].split("/")
    sys.path.insert(0, str(Path(config["checkout"]) / "baselines" / folder))
    wandb.log = lambda *_, **__: None
    script = importlib.import_module(script_name)
    settings = dict(config["config"])
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
        last = -max(1, settings["NUM_UPDATES"] // 20)
        returns = np.asarray(result["metrics"]["returned_episode_returns"][last:])
        return {"steps": steps, "seconds": watch.seconds, "return": float(returns.mean())}

    return one_round, {"compile_seconds": watch.seconds}


if __name__ == "__main__":
    serve(prepare)
