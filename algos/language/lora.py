"""Low-rank adapters (LoRA, arXiv 2106.09685) over a base that is kept once.

Parameters with adapters are `{"base": ..., "adapters": ...}`. An algorithm keeps the two apart in its state:
it trains the adapters, and hands the base on unchanged, so that it is never a product that crosses between
groups of devices; and the base alone is the reference policy.
"""

from typing import Any

import numpy as np

from algos.language.config import DecoderConfig
from algos.language.layers import Weights


def split(parameters: Weights) -> tuple[Weights, Weights]:
    """(what is trained, what is not): adapters and their base; all of a network without adapters, and {}."""
    if "base" in parameters:
        return parameters["adapters"], parameters["base"]
    return parameters, {}


def join(trained: Weights, frozen: Weights) -> Weights:
    """The parameters of what `split` made."""
    return {"base": frozen, "adapters": trained} if frozen else trained


def base(parameters: Weights) -> Weights:
    """The network without its adapters."""
    return parameters.get("base", parameters)


def merged(config: DecoderConfig, parameters: Weights) -> Weights:
    """One network that computes the same: `kernel + lora_alpha / lora_rank * a b`, on the host (eq. 3)."""
    if "base" not in parameters:
        return parameters
    scale = config.lora_alpha / config.lora_rank
    network, adapters = parameters["base"], parameters["adapters"]["layers"]
    blocks: dict[str, Any] = {}
    for i, block in network["layers"].items():
        new = dict(block)
        for part, each in adapters.get(i, {}).items():
            new[part] = dict(block[part])
            for name, adapter in each.items():
                linear = block[part][name]
                kernel = np.asarray(linear["kernel"])
                change = np.asarray(adapter["a"], np.float64) @ np.asarray(adapter["b"], np.float64)
                new[part][name] = {**linear, "kernel": (kernel + scale * change).astype(kernel.dtype)}
        blocks[i] = new
    return {**network, "layers": blocks}
