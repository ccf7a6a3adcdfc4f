"""Losses and their gradients, compared with those of TRL 1.16's trainers on the same tensors.

At commit ccff2ff9, `bench/rlhf_oracle.py` called TRL, and wrote `trl_losses.json`.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.rlhf import losses
from algos.rlhf import objective as core
from algos.rlhf.variants import objective

_FILE = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
_GIVEN = {name: np.array(x) for name, x in _FILE["given"].items()}
_MASK = _GIVEN["mask"]
_MAX_LENGTH = _MASK.shape[1]


def _group_relative_loss(values, log_prob, advantage=None):
    """The loss of an objective, computed as in `algos.rlhf.group_relative`."""
    settings = objective(**{"clip_high": 0.28, "kl_coefficient": 0.0, **values})
    mask = jnp.asarray(_MASK)
    old, sampled, reference = (jnp.asarray(_GIVEN[n], jnp.float32) for n in ("old", "sampled", "reference"))
    advantage = jnp.asarray(_GIVEN["advantage"], jnp.float32)[:, None] * mask
    ratio = core.log_ratio(log_prob, old, mask, settings.ratio_level)
    cost = settings.cost(log_prob, ratio, advantage, mask)
    cost = cost * losses.correction(sampled, old, mask, settings.correction, settings.correction_cap)
    kl = core.divergence(log_prob, reference, settings.kl_estimator)
    weight = core.token_weights(mask, settings.aggregation, _MAX_LENGTH, settings.count_empty)
    return jnp.sum(weight * (cost + settings.kl_coefficient * kl))


def _dpo_loss(preference, log_prob, label_smoothing=0.0):
    mask, reference = jnp.asarray(_MASK), jnp.asarray(_GIVEN["reference"], jnp.float32)
    log_ratio = jnp.sum(jnp.where(mask, log_prob - reference, 0.0), axis=1)
    if preference == "ipo":
        log_ratio = log_ratio / jnp.sum(mask, axis=1)
    chosen, rejected = jnp.split(log_ratio, 2)
    return jnp.mean(losses.preference_loss(chosen - rejected, 0.1, preference, label_smoothing))


_GROUP_RELATIVE = {
    "grpo": {},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "constant"},
    "grpo with kl": {"kl_coefficient": 0.04},
    "dapo with kl": {"kl_coefficient": 0.1, "aggregation": "token_mean"},
    "grpo with delta": {"dual_clip": 1.4},
    "gspo": {"ratio_level": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    "grpo, truncated weights": {
        "correction": "truncate_token",
        "correction_cap": 1.5,
        "kl_coefficient": 0.04,
    },
    "grpo, masked weights": {"correction": "mask_token", "correction_cap": 1.5},
    "rloo": {"ratio_level": "trajectory"},
}
_DPO = {
    "dpo sigmoid": ("sigmoid", 0.0),
    "dpo hinge": ("hinge", 0.0),
    "dpo ipo": ("ipo", 0.0),
    "dpo robust": ("robust", 0.1),
}


def _loss(case):
    if case in _DPO:
        kind, smoothing = _DPO[case]
        return lambda log_prob: _dpo_loss(kind, log_prob, smoothing)
    return lambda log_prob: _group_relative_loss(_GROUP_RELATIVE[case], log_prob)


def _matches_trl(case, loss):
    """Whether the value and the gradient of a loss equal TRL's within 1e-5."""
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(_GIVEN["log_prob"], jnp.float32))
    want = _FILE["cases"][case]
    masked_gradient = np.where(_MASK, gradient, 0.0)
    assert np.all(np.isfinite(gradient))
    return np.isclose(value, want["loss"], rtol=0, atol=1e-5) and np.allclose(
        masked_gradient, np.where(_MASK, want["gradient"], 0.0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("case", [*_GROUP_RELATIVE, *_DPO])
def test_loss_and_gradient_match_trl(case):
    assert _matches_trl(case, _loss(case))


def test_all_stored_cases_are_compared():
    assert set(_FILE["cases"]) == {*_GROUP_RELATIVE, *_DPO, "sft"}


def test_sft_loss_matches_trl():
    labels = np.array(_FILE["cases"]["sft"]["labels"])
    tokens, mask = labels[:, 1:], labels[:, 1:] >= 0

    def loss(logits):
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        log_prob = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
        return -jnp.sum(core.token_weights(jnp.asarray(mask), "token_mean", 3) * log_prob)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(_GIVEN["logits"], jnp.float32))
    np.testing.assert_allclose(value, _FILE["cases"]["sft"]["loss"], atol=1e-5)
    np.testing.assert_allclose(gradient, _FILE["cases"]["sft"]["gradient"], atol=1e-5)
