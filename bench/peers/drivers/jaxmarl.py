"""Drives JaxMARL's baselines from a checkout (github.com/FLAIROX/JaxMARL), with the package's environments.

Configuration: `{"checkout": PATH, "script": "IPPO/ippo_ff_mpe", "config": {...}}`; `config` has settings of
the checkout's `baselines/*/config/`. Metrics that the scripts log stay in memory. The return of a round is
the mean over the last 8 entries of the log.
"""

import collections
import importlib
from typing import Any

import wandb

from bench.peers.drivers.scripts import add_to_path, compile_script


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training; returns what `bench.peers.serve` needs."""
    folder, name = config["script"].split("/")
    add_to_path(config, "baselines", folder)
    logged: collections.deque[dict[str, Any]] = collections.deque(maxlen=8)
    wandb.log = lambda metrics, **_: logged.append(metrics)
    script = importlib.import_module(name)
    names = "returns", "returned_episode_returns"  # a script logs the return by one of these names
    return compile_script(
        script, config["config"], lambda _: [next(m[name] for name in names if name in m) for m in logged]
    )
