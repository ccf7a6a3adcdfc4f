"""Responses that start in earlier iterations, and micro-batches: versions, weights, equal results."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.language import Decoder, DecoderConfig, Sampling, sample_keys
from algos.language.generation import Answers
from algos.rlhf import losses, streaming
from algos.rlhf.group_relative import Batch, Sums
from algos.rlhf.responses import loss_mask, rollouts
from envs.text import Reward
from fdg.errors import FdgWarning
from fdg.stream import Stream
from tests.language.test_generation import TINY, prompts
from tests.refusing import refuses
from tests.rlhf.small import SMALL, TASK, make

MAX_LENGTH = 12


@pytest.mark.parametrize(
    ("ahead", "micro_batches", "lag"), [(2, 1, 0), (2, 1, 1), (2, 2, 1), (2, 2, 2), (0, 2, 1)]
)
def test_log_probs_use_each_tokens_version(ahead, micro_batches, lag):
    """The versions are independent random networks, so a stale key-value cache would give large errors."""
    decoder = Decoder(DecoderConfig.tiny(11, **TINY | {"num_layers": 1}, initializer_range=0.3))
    versions = [jax.jit(decoder.init)(jax.random.key(i)) for i in range(7)]
    sampling = Sampling(MAX_LENGTH, stop_tokens=(3, 5), temperature=0.9)
    two_prompts = prompts(2)

    def stream(first):
        many = jax.tree.map(lambda x: jnp.tile(x, (ahead + 1, 1)), two_prompts)
        keys = jax.vmap(sample_keys, (0, None))(jax.random.split(jax.random.key(9), 9), 2)
        keys = jax.lax.dynamic_slice_in_dim(keys, first // 2, ahead + 1).reshape(-1)
        source = Answers(decoder, sampling, many, keys, first=first, records=True)
        slots = 3 if ahead else 1
        return Stream(source, slots=slots, batch=2, micro_batches=micro_batches, ahead=ahead, prefills=1)

    @jax.jit
    def take(parameters, iteration, version, state):
        return stream(iteration * 2).take(parameters, version, state)

    @jax.jit
    def recomputed(parameters, rows):
        prompt, response = rows.asked[0], rows.samples
        tokens = jnp.concatenate([prompt.tokens, response.tokens], axis=1)
        segments = jnp.concatenate([prompt.mask, response.mask], axis=1).astype(jnp.int32)
        return decoder.log_probs(parameters, tokens, segments, 0.9)[:, -MAX_LENGTH:]

    state, max_versions = jax.jit(lambda key: stream(0).init(key))(jax.random.key(0)), 0
    errors = []  # of each take, if its tokens were drawn by another version
    for n in range(7 * micro_batches):
        i, now = n // micro_batches, max(0, (n - lag) // micro_batches)
        rows, state = take(versions[now], jnp.int32(i), jnp.int32(now), state)
        mask, version = np.asarray(rows.samples.mask), np.asarray(rows.version)
        found = np.stack([recomputed(parameters, rows) for parameters in versions])
        expected = np.take_along_axis(found, version[None], axis=0)[0]
        np.testing.assert_allclose(np.where(mask, expected, 0), rows.samples.tempered_log_probs, atol=1e-5)
        other = np.take_along_axis(found, np.where(version == now, 0, now)[None], axis=0)[0]
        if now:
            errors.append(np.abs(np.where(mask, other - rows.samples.tempered_log_probs, 0)).max())
        for row, is_token in zip(version, mask, strict=True):
            max_versions = max(max_versions, len(set(row[is_token].tolist())))
            assert (np.diff(row[is_token]) >= 0).all() and i - row[0] <= ahead - (-lag // micro_batches)
        ticks = np.asarray(rows.tick)[:, 1:]
        assert (np.diff(ticks, axis=1)[mask[:, 2:]] == 1).all()
    assert max_versions >= (3 if ahead else 1)
    assert np.median(errors) > 0.1  # some takes have a single token


@functools.cache
def rollout(name, **fields):
    algorithm = make(name, **{"group_size": 2, **fields})
    count = algorithm._candidates
    state = jax.jit(algorithm.init)(jax.random.key(1))
    return jax.jit(lambda state: rollouts(algorithm, state, count, lambda x: x)[0])(state)


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo"])
def test_ahead_keeps_the_order_of_a_file(name, tmp_path):
    """Each iteration has the same rows as without `ahead`."""
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
    found = problem.prompts.tokens.reshape(2, count, -1)
    for later in range(2):
        later_state = counted._replace(iteration=counted.iteration + later)
        expected = plain.problems(*plain._problem_keys(later_state, count)).prompts.tokens
        np.testing.assert_array_equal(found[later], expected)


def test_default_number_of_slots():
    settings = {**SMALL, "env": envs.make(TASK), "group_size": 2, "ahead": 1}
    assert streaming.sizes(algos.GRPO(**settings), 4)["slots"] == 8
    assert streaming.sizes(algos.GRPO(**settings, micro_batches=2), 4)["slots"] == 8
    assert streaming.sizes(algos.GRPO(**{**settings, "ahead": 0}, micro_batches=2), 4)["slots"] == 4


def test_max_age_without_effect_warns(recwarn):
    fields = {**SMALL, "env": envs.make(TASK), "group_size": 2, "ahead": 2, "late": "mask"}
    assert algos.GRPO(**fields, max_age=0, order="prompt").stream_settings.oldest() == 0
    assert algos.GRPO(**fields, max_age=5).stream_settings.oldest() == 5
    assert not recwarn
    with pytest.warns(FdgWarning, match="no effect with order='prompt'"):
        assert algos.GRPO(**fields, max_age=5, order="prompt").stream_settings.oldest() == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ahead": -1, "slots": 2}, "ahead=-1: it must be 0 or more"),
        ({"ahead": 10**9}, "ahead=1000000000: give at most 200 batches"),
        ({"micro_batches": 3}, "micro_batches=3 does not divide the 4 prompts of an iteration: use 2 or 4"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"max_age": 1}, "max_age=1: it must be 0 or more, and needs late='mask'"),
        ({"ahead": 1, "slots": 2, "env": envs.text.Guess()}, "ahead=1: 'guess' is a game"),
    ],
)
def test_invalid_settings(fields, message):
    with refuses(match=message):
        algos.GRPO(**{**SMALL, "env": envs.make(TASK), "group_size": 2, **fields})


def test_decoupled_weights():
    """Ratios of the proximal to the actor's policy are 0.5, 2 and 4, and the cap is 3."""
    sampled, proximal = jnp.log(jnp.array([[0.4, 0.2, 0.1]])), jnp.log(jnp.array([[0.2, 0.4, 0.4]]))
    weights = losses.correction(sampled, proximal, jnp.ones((1, 3), bool), "decoupled", 3.0)
    np.testing.assert_allclose(weights, [[0.5, 2.0, 0.0]], rtol=1e-6)


def test_interpolated_log_probs():
    """At ages 0, 1 and 3: 0, 1/2 and 3/4 of the way from the actor's to the learner's."""
    found = losses.interpolate(jnp.full((1, 3), -2.0), jnp.full((1, 3), -1.0), jnp.array([[0, 1, 3]]))
    np.testing.assert_allclose(found, [[-2.0, -1.5, -1.25]], rtol=1e-6)
    assert not jax.grad(lambda x: losses.interpolate(x, x, jnp.ones((1, 1))).sum())(jnp.ones((1, 1))).any()


def test_old_tokens_are_masked():
    algorithm = make("grpo", group_size=2, slots=4, ahead=2, late="mask", max_age=1)
    found = rollout("grpo")
    mask = found.responses.policy_mask
    age = jnp.broadcast_to(jnp.array([2, 1, 0])[jnp.arange(mask.shape[1]) % 3], mask.shape)
    counted = loss_mask(algorithm, found._replace(age=age))
    assert (counted == (mask & (age < 2))).all()
    assert (loss_mask(algorithm, found) == mask).all()


def test_gradients_of_micro_batches_add_up():
    """For token means with different response lengths, sums are divided once, by the tokens of the batch."""
    fields = {"group_size": 2, "variant": "dapo", "dynamic_sampling": 0, "overlong_buffer": 0.0}
    full, split = make("grpo", **fields), make("grpo", **fields, micro_batches=2)
    assert split._learns_by_parts and not full._learns_by_parts
    found, state = rollout("grpo"), jax.jit(full.init)(jax.random.key(1))
    reward = Reward(jnp.arange(8.0) ** 2, {})
    policy_mask, sampled = found.responses.policy_mask, found.log_prob
    batch = Batch(found.responses, policy_mask, sampled, found.version, 0 * sampled, reward)

    @jax.jit
    def by_parts(state):
        sums = Sums(jax.tree.map(jnp.zeros_like, state.parameters), jnp.float32(0), jnp.float32(0))
        values = []
        for rows in (slice(0, 4), slice(4, 8)):
            part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
            sums, measures = split.learn_part(state.parameters, state.iteration, sums, part)
            values.append(measures)
        values = jax.tree.map(lambda *x: jnp.stack(x), *values)
        return split.learn_sums(state.parameters, state.optimizer_state, state.iteration, batch, sums, values)

    key = jax.random.key(0)
    expected = jax.jit(full.learn)(state.parameters, state.optimizer_state, state.iteration, batch, key)
    for x, y in zip(jax.tree.leaves(by_parts(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
