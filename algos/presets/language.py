"""Presets for language models: small networks from scratch on text tasks, and checkpoints (`--model`)."""

from typing import Any

from algos.presets.entry import Entry

_SOURCE = "bench/rlhf_learning.py at commit ccff2ff9, chosen on seed 100; docs/rlhf.md"
# All algorithms use one network, so that one algorithm can start from another's result.
_NETWORK: dict[str, Any] = {"hidden_size": 64}
# 32 responses fit into a core's cache: gradients take less than half the time, with equal results.
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
        "temperature": 0.6,  # at first a third of greedy samples is right, and most tokens are uncertain
        "warmup": 10,
        "anneal_learning_rate": True,
        "total_steps": 256_000,
    },
    on_cpu=_IN_CACHE,
)
# Late in training, few problems have responses with different rewards, and other problems have no gradient.
# Sampling four times as many responses as are learned from takes a third of the gradient's time.
_GRPO_ADDITION = _GRPO.with_changes(
    "addition's own, chosen on seed 29",
    num_prompts=16,
    group_size=16,
    dynamic_sampling=4,
    entropy_coefficient=0.01,
    entropy_cap=0.3,
    learning_rate=6e-4,  # from an initial accuracy of a quarter, 1e-3 collapsed on one seed of four
    temperature=1.0,
    total_steps=2_304_000,
)
# In Countdown the right form earns 0.1; divided by a group's deviation, that would equal a right answer.
_GRPO_COUNTDOWN = _GRPO.with_changes(
    "countdown's own, chosen on seeds 100 and 101",
    scale="none",
    num_prompts=32,
    group_size=16,  # a right answer to a hard problem is rare
    entropy_coefficient=0.05,
    entropy_cap=0.5,  # without a cap, seed 2 had collapsed by iteration 67
    learning_rate=3e-4,
    temperature=1.0,
    total_steps=1_843_200,
)
_NETWORK_ALONE = Entry(_SOURCE, _NETWORK)

# Pretrained networks of 100M parameters and more need step sizes 100 to 1,000 times smaller. Unlike those
# above, these settings are published ones, and were not tried here.
_TRL = "defaults of TRL 1.16"
_ON_CPU: dict[str, Any] = {"dtype": "float32"}  # CPUs have no bfloat16 units
_CHECKPOINT: dict[str, Any] = {
    "dtype": "bfloat16",
    "remat": True,
    "micro_batch": 8,
    "anneal_learning_rate": True,
}
_ADAPTERS_SOURCE = (
    "ten times the step size for adapters and alpha 32: Schulman et al. 2025, LoRA Without Regret"
)


def _checkpoint(source: str, learning_rate: float, **values: Any) -> dict[str, Entry]:
    """The entries for training a whole checkpoint, and for training adapters of it."""
    whole = Entry(source, {**_CHECKPOINT, "learning_rate": learning_rate, **values}, on_cpu=_ON_CPU)
    # Rounded, because the last digit of the product is a rounding error.
    adapters: dict[str, Any] = {"learning_rate": float(f"{10 * learning_rate:.6g}"), "lora_alpha": 32.0}
    return {"checkpoint": whole, "checkpoint-lora": whole.with_changes(_ADAPTERS_SOURCE, **adapters)}


# By class name of the algorithm, then by key: a family, an environment, or a pattern (`algos.presets`).
PRESETS: dict[str, dict[str, Entry]] = {
    "SFT": {
        "text:*": _SFT,
        **_checkpoint(f"{_TRL}'s SFTConfig; batches of 32, with which adapters lose nothing", 2e-5),
    },
    "GRPO": {
        "text:*": _GRPO,
        "text:addition": _GRPO_ADDITION,
        "text:countdown": _GRPO_COUNTDOWN,
        **_checkpoint(
            f"{_TRL}'s GRPOConfig (verl 0.9 has the same step size)",
            1e-6,
            group_size=8,
            kl_coefficient=0.0,
            temperature=1.0,
        ),
    },
    "DPO": {
        "text:*": _NETWORK_ALONE,
        **_checkpoint(f"{_TRL}'s DPOConfig (arXiv 2305.18290, appendix B, has the same step size)", 1e-6),
    },
    "PPORLHF": {
        "text:*": _NETWORK_ALONE,
        **_checkpoint(
            "verl 0.9's ppo_trainer.yaml",
            1e-6,
            anneal_learning_rate=False,
            critic_learning_rate=1e-5,
            num_epochs=1,
            num_minibatches=4,
            clip_value=0.5,
            gae_lambda=1.0,
            kl_coefficient=1e-3,
        ),
    },
    "RewardModel": {
        "text:*": _NETWORK_ALONE,
        **_checkpoint("arXiv 2203.02155, appendix C.2", 9e-6, num_prompts=64),
    },
}
