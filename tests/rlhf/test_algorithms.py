"""SFT, DPO, PPO and GRPO as complete algorithms; `test_losses.py` tests the terms of their losses.

DPO: arXiv 2305.18290, equation 7; GRPO: arXiv 2402.03300, equation 3; DAPO: arXiv 2503.14476, equation 11;
PPO with the KL divergence in the reward: arXiv 1909.08593, equation 2.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from algos.language import Decoder, DecoderConfig
from algos.rlhf import updates
from algos.rlhf.group_relative import Batch
from algos.rlhf.ppo import Judgement
from algos.rlhf.preferences import best_and_worst
from algos.rlhf.responses import Responses, finished, response_log_probs
from algos.rlhf.speaker import problem_keys
from envs.text import CharacterTokenizer, Problem, Prompts, Reply, Reward
from fdg.errors import FdgError
from fdg.placing.plans import SteppedPlan
from tests.refusing import refuses
from tests.rlhf.small import SMALL, TASK, make

CASES = {
    "sft": {"num_minibatches": 2, "micro_batch": 1},
    "grpo": {"group_size": 4},
    "grpo dapo": {"group_size": 2, "variant": "dapo", "convention": "verl", "num_minibatches": 2},
    "grpo reinforce": {"group_size": 2, "variant": "reinforce_plus_plus", "num_epochs": 2, "micro_batch": 4},
    "grpo alone": {"group_size": 1, "variant": "reinforce_plus_plus"},
    "grpo adapters": {"group_size": 2, "lora_rank": 2},
    "dpo": {"micro_batch": 2},
    "reward_model": {"micro_batch": 2},
    "reward_model adapters": {"lora_rank": 2},
    "ppo_rlhf": {"micro_batch": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_iteration_updates_the_state(case):
    """In the jaxpr, only references, the run's key and the base of adapters are returned unchanged."""
    algorithm = make(case.split()[0], **CASES[case])
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    traced, (after, metrics) = jax.make_jaxpr(algorithm.iterate, return_shape=True)(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after
    )
    assert all(metric.shape == () for metric in metrics.values())
    assert {"tokens", "response_length", "truncation_rate", "loss"} <= set(metrics)
    if case.startswith(("grpo", "ppo")):
        expected = {"entropy", "clip_fraction", "approx_kl", "log_prob_difference", "log_prob_difference_max"}
        assert {*expected, "episode_return", "reward_correct", "kl"} - set(metrics) <= {"kl"}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    same = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars[: len(leaves)], strict=True)
    unchanged = {jax.tree_util.keystr(path) for (path, _), old, new in same if old is new}
    assert all(
        name.startswith(
            (".reference", ".key", ".parameters['base']", ".respondent", ".parameters['network']['base']")
        )
        for name in unchanged
    )
    assert ("adapters" in case) == any("['base']" in name for name in unchanged)


def test_adapters_share_one_base_network():
    """One copy per device, never transferred: 60 kB; adapters have 5 kB, plus Adam's two moments."""
    algorithm = make("grpo", group_size=2, lora_rank=2, hidden_size=32, kl_coefficient=0.1)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    base, adapters = (
        sum(4 * x.size for x in jax.tree.leaves(state.parameters[k])) for k in ("base", "adapters")
    )
    assert state.reference == () and base > 8 * adapters
    graph = fdg.trace(algorithm)
    for policy, count, actors in (
        (policies.Colocated(), 2, 0),
        (policies.Split(actors=2, learners=1), 3, 2),
        (policies.Standalone(actors=1, learners=1, references=1), 3, 1),
    ):
        plan = fdg.place(graph, policy, count)
        for group in plan.groups if isinstance(plan, SteppedPlan) else ():
            size = sum(v.bytes for places in plan.schedule.leaves for v in places if v.group == group.name)
            assert base <= size <= base + 8 * adapters, (policy, group)
        down = [each for each in plan.movements if each.where == "learners -> actors"]
        assert sum(each.bytes_per_crossing for each in down) == actors * (
            adapters + 4
        )  # and the count of updates


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_frozen_respondent_never_waits_for_the_learner(name):
    plan = fdg.place(fdg.trace(make(name, group_size=2)), policies.Split(actors=1, learners=1), 2)
    assert {each.where for each in plan.movements if each.how} == {"actors -> learners"}


@dataclasses.dataclass(frozen=True)
class Echo:
    """A game of two turns that repeats the model's response; a token 5 in the second turn has reward 1."""

    name: ClassVar[str] = "echo"
    tokenizer: ClassVar = CharacterTokenizer()
    prompt_length: ClassVar[int] = 2
    response_length: ClassVar[int] = 3
    reply_length: ClassVar[int] = 3
    turns: ClassVar[int] = 2

    def sample(self, keys, split="train"):
        tokens = jax.vmap(lambda key: jax.random.randint(key, (2,), 3, 9))(keys)
        return Problem(Prompts(tokens, tokens > 0), jnp.zeros(len(keys), jnp.int32))

    def reply(self, state, tokens, mask):
        last = state == 1
        reward = jnp.where(last, jnp.any(mask & (tokens == 5), axis=1), 0).astype(jnp.float32)
        return Reply(state + 1, tokens, mask, reward, last)


RESPONSES = Responses(
    Prompts(jnp.array([[0, 1, 4], [1, 5, 6]]), jnp.array([[False, True, True], [True, True, True]])),
    jnp.array([[7, 2, 0], [8, 9, 2]]),
    *[jnp.array([[True, True, False], [True, True, True]])] * 2,
)


def test_explained_variance(monkeypatch):
    """1 - Var[target - value] / Var[target], over the policy's own tokens only."""
    monkeypatch.setattr(updates, "epochs", lambda step, carry, *rest: (carry, {}))  # no updates
    algorithm = algos.get("ppo_rlhf")(env=envs.make(TASK), **SMALL)
    target, value = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)
    prompts = Prompts(jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2), bool))
    responses = Responses(prompts, jnp.zeros((3, 4), jnp.int32), jnp.ones((3, 4), bool), jnp.array(mask))
    judgement = Judgement(jnp.array(value), jnp.zeros((3, 4)), jnp.array(target))
    *_, measures = algorithm.fit(None, None, (responses, judgement), jax.random.key(0))
    expected = 1 - np.var((target - value)[mask]) / np.var(target[mask])
    assert float(measures["explained_variance"]) == pytest.approx(expected, rel=1e-4)


def test_scores_do_not_depend_on_other_responses():
    decoder = Decoder(DecoderConfig.tiny(12, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1))
    parameters = jax.jit(decoder.init)(jax.random.key(0))
    log_prob, entropy = jax.jit(lambda p: response_log_probs(decoder, p, RESPONSES, 0.5))(parameters)
    row, last = jnp.array([[1, 4, 7, 2]]), jnp.array([[1, 5, 6, 8, 9, 2]])
    logits = jax.jit(lambda p, x: decoder.apply(p, x, jnp.ones_like(x)))
    for i, (tokens, prompt, count) in enumerate(((row, 2, 2), (last, 3, 3))):
        every = jax.nn.log_softmax(logits(parameters, tokens)[0] / 0.5)
        for t in range(count):
            want = every[prompt + t - 1]
            np.testing.assert_allclose(log_prob[i, t], want[tokens[0, prompt + t]], atol=1e-6)
            np.testing.assert_allclose(entropy[i, t], -jnp.sum(jnp.exp(want) * want), atol=1e-5)
    assert log_prob[0, 2] == entropy[0, 2] == 0
    assert finished(RESPONSES, (2,)).tolist() == [True, True]
    assert finished(RESPONSES._replace(tokens=RESPONSES.tokens.at[1, 2].set(5)), (2,)).tolist() == [
        True,
        False,
    ]


def _batch(algorithm, count):
    return _random_batch(count, algorithm.env.prompt_length, algorithm.env.response_length)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_batch(count, prompt_length, response_length):
    keys = jax.random.split(jax.random.key(1), 4)
    lengths = jax.random.randint(keys[0], (count,), 1, response_length + 1)
    mask = jnp.arange(response_length)[None] < lengths[:, None]
    prompts = Prompts(
        jax.random.randint(keys[1], (count, prompt_length), 3, 50), jnp.ones((count, prompt_length), bool)
    )
    tokens = jax.random.randint(keys[2], mask.shape, 3, 50)
    logp = -jnp.ones(mask.shape)
    total = jax.random.normal(keys[3], (count,))
    version = jnp.zeros(count, jnp.int32)
    return Batch(
        Responses(prompts, tokens, mask, mask), mask, logp, version, logp, Reward(total, {"correct": total})
    )


def test_micro_batches_add_up_and_first_ratio_is_one():
    algorithm = make("grpo", group_size=2, variant="dapo", dynamic_sampling=0, kl_coefficient=0.1)
    parameters = jax.jit(algorithm.network.init)(jax.random.key(0))
    samples = jax.jit(algorithm._samples)(parameters, _batch(algorithm, 8))
    mask = samples.batch.weight_mask
    minibatch = samples._replace(weight=algorithm._weights(mask), share=algorithm._shares(mask))
    found = {}
    for size in (8, 2):
        of = jax.jit(
            lambda p, m, size=size: updates.accumulate_gradient(
                functools.partial(algorithm.gradient, p, True), m, size
            )
        )
        gradient, measures = found[size] = of(parameters, minibatch)
        assert measures["ratio_max"] == 1.0 and measures["first_ratio_error_max"] == 0.0
        assert measures["clip_fraction"] == measures["approx_kl"] == 0.0
        for one, other in zip(jax.tree.leaves((gradient, measures)), jax.tree.leaves(found[8]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # Weights are normalised by the tokens of the minibatch, not of a micro-batch.
    np.testing.assert_allclose(jnp.sum(minibatch.weight), 1.0, rtol=1e-6)


def test_presets_share_one_network():
    """With presets, all text algorithms have the same network, so one can start from another's weights."""
    env = envs.make("text:sorting")
    found = [algos.make(name, env) for name in algos.names("text")]
    assert len({algorithm.network for algorithm in found}) == 1 and found[0].hidden_size == 64
    assert found[0].network.config.initializer_range == pytest.approx((0.4 / 64) ** 0.5)
    assert algos.make("grpo", env, num_prompts=2).micro_batch > 4, "a whole minibatch at once"


@pytest.mark.parametrize("old_log_prob, ratio", [("learner", 1.0), ("actor", 1.1)])
def test_old_log_prob(old_log_prob, ratio):
    """The actor's probability of each token is 1 / 1.1 of the learner's."""
    algorithm = make("grpo", group_size=2, num_minibatches=1, old_log_prob=old_log_prob)
    state, batch = jax.jit(algorithm.init)(jax.random.key(0)), _batch(algorithm, 8)
    of_network = jax.jit(response_log_probs, static_argnums=(0, 3))
    log_prob = of_network(algorithm.network, state.parameters, batch.responses, algorithm.temperature)[0]
    batch = batch._replace(sampled_log_prob=log_prob - jnp.log(1.1))
    *_, measures = jax.jit(algorithm.learn)(state.parameters, state.optimizer_state, 0, batch, state.key)
    assert float(measures["ratio_max"]) == pytest.approx(ratio, abs=1e-5)


def test_gradient_matches_reinforce_by_hand():
    """-1 / (N R) sum of A log pi over response tokens, where A is the reward minus the mean of its group."""
    algorithm = make("grpo", group_size=4, variant="dr_grpo", temperature=0.7)
    parameters, batch = jax.jit(algorithm.network.init)(jax.random.key(3)), _batch(algorithm, 16)
    samples = jax.jit(algorithm._samples)(parameters, batch)
    minibatch = samples._replace(
        weight=algorithm._weights(batch.weight_mask), share=algorithm._shares(batch.weight_mask)
    )
    prompt, reply, mask = batch.responses.prompts.tokens, batch.responses.tokens, np.array(batch.weight_mask)
    rows, rewards = jnp.concatenate([prompt, reply], axis=1), np.array(batch.reward.total).reshape(4, 4)
    advantage = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(16, 1)

    def by_hand(parameters):
        logits = algorithm.network.apply(parameters, rows, jnp.ones_like(rows)) / 0.7
        every = jax.nn.log_softmax(logits)[:, prompt.shape[1] - 1 : -1]
        log_prob = jnp.take_along_axis(every, reply[..., None], axis=2)[..., 0]
        return -jnp.sum(np.where(mask, advantage, 0.0) * log_prob) / mask.size

    want = jax.jit(jax.grad(by_hand))(parameters)
    found, measures = jax.jit(algorithm.gradient)(parameters, True, minibatch)
    assert (
        measures["log_prob_difference"] > 0 and max(jnp.max(jnp.abs(x)) for x in jax.tree.leaves(want)) > 1e-2
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_dynamic_sampling():
    algorithm = make("grpo", num_prompts=2, group_size=2, variant="dapo", micro_batch=2)
    batch = _batch(algorithm, 8)
    reward = jnp.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 2.0, 1.0])  # they differ for prompts 2 and 4
    chosen = algorithm._select_responses(batch._replace(reward=Reward(reward, {})))
    assert chosen.reward.total.tolist() == [0.0, 1.0, 2.0, 1.0]
    np.testing.assert_array_equal(chosen.weight_mask, batch.responses.mask[jnp.array([2, 3, 6, 7])])
    only = algorithm._select_responses(batch._replace(reward=Reward(reward.at[2].set(1.0), {})))
    assert only.reward.total.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert jnp.any(only.weight_mask, axis=1).tolist() == [True, True, False, False]


def test_mask_truncated():
    algorithm = make("grpo", mask_truncated=True)
    batch = _batch(algorithm, 8)
    stop, tokens = algorithm.env.stop_tokens[0], batch.responses.tokens
    ended = batch._replace(responses=batch.responses._replace(tokens=tokens.at[:4, 0].set(stop)))
    counted = jnp.any(algorithm._select_responses(ended).weight_mask, axis=1)
    assert counted.tolist() == [True] * 4 + [False] * 4


def test_pairs_of_best_and_worst_response():
    algorithm = make("dpo", group_size=3, num_prompts=2)
    responses = _batch(algorithm, 6).responses
    pairs = best_and_worst(responses, jnp.array([0.5, 1.0, 0.0, 2.0, 2.0, 2.0]), 3)
    assert pairs.differ.tolist() == [True, False]
    np.testing.assert_array_equal(pairs.chosen.tokens[0], responses.tokens[1])
    np.testing.assert_array_equal(pairs.rejected.tokens[0], responses.tokens[2])


def test_packing_is_deprecated():
    with pytest.warns(fdg.FdgWarning, match="packing=2 is deprecated since 0.3: write remove_padding"):
        assert make("sft", num_prompts=8, packing=2).remove_padding


def test_problem_order_depends_on_key_and_iteration():
    """Also if a batch spans two epochs."""
    key = jax.random.key(5)
    keys_of = lambda i: jax.random.key_data(problem_keys(key, jnp.int32(i), 4, 6)).tolist()  # noqa: E731
    seen = [tuple(k) for i in range(6) for k in keys_of(i)]  # 24: four epochs of 6
    epochs = [seen[start : start + 6] for start in range(0, 24, 6)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 6 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert keys_of(1) == keys_of(1)
    fresh = [tuple(w) for i in range(3) for w in jax.random.key_data(problem_keys(key, i, 4, None)).tolist()]
    assert len(set(fresh)) == 12


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("grpo", {"group_size": 1}, "group_size=1: responses are compared with each other"),
        ("grpo", {"num_minibatches": 3}, "num_minibatches=3 does not divide the 32 responses"),
        ("grpo", {"micro_batch": 5}, "micro_batch=5 does not divide the 32 responses of a minibatch"),
        ("grpo", {"clip_low": -1.0}, "clip_low=-1.0: it must be 0 or more"),
        ("grpo", {"variant": "gropo"}, "variant='gropo': it must be 'grpo'"),
        ("grpo", {"dual_clip": 0.5}, "dual_clip=0.5: it must be above one"),
        ("grpo", {"clip": 0.5}, "no hyperparameter of GRPO 'clip'|unknown hyperparameter of GRPO 'clip'"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing=0.5: it must be from 0 to below 0.5"),
        ("dpo", {"label_smoothing": 0.1, "preference": "ipo"}, "no effect with preference='ipo': leave it"),
        ("ppo_rlhf", {"gae_lambda": 1.5}, "gae_lambda=1.5: it must be from 0 to 1"),
        ("sft", {"dataset_size": 2}, "dataset_size=2 is less than the num_prompts=4"),
        ("sft", {"top_p": 0.0}, "top_p=0.0"),
        ("sft", {"model": "/no/such/folder"}, "/no/such/folder"),
        ("sft", {"temperature": 0.0}, "temperature=0.0: it must be above zero"),
        (
            "sft",
            {"decoder": Decoder(DecoderConfig.tiny(20))},
            "vocabulary of 56 tokens, and the network one of 20",
        ),
        ("sft", {"decoder": Decoder(DecoderConfig.tiny(56, max_positions=9))}, "the network's context is 9"),
    ],
)
def test_invalid_settings(name, fields, message):
    with refuses(match=message):
        make(name, **fields)


def test_environment_that_is_no_text_task():
    with pytest.raises(FdgError, match=r"'CartPole-v1' is no text task: use envs.make\('text:addition'\)"):
        algos.GRPO(env=envs.make("CartPole-v1"))


def test_invalid_prompts_are_refused():
    algorithm = make("sft")
    state = jax.jit(algorithm.init)(jax.random.key(0))
    with pytest.raises(FdgError, match="'Ω' at 0 is not in the alphabet"):
        algorithm.answer(state, ["1+1=", "Ω"])
    with pytest.raises(FdgError, match="prompt 0"):
        algorithm.answer(state, ["1" * 50])


def test_equal_algorithms_have_equal_hashes():
    one, other = make("grpo", clip_high=0.3), make("grpo", clip_high=0.3)
    assert one == other and hash(one) == hash(other)
    assert dataclasses.replace(one, variant="gspo").objective.ratio_level == "sequence"


def changed_echo(part, change):
    """The game `Echo`, with `change` applied to one part of what a method returns."""

    @dataclasses.dataclass(frozen=True)
    class Changed(Echo):
        def sample(self, keys, split="train"):
            problem = super().sample(keys, split)
            if part == "answer":
                return problem._replace(answer=change(problem.answer))
            if part.startswith("prompt_"):
                name = part.removeprefix("prompt_")
                prompts = problem.prompts._replace(**{name: change(getattr(problem.prompts, name))})
                return problem._replace(prompts=prompts)
            return change(problem) if part == "sample" else problem

        def reply(self, state, tokens, mask):
            reply = super().reply(state, tokens, mask)
            if part in Reply._fields:
                return reply._replace(**{part: change(getattr(reply, part))})
            return change(reply) if part == "reply" else reply

    return Changed()


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("reward", lambda x: x[:, None], "reply gives reward of shape (N, 1), expected (N,)"),
        ("reward", lambda x: x.sum(), "reply gives reward of shape (), expected (N,)"),
        ("reward", lambda x: x > 0, "reply gives reward of dtype bool, expected float32"),
        ("reward", lambda x: 0.0, "reply gives reward of type float: give an array"),
        ("done", lambda x: x.astype(jnp.float32), "reply gives done of dtype float32, expected bool"),
        ("done", lambda x: x.any(), "reply gives done of shape (), expected (N,)"),
        ("tokens", lambda x: x[:, :2], "reply gives tokens of shape (N, 2), expected (N, 3)"),
        ("tokens", lambda x: x.astype(jnp.float32), "reply gives tokens of dtype float32, expected int32"),
        ("mask", lambda x: x[:, 0], "reply gives mask of shape (N,), expected (N, 3)"),
        ("mask", lambda x: x.astype(jnp.int32), "reply gives mask of dtype int32, expected bool"),
        ("state", lambda x: (x, x), "reply returns a state of another structure or shape"),
        ("reply", tuple, "reply gives a value of type tuple: return envs.text.Reply(state, tokens"),
        ("reply", lambda x: None, "reply gives a value of type NoneType: return envs.text.Reply("),
        ("sample", lambda x: x.prompts, "sample gives a value of type Prompts: return envs.text.Problem("),
        ("prompt_tokens", lambda x: x[:, :1], "sample gives tokens of shape (N, 1), expected (N, 2)"),
        ("prompt_mask", lambda x: x + 0, "sample gives mask of dtype int32, expected bool"),
        ("answer", lambda x: x[0], "sample gives an answer of shape (), expected a first axis of N"),
    ],
)
def test_invalid_games_are_refused(part, change, message):
    algorithm = algos.GRPO(env=changed_echo(part, change), group_size=2, **SMALL)
    with refuses(f"game 'echo': {message}"):
        fdg.trace(algorithm)
