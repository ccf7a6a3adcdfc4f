"""Responses that begin before their turn, in micro-batches: versions, weights, and what changes no number."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import policies
from algos.language import Decoder, DecoderConfig, Sampling, sample_keys
from algos.language.generation import Answers
from algos.rlhf import losses, streaming
from algos.rlhf.group_relative import Batch, Sums
from algos.rlhf.responses import loss_mask, rollouts, scores
from envs.text import Reward
from fdg.errors import FdgWarning
from fdg.stream import Stream
from tests.language.test_generation import TINY, prompts
from tests.refusing import refuses
from tests.rlhf import ages
from tests.rlhf.small import SMALL, TASK, made

LONGEST = 12


def test_log_probabilities_are_those_of_each_tokens_version():
    """Parameters that have nothing in common with each other: a cache of older ones would be far off."""
    decoder = Decoder(DecoderConfig.tiny(11, **TINY | {"num_layers": 1}, initializer_range=0.3))
    versions = [jax.jit(decoder.init)(jax.random.key(i)) for i in range(7)]
    sampling = Sampling(LONGEST, stop_tokens=(3, 5), temperature=0.9)
    asked = prompts(2)

    def stream(first):
        many = jax.tree.map(lambda x: jnp.tile(x, (3, 1)), asked)
        keys = jax.vmap(sample_keys, (0, None))(jax.random.split(jax.random.key(9), 9), 2)
        keys = jax.lax.dynamic_slice_in_dim(keys, first // 2, 3).reshape(-1)
        source = Answers(decoder, sampling, many, keys, first=first, records=True)
        return Stream(source, slots=3, batch=2, ahead=2, prefills=1)

    @jax.jit
    def take(parameters, version, state):
        return stream(version * 2).take(parameters, version, state)

    @jax.jit
    def recomputed(parameters, rows):
        read, said = rows.asked[0], rows.samples
        tokens = jnp.concatenate([read.tokens, said.tokens], axis=1)
        segments = jnp.concatenate([read.mask, said.mask], axis=1).astype(jnp.int32)
        return decoder.log_probs(parameters, tokens, segments, 0.9)[:, -LONGEST:]

    state, most = jax.jit(lambda key: stream(0).init(key))(jax.random.key(0)), 0
    for i in range(7):
        rows, state = take(versions[i], jnp.int32(i), state)
        mask, of = np.asarray(rows.samples.mask), np.asarray(rows.version)
        found = np.stack([recomputed(parameters, rows) for parameters in versions])
        expected = np.take_along_axis(found, of[None], axis=0)[0]
        np.testing.assert_allclose(np.where(mask, expected, 0), rows.samples.tempered_log_probs, atol=1e-5)
        other = np.take_along_axis(found, np.where(of == i, 0, i)[None], axis=0)[0]
        assert not i or np.abs(np.where(mask, other - rows.samples.tempered_log_probs, 0)).max() > 0.1
        for row, there in zip(of, mask, strict=True):
            most = max(most, len(set(row[there].tolist())))
            assert (np.diff(row[there]) >= 0).all() and i - row[0] <= 2
        ticks = np.asarray(rows.tick)[:, 1:]
        assert (np.diff(ticks, axis=1)[mask[:, 2:]] == 1).all()
    assert most >= 3


@functools.cache
def rolled(name, **fields):
    algorithm = made(name, **{"group_size": 2, **fields})
    count = algorithm._candidates
    state = jax.jit(algorithm.init)(jax.random.key(1))
    return jax.jit(lambda state: rollouts(algorithm, state, count, lambda x: x)[0])(state)


def test_a_stream_of_one_batch_is_the_batch():
    """What begins first, before anything is ahead: the responses of the first batch are among them."""
    found, expected = rolled("grpo", ahead=1, slots=16, order="prompt"), rolled("grpo")
    assert (found.responses.tokens == expected.responses.tokens).all()
    np.testing.assert_allclose(found.log_prob, expected.log_prob, atol=1e-5)
    assert (found.reward.total == expected.reward.total).all()


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo"])
def test_an_iteration_ahead_keeps_the_state_and_says_how_busy_slots_are(name):
    own = {"respondent": "policy"} if name == "dpo" else {"late": "mask"}
    algorithm = made(name, group_size=2, ahead=1, slots=4, micro_batches=2, **own)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    after, metrics = jax.eval_shape(algorithm.iterate, state)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(state) == shapes(after)
    assert {"slots_busy", "queued", "running", "ticks", "staleness", "staleness_max"} <= set(metrics)


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo"])
def test_a_file_of_problems_is_read_ahead_in_its_order(name, tmp_path):
    """The rows of the next iteration are those that it would have without `ahead`."""
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = envs.make("text:file", path=str(tmp_path / "rows.jsonl"))
    own = {"respondent": "policy"} if name == "dpo" else {}
    for env in (task, task.with_reward(lambda responses: [float(len(r)) for r in responses])):
        ahead = algos.get(name)(env=env, **SMALL, group_size=2, ahead=1, **own)
        plain = algos.get(name)(env=env, **SMALL, group_size=2, **own)
        state = jax.eval_shape(ahead.init, jax.random.key(0))
        assert jax.tree.structure(jax.eval_shape(ahead.iterate, state)[0]) == jax.tree.structure(state)
    counted = jax.jit(plain.init)(jax.random.key(0))
    count = plain.num_prompts
    problem, _ = streaming.problems_and_keys(ahead, counted, count)
    asked = problem.prompts.tokens.reshape(2, count, -1)
    for later in range(2):
        then = counted._replace(iteration=counted.iteration + later)
        expected = plain.problems(*plain._problem_keys(then, count)).prompts.tokens
        np.testing.assert_array_equal(asked[later], expected)


def test_a_lag_of_parts_of_an_iteration_is_counted_by_the_same_clock(devices):
    """Lag 1 of 2 micro-batches: the first of an iteration is drawn by the parameters of the last."""
    fields = {"iterations": 6, "ahead": 1, "micro_batches": 2, "slots": 6}
    assert ages.check("grpo", policies.Split(lag=1), devices[:2], **fields) == 2


def test_as_many_slots_as_responses_of_a_batch_begin_ahead():
    given = {**SMALL, "env": envs.make(TASK), "group_size": 2, "ahead": 1}
    assert streaming.sizes(algos.GRPO(**given), 4)["slots"] == 8
    assert streaming.sizes(algos.GRPO(**given, micro_batches=2), 4)["slots"] == 8
    assert streaming.sizes(algos.GRPO(**{**given, "ahead": 0}, micro_batches=2), 4)["slots"] == 4


def test_a_mask_of_younger_tokens_than_those_of_a_batch_has_an_effect(recwarn):
    fields = {**SMALL, "env": envs.make(TASK), "group_size": 2, "ahead": 2, "late": "mask"}
    assert algos.GRPO(**fields, max_age=0, order="prompt").stream_settings.oldest() == 0
    assert algos.GRPO(**fields, max_age=5).stream_settings.oldest() == 5
    assert not recwarn
    with pytest.warns(FdgWarning, match="no effect with order='prompt'"):
        assert algos.GRPO(**fields, max_age=5, order="prompt").stream_settings.oldest() == 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ahead": -1, "slots": 2}, "ahead=-1: it must be 0 or more"),
        ({"ahead": 10**9}, "ahead=1000000000: give at most 200 batches"),
        ({"micro_batches": 3}, "micro_batches=3 do not divide the 4 prompts of an iteration"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"max_age": 1}, "max_age=1: it must be 0 or more, and needs late='mask'"),
        ({"ahead": 1, "slots": 2, "env": envs.text.Guess()}, "ahead=1: 'guess' is a game"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(fields, why):
    with refuses(match=why):
        algos.GRPO(**{**SMALL, "env": envs.make(TASK), "group_size": 2, **fields})


def test_decoupled_weights_leave_out_what_is_above_the_cap_alone():
    """Ratios of the proximal policy to the actor's: 0.5, 2, 4, with a cap of 3."""
    drawn, proximal = jnp.log(jnp.array([[0.4, 0.2, 0.1]])), jnp.log(jnp.array([[0.2, 0.4, 0.4]]))
    weights = losses.correction(drawn, proximal, jnp.ones((1, 3), bool), "decoupled", 3.0)
    np.testing.assert_allclose(weights, [[0.5, 2.0, 0.0]], rtol=1e-6)


def test_interpolated_log_probabilities_are_part_of_the_way_by_age():
    """Of ages 0, 1 and 3: at the actor's, half and three quarters of the way to the learner's."""
    found = losses.interpolate(jnp.full((1, 3), -2.0), jnp.full((1, 3), -1.0), jnp.array([[0, 1, 3]]))
    np.testing.assert_allclose(found, [[-2.0, -1.5, -1.25]], rtol=1e-6)
    assert not jax.grad(lambda x: losses.interpolate(x, x, jnp.ones((1, 1))).sum())(jnp.ones((1, 1))).any()


def test_an_interpolated_policy_is_what_ratios_and_weights_are_over():
    """A response of one token, two updates old: the loss by hand, at equal parameters and learned ones."""
    algorithm = made("grpo", group_size=2, correction="decoupled", proximal="interpolate", kl_coefficient=0.0)
    state = jax.jit(algorithm.init)(jax.random.key(1))
    responses = rolled("grpo").responses
    now = jax.jit(lambda p: scores(algorithm.network, p, responses, 1.0)[0])(state.parameters)
    drawn, version = now - 0.3, jnp.zeros(now.shape, jnp.int32)
    reward = Reward(jnp.arange(8.0), {})
    batch = Batch(responses, responses.own, drawn, version, jnp.zeros(now.shape), reward)
    samples = algorithm._samples(state.parameters, batch)._replace(age=2 - version)
    advantage = jnp.broadcast_to(jnp.arange(-2.0, 6.0)[:, None], now.shape)
    samples = samples._replace(
        weight=algorithm._weights(responses.own),
        share=algorithm._shares(responses.own),
        advantage=advantage,
    )
    measures = jax.jit(lambda *x: algorithm._loss(*x))(state.parameters, jnp.bool(True), samples)[1]
    # 2/3 of the way from the actor's: ratios of exp(0.1), and weights of exp(0.2).
    cost = -np.exp(0.2) * np.minimum(np.exp(0.1) * advantage, np.clip(np.exp(0.1), 0.8, 1.2) * advantage)
    expected = np.sum(np.where(responses.own, np.asarray(samples.weight) * cost, 0))
    np.testing.assert_allclose(measures["policy_loss"], expected, rtol=1e-4)


def test_tokens_that_are_too_old_have_no_weight_and_stay():
    algorithm = made("grpo", group_size=2, slots=4, ahead=2, late="mask", max_age=1)
    found = rolled("grpo")
    age = jnp.broadcast_to(
        jnp.array([2, 1, 0])[jnp.arange(found.responses.own.shape[1]) % 3], found.responses.own.shape
    )
    counted = loss_mask(algorithm, found._replace(age=age))
    assert (counted == (found.responses.own & (age < 2))).all()
    assert (loss_mask(algorithm, found) == found.responses.own).all()


def test_gradients_of_micro_batches_add_up_to_that_of_the_batch():
    """Means over tokens, responses of different lengths: sums are divided once, by what all parts have."""
    fields = {"group_size": 2, "variant": "dapo", "dynamic_sampling": 0, "overlong_buffer": 0.0}
    whole, parts = made("grpo", **fields), made("grpo", **fields, micro_batches=2)
    assert parts._learns_by_parts and not whole._learns_by_parts
    found, state = rolled("grpo"), jax.jit(whole.init)(jax.random.key(1))
    reward = Reward(jnp.arange(8.0) ** 2, {})
    own, drawn = found.responses.own, found.log_prob
    batch = Batch(found.responses, own, drawn, found.version, 0 * drawn, reward)

    @jax.jit
    def by_parts(state):
        sums = Sums(jax.tree.map(jnp.zeros_like, state.parameters), jnp.float32(0), jnp.float32(0))
        seen = []
        for rows in (slice(0, 4), slice(4, 8)):
            part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            sums, measures = parts.learn_part(state.parameters, state.iteration, sums, part)
            seen.append(measures)
        seen = jax.tree.map(lambda *x: jnp.stack(x), *seen)
        return parts.learn_sums(state.parameters, state.optimizer_state, state.iteration, batch, sums, seen)

    key = jax.random.key(0)
    expected = jax.jit(whole.learn)(state.parameters, state.optimizer_state, state.iteration, batch, key)
    for x, y in zip(jax.tree.leaves(by_parts(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
