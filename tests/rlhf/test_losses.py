"""Losses and advantages, compared with values computed by hand; `algos/rlhf/` cites their sources."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.rlhf import losses, variants
from algos.rlhf import objective as core
from algos.rlhf.responses import Responses
from algos.rlhf.speaker import prompt_up_to_policy
from algos.rlhf.variants import CONVENTIONS, VARIANTS, objective
from envs.text import Prompts
from fdg.errors import FdgError

MASK = jnp.array([[True, True, False], [True, True, True]])
LOG = jnp.log


def agree(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_token_weights():
    agree(core.token_weights(MASK, "token_mean", 4), [[0.2, 0.2, 0], [0.2, 0.2, 0.2]])
    agree(core.token_weights(MASK, "sequence_mean", 4), [[1 / 4, 1 / 4, 0], [1 / 6, 1 / 6, 1 / 6]])
    agree(core.token_weights(MASK, "sequence_sum", 4), [[0.5, 0.5, 0], [0.5, 0.5, 0.5]])
    agree(core.token_weights(MASK, "constant", 4), [[1 / 8, 1 / 8, 0], [1 / 8, 1 / 8, 1 / 8]])


def test_count_empty():
    mask = MASK.at[0].set(False)
    agree(core.token_weights(mask, "sequence_mean", 3)[1], [1 / 6] * 3)
    agree(core.token_weights(mask, "sequence_mean", 3, count_empty=False)[1], [1 / 3] * 3)
    single = jnp.array([[True, False, False], [True, True, True]])  # a response of one token counts
    agree(core.token_weights(single, "sequence_mean", 3, count_empty=False)[0], [1 / 2, 0, 0])
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
        empty = core.token_weights(jnp.zeros((2, 3), bool), aggregation, 3, count_empty=False)
        assert float(jnp.sum(empty)) == 0.0


def test_ratio_levels():
    # Probabilities are doubled and halved, then quadrupled; values outside the mask are arbitrary.
    new = LOG(jnp.array([[0.4, 0.1, 0.9], [0.4, 0.5, 0.5]]))
    old = LOG(jnp.array([[0.2, 0.2, 0.1], [0.1, 0.5, 0.5]]))
    ratio = {level: jnp.exp(core.log_ratio(new, old, MASK, level)) for level in _LEVELS}
    agree(ratio["token"], [[2, 0.5, 1], [4, 1, 1]])
    agree(ratio["sequence"], [[1, 1, 1], [4 ** (1 / 3)] * 3])  # GSPO, equation 7: the geometric mean
    agree(ratio["sequence_token"], ratio["sequence"])
    agree(ratio["trajectory"], [[1, 1, 1], [4, 4, 4]])


_LEVELS = ("token", "sequence", "sequence_token", "trajectory")


def test_gradients_of_gspo_and_gspo_token():
    new, old = LOG(jnp.array([[0.4, 0.2]])), LOG(jnp.array([[0.1, 0.2]]))
    mask = jnp.ones((1, 2), bool)

    def gradient(level):
        return jax.jacobian(lambda x: jnp.exp(core.log_ratio(x, old, mask, level))[0])(new)[:, 0]

    # s = sqrt(4) = 2. Equation 10: each token's derivative is s / 2. Equation 17: s by its own token, else 0.
    agree(gradient("sequence"), [[1, 1], [1, 1]])
    agree(gradient("sequence_token"), [[2, 0], [0, 2]])


def test_clipped_surrogate():
    ratio = jnp.array([[0.5, 0.9, 1.5, 0.5, 1.1, 5.0]])
    advantage = jnp.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    # A > 0: min(rA, clip(r)A) = 1, 1.8, 1.28 * 2. A < 0: -1.6 (clipped), -2.2, -10, and with a dual clip of
    # 3, -6 in place of -10.
    agree(core.surrogate(LOG(ratio), advantage, 0.2, 0.28), [[-1, -1.8, -2.56, 1.6, 2.2, 10]])
    agree(core.surrogate(LOG(ratio), advantage, 0.2, 0.28, 3.0), [[-1, -1.8, -2.56, 1.6, 2.2, 6]])
    assert core.clipped(LOG(ratio), advantage, 0.2, 0.28).tolist() == [
        [False, False, True, True, False, False]
    ]


def test_cispo():
    # CISPO: -clip(r) A log pi, with derivative -clip(r) A by log pi; clip(r) = 0.5, 5, 5 and A = 2, 2, -3.
    ratio, advantage = jnp.array([[0.5, 5.0, 8.0]]), jnp.array([[2.0, 2.0, -3.0]])
    new = LOG(jnp.array([[0.5, 0.25, 0.1]]))

    def cost(log_prob):
        log_ratio = LOG(ratio) + log_prob - jax.lax.stop_gradient(log_prob)
        return objective("cispo").cost(log_prob, log_ratio, advantage, jnp.ones((1, 3), bool))

    agree(cost(new), [[-math.log(0.5), -10 * math.log(0.25), 15 * math.log(0.1)]])
    agree(jax.grad(lambda x: cost(x).sum())(new), [[-1, -10, 15]])


def test_sapo():
    advantage, ones = jnp.array([[2.0, -2.0]]), jnp.ones((1, 2), bool)

    def gradient(ratio):
        return jax.grad(lambda x: objective("sapo").cost(x, x, advantage, ones).sum())(LOG(ratio))

    agree(gradient(jnp.ones((1, 2))), [[-2, 2]])
    # SAPO, derivative by log pi: 4 s (1 - s) r A, s = sigmoid(tau (r - 1)); tau is 1 for A > 0, else 1.05.
    for ratio in (0.5, 3.0):
        gates = [1 / (1 + math.exp(-tau * (ratio - 1))) for tau in (1.0, 1.05)]
        agree(
            gradient(jnp.full((1, 2), ratio)),
            [[sign * 4 * s * (1 - s) * ratio for s, sign in zip(gates, (-2, 2), strict=True)]],
        )


def test_gmpo():
    log_ratio = jnp.array([[0.9, -0.9, 5.0], [0.3, 0.9, -0.9]])
    advantage = jnp.where(MASK, jnp.array([[2.0], [-1.0]]), 0.0)
    settings = objective("gmpo")
    found = settings.cost(log_ratio, log_ratio, advantage, MASK)
    # A > 0: the minimum, 0.4 and -0.9. A < 0: the maximum, 0.3, 0.9 and -0.4.
    first, second = -2 * math.exp((0.4 - 0.9) / 2), math.exp((0.3 + 0.9 - 0.4) / 3)
    agree(found, [[first, first, 0], [second] * 3])
    assert settings.clipped(log_ratio, advantage).tolist() == [[True, False, False], [False, False, True]]
    gradient = jax.grad(lambda x: (settings.cost(x, x, advantage, MASK) / MASK.sum(1, keepdims=True)).sum())
    agree(gradient(log_ratio), [[0, first / 2, 0], [second / 3, second / 3, 0]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "gmpo", "ratio_level": "sequence"}, "a geometric mean is over ratios of tokens"),
        ({"variant": "sapo", "dual_clip": 3.0}, "dual_clip=3.0 has no effect with surrogate='gate'"),
        ({"variant": "sapo", "gate_negative": 0.0}, "gate_negative=0.0: it must be above zero"),
    ],
)
def test_fields_that_a_surrogate_refuses(fields, message):
    with pytest.raises(FdgError, match=message):
        algos.GRPO(env=envs.make("text:sorting"), **fields)


def test_kl_estimators():
    new, reference = LOG(jnp.array([[0.5, 0.1]])), LOG(jnp.array([[0.25, 0.2]]))
    two = math.log(2)
    agree(core.divergence(new, reference, "k1"), [[two, -two]])
    agree(core.divergence(new, reference, "k2"), [[two**2 / 2] * 2])
    agree(core.divergence(new, reference, "k3"), [[0.5 - 1 + two, 2 - 1 - two]])


def test_kl_estimators_are_unbiased():
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    exact = np.sum(policy * np.log(policy / reference))
    new, then = LOG(jnp.asarray(policy))[None], LOG(jnp.asarray(reference))[None]
    for kind in ("k1", "k3"):
        agree(np.sum(policy * np.asarray(core.divergence(new, then, kind))[0]), exact)


def test_importance_weights():
    sampled, new = (
        LOG(jnp.array([[0.1, 0.4, 0.9], [0.2, 0.2, 0.2]])),
        LOG(jnp.array([[0.4, 0.2, 0.1], [0.2] * 3])),
    )
    weights = {kind: losses.correction(sampled, new, MASK, kind, 1.5) for kind in _CORRECTIONS}
    agree(weights["none"], jnp.ones((2, 3)))
    agree(weights["truncate_token"][0, :2], [1.5, 0.5])
    agree(weights["mask_token"][0, :2], [0.0, 0.0])
    agree(weights["truncate_sequence"][:, 0], [1.5, 1.0])  # 4 * 0.5 = 2, and 1
    agree(weights["mask_sequence"][:, 0], [0.0, 1.0])
    gradient = jax.grad(lambda x: losses.correction(sampled, x, MASK, "truncate_token", 9.0).sum())(new)
    assert not np.any(gradient)


_CORRECTIONS = ("none", "truncate_token", "mask_token", "truncate_sequence", "mask_sequence")


def test_value_clip():
    value, old, target = (jnp.array([[x]]) for x in (1.0, 0.0, 2.0))
    agree(losses.value_error(value, old, target, None), [[0.5]])
    agree(losses.value_error(value, old, target, 0.2), [[0.5 * 1.8**2]])


def test_entropy_bonus_with_cap():
    entropy = jnp.array([[0.2, 0.5, 0.8]])
    agree(losses.entropy_bonus(entropy, None), entropy)
    agree(losses.entropy_bonus(entropy, 0.6), [[0.2, 0.5, 0.6]])
    agree(jax.grad(lambda x: losses.entropy_bonus(x, 0.6).sum())(entropy), [[1.0, 1.0, 0.0]])


def test_preference_losses():
    margin = jnp.array([2.0, -1.0])
    sigmoid = [math.log(1 + math.exp(-0.2)), math.log(1 + math.exp(0.1))]
    other = [math.log(1 + math.exp(0.2)), math.log(1 + math.exp(-0.1))]
    agree(losses.preference_loss(margin, 0.1), sigmoid)
    agree(
        losses.preference_loss(margin, 0.1, label_smoothing=0.25),
        [0.75 * a + 0.25 * b for a, b in zip(sigmoid, other, strict=True)],
    )
    agree(losses.preference_loss(margin, 0.1, "hinge"), [0.8, 1.1])
    agree(losses.preference_loss(margin, 0.1, "ipo"), [9.0, 36.0])
    agree(
        losses.preference_loss(margin, 0.1, "robust", 0.25),
        [(0.75 * a - 0.25 * b) / 0.5 for a, b in zip(sigmoid, other, strict=True)],
    )


REWARD = jnp.array([1.0, 0.0, 0.0, 3.0, 5.0, 1.0])  # two groups of three


def test_group_advantages():
    advantages = lambda *settings: core.group_advantage(REWARD, 3, *settings)  # noqa: E731
    agree(advantages("group", "none", 0.0, True), [2 / 3, -1 / 3, -1 / 3, 0, 2, -2])
    agree(advantages("leave_one_out", "none", 0.0, True), [1, -0.5, -0.5, 0, 3, -3])
    agree(advantages("none", "none", 0.0, True), REWARD)
    small, large = math.sqrt(1 / 3) + 0.1, 2 + 0.1  # standard deviations over n - 1, plus the guard
    agree(
        advantages("group", "group", 0.1, True),
        [2 / 3 / small, -1 / 3 / small, -1 / 3 / small, 0, 2 / large, -2 / large],
    )
    agree(advantages("group", "group", 0.0, False)[4], 2 / math.sqrt(8 / 3))
    agree(advantages("group", "batch", 0.0, True)[4], 2 / np.std(np.asarray(REWARD), ddof=1))


def test_equal_rewards_have_zero_advantage():
    """In float32 the mean of 0.1 is not exactly 0.1; divided by a guard of 1e-6, the error would matter."""
    reward, none, mask = jnp.full(6, 0.1), jnp.zeros((6, 2)), jnp.ones((6, 2), bool)
    assert float(jnp.max(jnp.abs(reward - jnp.mean(reward)))) > 0
    for variant in VARIANTS:
        found = objective(variant, guard=1e-6).advantage(reward, none, none, mask, 3)
        assert float(jnp.max(jnp.abs(found))) == 0.0, variant
    other = core.group_advantage(jnp.repeat(jnp.array([0.1, 0.7]), 3), 3, "group", "batch", 0.0, True)
    assert float(jnp.max(jnp.abs(other))) == 0.0


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_equal_rewards_have_zero_advantage_without_guard(scale):
    found = objective("grpo", scale=scale, guard=0.0).advantage(
        jnp.ones(6), jnp.zeros((6, 2)), jnp.zeros((6, 2)), jnp.ones((6, 2), bool), 3
    )
    assert float(jnp.max(jnp.abs(found))) == 0.0


def test_kl_within_rounding_is_zero():
    new, other = jnp.array([[-2.0, -2.0]]), jnp.array([[-2.0 + 1e-6, -2.1]])
    for kind, expected in (("k1", 1.0), ("k2", 0.0), ("k3", 0.0)):
        value = core.divergence(new, other, kind)
        gradient = jax.grad(lambda x, kind=kind: jnp.sum(core.divergence(x, other, kind)))(new)
        assert float(value[0, 0]) == 0.0 and float(gradient[0, 0]) == expected
        assert abs(float(value[0, 1])) > 1e-3 and abs(float(gradient[0, 1])) > 0.05


def test_overlong_penalty():
    agree(variants.overlong_penalty(jnp.array([70, 80, 90, 99, 100]), 100, 20), [0, 0, -0.5, -0.95, -1])


def test_returns_and_whitening():
    x = jnp.array([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    agree(variants.reversed_cumsum(x, MASK), [[3, 2, 0], [12, 9, 5]])
    agree(variants.reward_at_end(jnp.array([7.0, 8.0]), MASK), [[0, 7, 0], [0, 0, 8]])
    whitened = variants.whiten(x, MASK)
    deviation = math.sqrt(2.5)
    agree(whitened, [[-2 / deviation, -1 / deviation, 0], [0, 1 / deviation, 2 / deviation]])


def test_token_advantages_skip_tool_tokens():
    reward = jnp.array([[0.0, 9.0, 0.0, 1.0]])
    value = jnp.array([[0.5, 7.0, 0.25, 0.75]])
    mask = jnp.array([[True, False, True, True]])
    advantage, target = variants.token_advantages(reward, value, mask, 1.0, 0.5)
    # TD errors: 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75; each advantage adds half of the next one.
    last, middle = 0.25, 0.5 + 0.125
    first = -0.25 + 0.5 * middle
    agree(advantage, [[first, 0, middle, last]])
    agree(target, [[first + 0.5, 0, middle + 0.25, last + 0.75]])


def test_reinforce_plus_plus():
    settings = objective("reinforce_plus_plus", kl_coefficient=0.5)
    log_prob, reference = jnp.array([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), jnp.zeros((2, 3))
    found = settings.advantage(jnp.array([1.0, 0.0]), log_prob, reference, MASK, 2)
    agree(found, variants.whiten(jnp.array([[1 - 1.5, 1 - 1.0, 0], [-1.5, -1.5, -1.5]]), MASK))


def test_rloo():
    settings = objective("rloo", kl_coefficient=0.5)
    log_prob, reference = jnp.array([[1.0, 1.0, 5.0], [0.0, 0.0, 0.0]]), jnp.zeros((2, 3))
    found = settings.advantage(jnp.array([1.0, 2.0]), log_prob, reference, MASK, 2)
    agree(found, [[-2, -2, 0], [2, 2, 2]])  # 1 - 0.5 * 2 = 0 against 2


def test_precedence_of_conventions_and_fields():
    assert (objective("grpo", "trl").guard, objective("grpo", "verl").dual_clip) == (1e-4, 3.0)
    assert not objective("dapo", "tunix").count_empty
    assert objective("rloo", "tunix").kl_estimator == "k1"
    assert objective("grpo", "verl", dual_clip=5.0, guard=0.5) == objective("grpo", "verl").__class__(
        dual_clip=5.0, guard=0.5, count_empty=False
    )
    assert set(CONVENTIONS) == {"paper", "trl", "verl", "tunix"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "gropo"}, "variant='gropo': it is one of grpo"),
        ({"convention": "openrlhf"}, "it is one of paper, trl, verl, tunix"),
        ({"clip_hihg": 0.3}, "did you mean 'clip_high'?"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(FdgError, match=message.replace("?", r"\?")):
        objective(**arguments)


def test_prompt_up_to_policy():
    masks = (
        jnp.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool),
        jnp.array([[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]], bool),
    )
    tokens = jnp.array([[6, 7, 8, 9, 0], [6, 7, 0, 0, 0]])
    found = prompt_up_to_policy(
        Responses(Prompts(jnp.array([[5], [5]]), jnp.ones((2, 1), bool)), tokens, *masks)
    )
    shown = [row[mask].tolist() for row, mask in zip(found.prompts.tokens, found.prompts.mask, strict=True)]
    assert shown == [[5, 6], [5]]  # and the responses, with the replies of the game between them:
    shown = [row[mask].tolist() for row, mask in zip(found.tokens, found.mask, strict=True)]
    assert shown == [[7, 8, 9], [6, 7]]
