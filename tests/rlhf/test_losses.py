"""Losses and advantages against numbers worked by hand; where each comes from stands in `algos/rlhf/`."""

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


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_weights_of_tokens():
    same(core.token_weights(MASK, "token_mean", 4), [[0.2, 0.2, 0], [0.2, 0.2, 0.2]])
    same(core.token_weights(MASK, "sequence_mean", 4), [[1 / 4, 1 / 4, 0], [1 / 6, 1 / 6, 1 / 6]])
    same(core.token_weights(MASK, "sequence_sum", 4), [[0.5, 0.5, 0], [0.5, 0.5, 0.5]])
    same(core.token_weights(MASK, "constant", 4), [[1 / 8, 1 / 8, 0], [1 / 8, 1 / 8, 1 / 8]])


def test_a_response_without_tokens_counts_or_does_not():
    mask = MASK.at[0].set(False)
    same(core.token_weights(mask, "sequence_mean", 3)[1], [1 / 6] * 3)
    same(core.token_weights(mask, "sequence_mean", 3, count_empty=False)[1], [1 / 3] * 3)
    single = jnp.array([[True, False, False], [True, True, True]])  # one token is a response as well
    same(core.token_weights(single, "sequence_mean", 3, count_empty=False)[0], [1 / 2, 0, 0])
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
        empty = core.token_weights(jnp.zeros((2, 3), bool), aggregation, 3, count_empty=False)
        assert float(jnp.sum(empty)) == 0.0


def test_ratios_of_tokens_of_responses_and_of_trajectories():
    # Probabilities doubled and halved, then quadrupled; what lies outside the mask is garbage.
    now = LOG(jnp.array([[0.4, 0.1, 0.9], [0.4, 0.5, 0.5]]))
    old = LOG(jnp.array([[0.2, 0.2, 0.1], [0.1, 0.5, 0.5]]))
    ratio = {level: jnp.exp(core.log_ratio(now, old, MASK, level)) for level in _LEVELS}
    same(ratio["token"], [[2, 0.5, 1], [4, 1, 1]])
    same(ratio["sequence"], [[1, 1, 1], [4 ** (1 / 3)] * 3])  # GSPO, equation 7: the geometric mean
    same(ratio["sequence_token"], ratio["sequence"])
    same(ratio["trajectory"], [[1, 1, 1], [4, 4, 4]])


_LEVELS = ("token", "sequence", "sequence_token", "trajectory")


def test_the_gradient_of_gspo_is_the_means_and_that_of_gspo_token_the_tokens():
    now, old = LOG(jnp.array([[0.4, 0.2]])), LOG(jnp.array([[0.1, 0.2]]))
    mask = jnp.ones((1, 2), bool)

    def slope(level):
        return jax.jacobian(lambda x: jnp.exp(core.log_ratio(x, old, mask, level))[0])(now)[:, 0]

    # s = sqrt(4) = 2. Equation 10: each token of the response moves s by s / 2; equation 17: only its own.
    same(slope("sequence"), [[1, 1], [1, 1]])
    same(slope("sequence_token"), [[2, 0], [0, 2]])


def test_the_clipped_objective():
    ratio = jnp.array([[0.5, 0.9, 1.5, 0.5, 1.1, 5.0]])
    advantage = jnp.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    # Above: min(rA, clip(r)A) = 1, 1.8, 1.28 * 2; below: -1.6 (clipped), -2.2, -10, which a dual clip of 3
    # makes -6.
    same(core.surrogate(LOG(ratio), advantage, 0.2, 0.28), [[-1, -1.8, -2.56, 1.6, 2.2, 10]])
    same(core.surrogate(LOG(ratio), advantage, 0.2, 0.28, 3.0), [[-1, -1.8, -2.56, 1.6, 2.2, 6]])
    assert core.clipped(LOG(ratio), advantage, 0.2, 0.28).tolist() == [
        [False, False, True, True, False, False]
    ]


def test_clipped_weights_have_no_gradient_and_every_token_keeps_one():
    # CISPO: -clip(r) A log pi, whose slope by log pi is -clip(r) A: 0.5 * 2, 5 * 2 and 8 -> 5 times -3.
    ratio, advantage = jnp.array([[0.5, 5.0, 8.0]]), jnp.array([[2.0, 2.0, -3.0]])
    now = LOG(jnp.array([[0.5, 0.25, 0.1]]))

    def cost(log_prob):
        log_ratio = LOG(ratio) + log_prob - jax.lax.stop_gradient(log_prob)
        return objective("cispo").cost(log_prob, log_ratio, advantage, jnp.ones((1, 3), bool))

    same(cost(now), [[-math.log(0.5), -10 * math.log(0.25), 15 * math.log(0.1)]])
    same(jax.grad(lambda x: cost(x).sum())(now), [[-1, -10, 15]])


def test_a_gate_is_the_policy_gradient_at_ratio_one_and_fades_on_both_sides():
    advantage, ones = jnp.array([[2.0, -2.0]]), jnp.ones((1, 2), bool)

    def slope(ratio):
        return jax.grad(lambda x: objective("sapo").cost(x, x, advantage, ones).sum())(LOG(ratio))

    same(slope(jnp.ones((1, 2))), [[-2, 2]])
    # SAPO, by log pi: 4 s (1 - s) r A, with s = sigmoid(tau (r - 1)); tau 1 above zero and 1.05 below.
    for ratio in (0.5, 3.0):
        gates = [1 / (1 + math.exp(-tau * (ratio - 1))) for tau in (1.0, 1.05)]
        same(
            slope(jnp.full((1, 2), ratio)),
            [[sign * 4 * s * (1 - s) * ratio for s, sign in zip(gates, (-2, 2), strict=True)]],
        )


def test_a_geometric_mean_of_ratios_clipped_by_their_logarithms():
    log_ratio = jnp.array([[0.9, -0.9, 5.0], [0.3, 0.9, -0.9]])
    advantage = jnp.where(MASK, jnp.array([[2.0], [-1.0]]), 0.0)
    wanted = objective("gmpo")
    found = wanted.cost(log_ratio, log_ratio, advantage, MASK)
    # Above zero the least counts: 0.4 and -0.9; below zero the most: 0.3, 0.9 and -0.4.
    first, second = -2 * math.exp((0.4 - 0.9) / 2), math.exp((0.3 + 0.9 - 0.4) / 3)
    same(found, [[first, first, 0], [second] * 3])
    assert wanted.clipped(log_ratio, advantage).tolist() == [[True, False, False], [False, False, True]]
    slope = jax.grad(lambda x: (wanted.cost(x, x, advantage, MASK) / MASK.sum(1, keepdims=True)).sum())
    same(slope(log_ratio), [[0, first / 2, 0], [second / 3, second / 3, 0]])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"variant": "gmpo", "ratio_level": "sequence"}, "a geometric mean is over ratios of tokens"),
        ({"variant": "sapo", "dual_clip": 3.0}, "dual_clip=3.0 has no effect with surrogate='gate'"),
        ({"variant": "sapo", "gate_negative": 0.0}, "gate_negative=0.0: it must be above zero"),
    ],
)
def test_values_that_a_surrogate_does_not_take(values, says):
    with pytest.raises(FdgError, match=says):
        algos.GRPO(env=envs.make("text:sorting"), **values)


def test_divergences():
    now, reference = LOG(jnp.array([[0.5, 0.1]])), LOG(jnp.array([[0.25, 0.2]]))
    two = math.log(2)
    same(core.divergence(now, reference, "k1"), [[two, -two]])
    same(core.divergence(now, reference, "k2"), [[two**2 / 2] * 2])
    same(core.divergence(now, reference, "k3"), [[0.5 - 1 + two, 2 - 1 - two]])


def test_the_estimators_have_the_divergence_as_their_mean():
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    exact = np.sum(policy * np.log(policy / reference))
    now, then = LOG(jnp.asarray(policy))[None], LOG(jnp.asarray(reference))[None]
    for kind in ("k1", "k3"):
        same(np.sum(policy * np.asarray(core.divergence(now, then, kind))[0]), exact)


def test_importance_weights():
    drawn, now = (
        LOG(jnp.array([[0.1, 0.4, 0.9], [0.2, 0.2, 0.2]])),
        LOG(jnp.array([[0.4, 0.2, 0.1], [0.2] * 3])),
    )
    weights = {kind: losses.correction(drawn, now, MASK, kind, 1.5) for kind in _CORRECTIONS}
    same(weights["none"], jnp.ones((2, 3)))
    same(weights["truncate_token"][0, :2], [1.5, 0.5])
    same(weights["mask_token"][0, :2], [0.0, 0.0])
    same(weights["truncate_sequence"][:, 0], [1.5, 1.0])  # 4 * 0.5 = 2, and 1
    same(weights["mask_sequence"][:, 0], [0.0, 1.0])
    assert (
        float(
            jnp.sum(
                jnp.abs(
                    jax.grad(lambda x: losses.correction(drawn, x, MASK, "truncate_token", 9.0).sum())(now)
                )
            )
        )
        == 0
    )


_CORRECTIONS = ("none", "truncate_token", "mask_token", "truncate_sequence", "mask_sequence")


def test_values_gain_nothing_beyond_the_clip():
    value, old, target = (jnp.array([[x]]) for x in (1.0, 0.0, 2.0))
    same(losses.value_error(value, old, target, None), [[0.5]])
    same(losses.value_error(value, old, target, 0.2), [[0.5 * 1.8**2]])


def test_a_bonus_for_entropy_ends_at_its_cap():
    entropy = jnp.array([[0.2, 0.5, 0.8]])
    same(losses.entropy_bonus(entropy, None), entropy)
    same(losses.entropy_bonus(entropy, 0.6), [[0.2, 0.5, 0.6]])
    same(jax.grad(lambda x: losses.entropy_bonus(x, 0.6).sum())(entropy), [[1.0, 1.0, 0.0]])


def test_preferences():
    margin = jnp.array([2.0, -1.0])
    sigmoid = [math.log(1 + math.exp(-0.2)), math.log(1 + math.exp(0.1))]
    other = [math.log(1 + math.exp(0.2)), math.log(1 + math.exp(-0.1))]
    same(losses.preference_loss(margin, 0.1), sigmoid)
    same(
        losses.preference_loss(margin, 0.1, label_smoothing=0.25),
        [0.75 * a + 0.25 * b for a, b in zip(sigmoid, other, strict=True)],
    )
    same(losses.preference_loss(margin, 0.1, "hinge"), [0.8, 1.1])
    same(losses.preference_loss(margin, 0.1, "ipo"), [9.0, 36.0])
    same(
        losses.preference_loss(margin, 0.1, "robust", 0.25),
        [(0.75 * a - 0.25 * b) / 0.5 for a, b in zip(sigmoid, other, strict=True)],
    )


REWARD = jnp.array([1.0, 0.0, 0.0, 3.0, 5.0, 1.0])  # two groups of three


def test_advantages_of_groups():
    of = lambda *how: core.group_advantage(REWARD, 3, *how)  # noqa: E731
    same(of("group", "none", 0.0, True), [2 / 3, -1 / 3, -1 / 3, 0, 2, -2])
    same(of("leave_one_out", "none", 0.0, True), [1, -0.5, -0.5, 0, 3, -3])
    same(of("none", "none", 0.0, True), REWARD)
    small, large = math.sqrt(1 / 3) + 0.1, 2 + 0.1  # deviations over n - 1, and the guard
    same(
        of("group", "group", 0.1, True),
        [2 / 3 / small, -1 / 3 / small, -1 / 3 / small, 0, 2 / large, -2 / large],
    )
    same(of("group", "group", 0.0, False)[4], 2 / math.sqrt(8 / 3))
    same(of("group", "batch", 0.0, True)[4], 2 / np.std(np.asarray(REWARD), ddof=1))


def test_equal_rewards_have_an_advantage_of_exactly_nothing():
    """Three times 0.1 has a mean that is not 0.1: divided by a guard of 1e-6, that would be a direction."""
    reward, none, mask = jnp.full(6, 0.1), jnp.zeros((6, 2)), jnp.ones((6, 2), bool)
    assert float(jnp.max(jnp.abs(reward - jnp.mean(reward)))) > 0
    for variant in VARIANTS:
        found = objective(variant, guard=1e-6).advantage(reward, none, none, mask, 3)
        assert float(jnp.max(jnp.abs(found))) == 0.0, variant
    apart = core.group_advantage(jnp.repeat(jnp.array([0.1, 0.7]), 3), 3, "group", "batch", 0.0, True)
    assert float(jnp.max(jnp.abs(apart))) == 0.0


def test_a_divergence_within_rounding_is_none_and_pulls_nowhere():
    now, apart = jnp.array([[-2.0, -2.0]]), jnp.array([[-2.0 + 1e-6, -2.1]])
    for kind, slope in (("k1", 1.0), ("k2", 0.0), ("k3", 0.0)):
        value = core.divergence(now, apart, kind)
        pull = jax.grad(lambda x, kind=kind: jnp.sum(core.divergence(x, apart, kind)))(now)
        assert float(value[0, 0]) == 0.0 and float(pull[0, 0]) == slope
        assert abs(float(value[0, 1])) > 1e-3 and abs(float(pull[0, 1])) > 0.05


def test_long_responses_are_punished():
    same(variants.overlong_penalty(jnp.array([70, 80, 90, 99, 100]), 100, 20), [0, 0, -0.5, -0.95, -1])


def test_returns_of_tokens_and_whitening():
    x = jnp.array([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    same(variants.reversed_cumsum(x, MASK), [[3, 2, 0], [12, 9, 5]])
    same(variants.reward_at_end(jnp.array([7.0, 8.0]), MASK), [[0, 7, 0], [0, 0, 8]])
    white = variants.whiten(x, MASK)
    deviation = math.sqrt(2.5)
    same(white, [[-2 / deviation, -1 / deviation, 0], [0, 1 / deviation, 2 / deviation]])


def test_advantages_of_tokens_step_over_what_a_tool_said():
    reward = jnp.array([[0.0, 9.0, 0.0, 1.0]])
    value = jnp.array([[0.5, 7.0, 0.25, 0.75]])
    mask = jnp.array([[True, False, True, True]])
    advantage, target = variants.token_advantages(reward, value, mask, 1.0, 0.5)
    # Errors 0.25 - 0.5, 0.75 - 0.25, 1 - 0.75; each with half of the one after it.
    last, middle = 0.25, 0.5 + 0.125
    first = -0.25 + 0.5 * middle
    same(advantage, [[first, 0, middle, last]])
    same(target, [[first + 0.5, 0, middle + 0.25, last + 0.75]])


def test_reinforce_plus_plus_pays_for_the_divergence_still_to_come():
    wanted = objective("reinforce_plus_plus", kl_coefficient=0.5)
    log_prob, reference = jnp.array([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), jnp.zeros((2, 3))
    found = wanted.advantage(jnp.array([1.0, 0.0]), log_prob, reference, MASK, 2)
    same(found, variants.whiten(jnp.array([[1 - 1.5, 1 - 1.0, 0], [-1.5, -1.5, -1.5]]), MASK))


def test_rloo_pays_for_the_divergence_of_a_response():
    wanted = objective("rloo", kl_coefficient=0.5)
    log_prob, reference = jnp.array([[1.0, 1.0, 5.0], [0.0, 0.0, 0.0]]), jnp.zeros((2, 3))
    found = wanted.advantage(jnp.array([1.0, 2.0]), log_prob, reference, MASK, 2)
    same(found, [[-2, -2, 0], [2, 2, 2]])  # 1 - 0.5 * 2 = 0 against 2


def test_conventions_go_over_variants_and_values_over_both():
    assert (objective("grpo", "trl").guard, objective("grpo", "verl").dual_clip) == (1e-4, 3.0)
    assert not objective("dapo", "tunix").count_empty
    assert objective("rloo", "tunix").kl_estimator == "k1"
    assert objective("grpo", "verl", dual_clip=5.0, guard=0.5) == objective("grpo", "verl").__class__(
        dual_clip=5.0, guard=0.5, count_empty=False
    )
    assert set(CONVENTIONS) == {"paper", "trl", "verl", "tunix"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"variant": "gropo"}, "variant='gropo': it is one of grpo"),
        ({"convention": "openrlhf"}, "it is one of paper, trl, verl, tunix"),
        ({"clip_hihg": 0.3}, "did you mean 'clip_high'?"),
    ],
)
def test_what_there_is_not_is_refused(given, said):
    with pytest.raises(FdgError, match=said.replace("?", r"\?")):
        objective(**given)


def test_the_opening_of_a_conversation_is_its_prompt():
    masks = (
        jnp.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool),
        jnp.array([[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]], bool),
    )
    tokens = jnp.array([[6, 7, 8, 9, 0], [6, 7, 0, 0, 0]])
    said = prompt_up_to_policy(
        Responses(Prompts(jnp.array([[5], [5]]), jnp.ones((2, 1), bool)), tokens, *masks)
    )
    shown = [row[there].tolist() for row, there in zip(said.prompts.tokens, said.prompts.mask, strict=True)]
    assert shown == [[5, 6], [5]]  # and the answers, with what the game replied between them
    shown = [row[there].tolist() for row, there in zip(said.tokens, said.mask, strict=True)]
    assert shown == [[7, 8, 9], [6, 7]]
