"""JaxMARL's baselines, from a checkout (github.com/FLAIROX/JaxMARL); the environments come from the registry.

Configuration: `{"checkout": PATH, "script": "IPPO/ippo_ff_mpe", "config": {...}}`; `config` has settings of
the checkout's `baselines/*/config/`. What the scripts log at each update stays in memory.
"""

import collections
import importlib
from typing import Any

import wandb

from bench.peers.drivers.scripts import compiled, look_in


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training."""
    folder, name = config["script"].split("/")
    look_in(config, "baselines", folder)
    logged: collections.deque[dict[str, Any]] = collections.deque(maxlen=8)
    wandb.log = lambda metrics, **_: logged.append(metrics)
    script = importlib.import_module(name)
    names = "returns", "returned_episode_returns"
    return compiled(
        script, config["config"], lambda _: [next(m[name] for name in names if name in m) for m in logged]
    )
