"""JaxMARL's baselines, from a checkout (github.com/FLAIROX/JaxMARL); the environments come from the registry.

Configuration: `{"checkout": PATH, "script": "IPPO/ippo_ff_mpe", "config": {...}}`, the latter as in the
checkout's `baselines/*/config/`. What they would log at each update is kept here, and sent nowhere.
"""

import collections
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
    logged: collections.deque[dict[str, Any]] = collections.deque(maxlen=8)
    wandb.log = lambda metrics, **_: logged.append(metrics)
    script = importlib.import_module(script_name)
    settings = dict(config["config"])
    layout = settings.get("ENV_KWARGS", {}).get("layout")
    if layout is not None:  # by name, as the scripts' own command lines have it
        settings["ENV_KWARGS"] = {**settings["ENV_KWARGS"], "layout": script.overcooked_layouts[layout]}
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            jax.block_until_ready(train(jax.random.PRNGKey(seed)))
            jax.effects_barrier()
        returns = [metrics.get("returns", metrics.get("returned_episode_returns")) for metrics in logged]
        return {"steps": steps, "seconds": watch.seconds, "return": float(np.mean(returns))}

    return one_round, {"compile_seconds": watch.seconds}


if __name__ == "__main__":
    serve(prepare)
