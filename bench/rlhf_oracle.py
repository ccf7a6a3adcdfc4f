"""Writes TRL's losses of random arrays to `tests/rlhf/trl_losses.json`; tests compare fdg's losses with them.

It runs in an environment with torch, transformers and trl 1.16.0, and imports nothing of fdg:

    build/venvs/language/bin/python bench/rlhf_oracle.py

Each case calls the loss method of one of TRL's trainers, on an object that has only the trainer's
settings, and on a model that returns fixed log-probabilities. The file has the loss and its gradient with
respect to the log-probabilities.
"""

import collections
import json
import pathlib
import types

import numpy as np
import torch
import trl
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

OUT = pathlib.Path(__file__).parents[1] / "tests" / "rlhf" / "trl_losses.json"
RESPONSES, TOKENS = 6, 5  # number of responses, and of tokens of a response with padding
LENGTHS = (5, 3, 1, 4, 5, 2)  # tokens of each response


def make_arrays() -> dict[str, np.ndarray]:
    """Inputs of all cases: log-probabilities of four policies, advantages, a mask; logits for SFT."""
    rng = np.random.default_rng(0)
    log_prob = -rng.exponential(1.0, (RESPONSES, TOKENS))
    arrays = {
        "log_prob": log_prob,
        "old": log_prob + rng.normal(0, 0.3, (RESPONSES, TOKENS)),
        "sampled": log_prob + rng.normal(0, 0.5, (RESPONSES, TOKENS)),
        "reference": log_prob + rng.normal(0, 0.4, (RESPONSES, TOKENS)),
        "advantage": rng.normal(0, 1, RESPONSES),
        "mask": np.arange(TOKENS)[None] < np.array(LENGTHS)[:, None],
        "logits": rng.normal(0, 1, (2, 4, 7)),
    }
    return {  # rounded to float32, so that fdg reads the same values
        name: x if x.dtype == bool else x.astype(np.float32).astype(np.float64) for name, x in arrays.items()
    }


class FakeAccelerator:
    """The accelerator of one process."""

    num_processes = 1
    sync_gradients = True
    device = "cpu"

    def reduce(self, x, reduction):
        return x

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def unwrap_model(self, model):
        return model


def fake_trainer_of(log_prob, **settings):
    """An object with the attributes of a trainer that `_compute_loss` reads."""
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    args |= {name: settings.pop(name) for name in tuple(settings) if name in args}
    defaults = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, "use_vllm": False,
        "vllm_importance_sampling_correction": False, "current_gradient_accumulation_steps": 1,
        "max_completion_length": TOKENS, "_entropy_bonus_enabled": False, "aux_loss_enabled": False,
    }  # fmt: skip
    return types.SimpleNamespace(
        **{**defaults, **settings},
        args=types.SimpleNamespace(**args),
        model=types.SimpleNamespace(training=True),
        accelerator=FakeAccelerator(),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, torch.zeros_like(log_prob), None),
    )


def inputs(batch) -> dict:
    mask = torch.tensor(batch["mask"]).double()
    return {
        "prompt_ids": torch.ones((RESPONSES, 2), dtype=torch.long),
        "prompt_mask": torch.ones((RESPONSES, 2)),
        "completion_ids": torch.ones((RESPONSES, TOKENS), dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantage"]),
        "old_per_token_logps": torch.tensor(batch["old"]),
        "ref_per_token_logps": torch.tensor(batch["reference"]),
        "num_items_in_batch": mask.sum(),
    }


def loss_and_gradient(compute, log_prob) -> dict:
    loss = compute(log_prob)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": log_prob.grad.tolist()}


def grpo(batch, importance=None, **settings):
    """GRPO; `importance` has importance weights of tokens (None: all 1)."""

    def compute(log_prob):
        ratio_entry = {} if importance is None else {"importance_sampling_ratio": torch.tensor(importance)}
        return GRPOTrainer._compute_loss(
            fake_trainer_of(log_prob, **settings), None, {**inputs(batch), **ratio_entry}
        )

    return loss_and_gradient(compute, torch.tensor(batch["log_prob"], requires_grad=True))


def rloo(batch):
    mask = torch.tensor(batch["mask"]).double()

    def compute(log_prob):
        old = (torch.tensor(batch["old"]) * mask).sum(1)
        return RLOOTrainer._compute_loss(fake_trainer_of(log_prob), None, {**inputs(batch), "old_logps": old})

    return loss_and_gradient(compute, torch.tensor(batch["log_prob"], requires_grad=True))


def dpo(arrays, **settings):
    """DPO, where the first half of the responses is chosen and the second rejected."""
    mask = np.concatenate([np.zeros((RESPONSES, 1), bool), arrays["mask"]], axis=1)
    reference = torch.tensor(np.where(arrays["mask"], arrays["reference"], 0.0))

    def compute(log_prob):
        masked_log_prob = torch.where(torch.tensor(arrays["mask"]), log_prob, 0.0)

        class Model:
            training = True

            def __call__(self, **_):
                zeros = torch.zeros((RESPONSES, TOKENS))
                return types.SimpleNamespace(
                    log_probs=masked_log_prob, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
                )

        reference_sums = reference.sum(1).chunk(2)
        defaults = {
            "ld_alpha": None, "precompute_ref_logps": True, "f_divergence_type": "reverse_kl",
            "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1, "label_smoothing": 0.0,
            "use_weighting": False, "aux_loss_enabled": False, "use_liger_kernel": False,
        }  # fmt: skip
        fake_trainer = types.SimpleNamespace(
            **{**defaults, **settings},
            accelerator=FakeAccelerator(),
            model=Model(),
            _metrics={"train": collections.defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            args=types.SimpleNamespace(gradient_checkpointing_kwargs=None, use_liger_kernel=False),
        )
        batch = {
            "input_ids": torch.ones((RESPONSES, TOKENS + 1), dtype=torch.long),
            "attention_mask": torch.ones((RESPONSES, TOKENS + 1), dtype=torch.long),
            "completion_mask": torch.tensor(mask).long(),
            "ref_chosen_logps": reference_sums[0],
            "ref_rejected_logps": reference_sums[1],
        }
        return DPOTrainer._compute_loss(fake_trainer, Model(), batch, return_outputs=False)

    return loss_and_gradient(compute, torch.tensor(arrays["log_prob"], requires_grad=True))


def sft(batch):
    labels = np.array([[1, 2, 3, -100], [-100, 0, 6, 5]])
    logits = torch.tensor(batch["logits"], requires_grad=True)
    loss = ForCausalLMLoss(logits, torch.tensor(labels), vocab_size=7)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": logits.grad.tolist(), "labels": labels.tolist()}


def main() -> None:
    batch = make_arrays()
    mask = batch["mask"]
    ratio = np.exp(np.where(mask, batch["old"] - batch["sampled"], 0.0))
    vllm = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    cases = {
        **{kind: grpo(batch, loss_type=kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo")},
        "grpo with kl": grpo(batch, loss_type="grpo", beta=0.04),
        "dapo with kl": grpo(batch, loss_type="dapo", beta=0.1),
        "grpo with delta": grpo(batch, loss_type="grpo", delta=1.4),
        "gspo": grpo(
            batch, loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04
        ),
        "grpo, truncated weights": grpo(batch, np.minimum(ratio, 1.5), loss_type="grpo", beta=0.04, **vllm),
        "grpo, masked weights": grpo(
            batch, np.where((ratio > 1.5) | (ratio < 1 / 1.5), 0.0, ratio), loss_type="grpo", **vllm
        ),
        "rloo": rloo(batch),
        **{f"dpo {kind}": dpo(batch, loss_types=[kind]) for kind in ("sigmoid", "hinge", "ipo")},
        "dpo robust": dpo(batch, loss_types=["robust"], label_smoothing=0.1),
        "sft": sft(batch),
    }
    arrays = {name: x.tolist() for name, x in batch.items()}
    OUT.write_text(json.dumps({"trl": trl.__version__, "given": arrays, "cases": cases}) + "\n")
    print(f"{len(cases)} cases to {OUT}")


if __name__ == "__main__":
    main()
