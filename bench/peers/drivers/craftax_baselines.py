"""Craftax_Baselines' `ppo.py`, from a checkout (github.com/MichaelTMatthews/Craftax_Baselines).

Configuration: `{"checkout": PATH, "config": {...}}`, the latter as its command line has it, in capitals. A
return is the mean of the episodes that ended in its last eight updates, with drawn actions.
"""

import collections
import importlib
from typing import Any

from bench.peers.drivers.scripts import compiled, look_in


def prepare(config: dict[str, Any]):
    """Compiles the script's whole training."""
    look_in(config)
    logged: collections.deque[float] = collections.deque(maxlen=8)
    script: Any = importlib.import_module("ppo")
    script.batch_log = lambda step, log, settings: logged.append(float(log["episode_return"]))
    settings = {**config["config"], "DEBUG": True, "USE_WANDB": True}  # else it logs nothing; nothing is sent
    return compiled(script, settings, lambda _: logged)
