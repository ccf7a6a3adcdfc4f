"""Helpers to drive peers whose script has a function `make_train(settings)`; a round is a whole training."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.peers.serve import Stopwatch


def add_to_path(config: Mapping[str, Any], *folder: str) -> None:
    """Adds a folder of the checkout to Python's path."""
    sys.path.insert(0, str(Path(config["checkout"], *folder)))


def compile_script(script: Any, settings: dict[str, Any], returns_of: Callable[[Any], Any]):
    """Compiles a script's training; returns a function for a round, and facts for `bench.peers.serve`.

    Args:
      script: the module.
      settings: the script's settings; `make_train` adds `NUM_UPDATES`.
      returns_of: a function from the result of a training to returns; their mean is recorded.
    """
    with Stopwatch() as watch:
        train = jax.jit(script.make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
    steps = settings["NUM_UPDATES"] * settings["NUM_STEPS"] * settings["NUM_ENVS"]

    def one_round(seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            result = jax.block_until_ready(train(jax.random.PRNGKey(seed)))
            jax.effects_barrier()
        returns = np.asarray(returns_of(result))
        mean = float(np.nanmean(returns)) if returns.size else None
        return {"steps": steps, "seconds": watch.seconds, "return": mean}

    return one_round, {"compile_seconds": watch.seconds}


def last_twentieth(settings: Mapping[str, Any]) -> slice:
    """A slice of the last twentieth of a training's updates; call it after `make_train`."""
    return slice(-max(1, settings["NUM_UPDATES"] // 20), None)
