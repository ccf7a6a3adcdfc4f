"""Peers whose script has a `make_train(settings)`: a round is a whole training."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.peers.serve import Stopwatch


def look_in(config: Mapping[str, Any], *folder: str) -> None:
    """Adds a folder of the checkout to Python's path."""
    sys.path.insert(0, str(Path(config["checkout"], *folder)))


def compiled(script: Any, settings: dict[str, Any], returned: Callable[[Any], Any]):
    """A function for a round of the script, and its seconds of compilation.

    Args:
      script: the module.
      settings: the script's settings; it adds the number of updates.
      returned: gets the returns from the result of a training; their mean is recorded.
    """
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
            jax.effects_barrier()
        returns = np.asarray(returned(result))
        mean = float(np.nanmean(returns)) if returns.size else None
        return {"steps": steps, "seconds": watch.seconds, "return": mean}

    return one_round, {"compile_seconds": watch.seconds}


def last_twentieth(settings: Mapping[str, Any]) -> slice:
    """A slice of the last updates of a training."""
    return slice(-max(1, settings["NUM_UPDATES"] // 20), None)
