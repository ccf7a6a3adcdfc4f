"""Generation, compared with full forward passes without a cache; the number of slots changes no token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.language import Decoder, DecoderConfig, Prompts, Sampling, generate, sample_keys
from algos.language.generation import draw, filter_logits
from tests.refusing import refuses

VOCABULARY, STOP = 11, 3
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def decoder():
    options = {"qk_norm": True, "qkv_bias": True, "sliding_window": 4, "first_sliding_layer": 1}
    return Decoder(DecoderConfig.tiny(VOCABULARY, **TINY, **options, initializer_range=0.3, max_positions=32))


@pytest.fixture(scope="module")
def parameters(decoder):
    return jax.jit(decoder.init)(jax.random.key(1))


def prompts(count, length=5, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, count)
    mask = np.arange(length)[None] >= length - lengths[:, None]
    tokens = np.where(mask, rng.integers(0, VOCABULARY, (count, length)), 0)
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


@functools.cache
def jitted_functions(decoder):
    """A full forward pass, and sampling of one token."""
    return jax.jit(decoder.apply), jax.jit(draw, static_argnums=2)


def reference_samples(decoder, parameters, prompt, key, sampling):
    """Tokens and log-probabilities after one prompt [P]; each comes from a full pass over the text so far."""
    text = [int(token) for token, is_token in zip(*prompt, strict=True) if is_token]
    tokens, log_probs = [], []
    forward, draw_token = jitted_functions(decoder)
    for position in range(sampling.max_new_tokens):
        padded = jnp.asarray([text + [0] * (16 - len(text))])
        segments = (jnp.arange(16) < len(text)).astype(jnp.int32)[None]
        logits = forward(parameters, padded, segments)[:, len(text) - 1]
        token, log_prob, _ = draw_token(logits, jax.random.fold_in(key, position)[None], sampling)
        text.append(int(token[0]))
        tokens.append(int(token[0]))
        log_probs.append(float(log_prob[0]))
        if tokens[-1] in sampling.stop_tokens:
            break
    return tokens, log_probs


SAMPLING = Sampling(7, temperature=0.9, top_k=8, top_p=0.95, stop_tokens=(STOP,), pad_token=10)


def test_samples_match_full_passes_for_any_number_of_slots(decoder, parameters):
    """A sample depends only on its prompt and key, not on the batch or the order."""
    given, key = prompts(9), jax.random.key(5)
    expected = [
        reference_samples(decoder, parameters, (given.tokens[i], given.mask[i]), each, SAMPLING)
        for i, each in enumerate(sample_keys(key, 9))
    ]
    assert len({len(tokens) for tokens, _ in expected}) > 2  # some stop early, so slots are refilled
    for slots in (None, 3):
        run = jax.jit(lambda given, key, s=slots: generate(decoder, parameters, given, key, SAMPLING, s))
        found = run(given, key)
        for i, (tokens, log_probs) in enumerate(expected):
            n = len(tokens)
            assert found.tokens[i].tolist() == tokens + [10] * (7 - n), (slots, i)
            assert found.mask[i].tolist() == [True] * n + [False] * (7 - n)
            np.testing.assert_allclose(found.log_probs[i, :n], log_probs, atol=1e-5)
            assert not np.any(found.log_probs[i, n:])


def test_cached_logits_match_a_full_pass(decoder, parameters):
    given = prompts(3)
    more = jax.random.randint(jax.random.key(2), (3, 6), 0, VOCABULARY)
    prefill = jax.jit(decoder.prefill, static_argnums=3)
    logits, cache = prefill(parameters, given.tokens, given.mask.astype(jnp.int32), 6)
    found, decode = [logits], jax.jit(decoder.decode)
    for t in range(6):
        logits, cache = decode(parameters, cache, more[:, t])
        found.append(logits)
    sequence = jnp.concatenate([given.tokens, more], axis=1)
    segments = jnp.pad(given.mask, ((0, 0), (0, 6)), constant_values=True).astype(jnp.int32)
    expected = jax.jit(decoder.apply)(parameters, sequence, segments)[:, 4:]
    np.testing.assert_allclose(jnp.stack(found, axis=1), expected, atol=1e-5)


def test_top_k_and_top_p_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))
    kept = [
        [bool(each > -np.inf) for each in filter_logits(logits, Sampling(1, **options))[0]]
        for options in (
            {"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.51}, {"top_p": 0.91}, {"top_k": 3, "top_p": 0.8},
            {"top_k": 3, "top_p": 0.84}, {"top_k": 99},
        )
    ]  # fmt: skip
    assert kept == [
        [True, True, False, False], [True, False, False, False], [True, True, False, False], [True] * 4,
        [True, True, False, False],  # renormalised over the top 3: 0.556, 0.278, 0.167
        [True, True, True, False], [True] * 4,
    ]  # fmt: skip


def test_sampling_frequencies_and_log_probs():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    keys = jax.random.split(jax.random.key(0), 4000)
    many = jnp.tile(logits[None], (4000, 1))
    tokens, log_probs, plain = jax.jit(draw, static_argnums=2)(
        many, keys, Sampling(1, temperature=0.5, top_k=2)
    )
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / 4000, [25 / 34, 9 / 34, 0], atol=0.02)
    np.testing.assert_allclose(log_probs[tokens == 1], np.log(9 / 34), rtol=1e-5)
    np.testing.assert_allclose(plain, logits[tokens], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": 12},
            "prompt 1 has token 12 at 4, and the vocabulary has 0 to 10: is it from another",
        ),
        (
            {"length": 26},
            "prompts of 26 tokens and max_new_tokens=7 are 33, and the decoder's context",
        ),
        ({"slots": 0}, "slots=0: give at least 1"),
        ({"stop": -1}, "stop_tokens=[-1]: tokens of the vocabulary are 0 to 10"),
        ({"stop": 11}, "stop_tokens=[11]: tokens of the vocabulary are 0 to 10"),
        ({"mask": 4}, "prompts have tokens [2, 5] and a mask [2, 4]: both are [N, P]"),
    ],
)
def test_invalid_arguments(decoder, parameters, changes, message):
    given = prompts(2, changes.get("length", 5))
    if "tokens" in changes:
        given = given._replace(tokens=given.tokens.at[1, 4].set(12))
    if "mask" in changes:
        given = given._replace(mask=given.mask[:, :4])
    with refuses(message):
        sampling = dataclasses.replace(SAMPLING, stop_tokens=(0, 10, changes.get("stop", STOP)))
        generate(decoder, parameters, given, jax.random.key(0), sampling, changes.get("slots"))
