"""Peers whose script has a `make_train(settings)`, compiled as they do themselves: a round is a training."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.peers.serve import Stopwatch


def look_in(config: Mapping[str, Any], *folder: str) -> None:
    """Has Python find the scripts in a folder of the checkout."""
    sys.path.insert(0, str(Path(config["checkout"], *folder)))


def compiled(script: Any, settings: dict[str, Any], returned: Callable[[Any], Any]):
    """A round of the script, and the seconds that it compiles.

    Args:
      script: the module.
      settings: in capitals; it enters the number of updates there.
      returned: returns from what a training gives; their mean counts.
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
    """Of the updates of a training."""
    return slice(-max(1, settings["NUM_UPDATES"] // 20), None)
