"""Language models on tasks of text that are generated: small networks that begin from nothing."""

from typing import Any

from algos.presets.entry import Entry

_SOURCE = "bench/rlhf_learning.py, chosen on seed 100; docs/rlhf.md"
# Of one network, so that what one algorithm has learned is what the next begins with. As few responses at
# once as a core keeps in its cache: gradients take less than half the time, and are the same.
_NETWORK: dict[str, Any] = {"hidden_size": 64}
_IN_CACHE: dict[str, Any] = {"micro_batch": 32}

_SFT = Entry(
    _SOURCE,
    {**_NETWORK, "num_prompts": 128, "learning_rate": 2e-3, "warmup": 20, "total_steps": 256_000},
    on_cpu=_IN_CACHE,
)
_GRPO = Entry(
    _SOURCE,
    {
        **_NETWORK,
        "num_prompts": 64,
        "group_size": 8,
        "num_minibatches": 4,
        "kl_coefficient": 0.0,
        "clip_high": 0.28,
        "old_log_prob": "actor",
        "temperature": 0.6,  # a start that is right in a third with the most likely tokens is unsure of most
        "warmup": 10,
        "anneal_learning_rate": True,
        "total_steps": 256_000,
    },
    on_cpu=_IN_CACHE,
)
_OTHERS = Entry(_SOURCE, _NETWORK)

PRESETS: dict[str, dict[str, Entry]] = {
    "SFT": {"text:*": _SFT},
    "GRPO": {"text:*": _GRPO},
    "DPO": {"text:*": _OTHERS},
    "PPORLHF": {"text:*": _OTHERS},
    "RewardModel": {"text:*": _OTHERS},
}
