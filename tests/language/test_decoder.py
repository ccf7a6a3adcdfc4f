"""The decoder, compared with stored results of Hugging Face's transformers, and with itself."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.language import Decoder, DecoderConfig
from algos.language import decoder as module
from algos.language.layers import merge_adapters, rotary_frequencies
from tests.language import golden
from tests.language.test_generation import TINY
from tests.refusing import refuses

V = 11


@pytest.fixture(scope="module")
def decoder():
    return Decoder(DecoderConfig.tiny(V, **TINY, initializer_range=0.3))


@pytest.fixture(scope="module")
def parameters(decoder):
    return jax.jit(decoder.init)(jax.random.key(0))


TOKENS = jax.random.randint(jax.random.key(1), (2, 8), 0, V)
SEGMENTS = jnp.array([[0, 0, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_logits_and_gradients_match_transformers(name):
    config = golden.CONFIGS[name]
    assert golden.difference_of_logits(name, config, padded=False) < 1e-4
    assert golden.difference_of_logits(name, config, padded=True) < 1e-4
    assert golden.difference_of_gradients(name, config) < 1e-4


@pytest.mark.parametrize("name", golden.SCALED_ROPES)
def test_scaled_rope_matches_transformers(name):
    config = golden.SCALED_ROPES[name]
    assert golden.difference_of_logits(name, config, padded=False) < 1e-4
    plain = dataclasses.replace(config, rope_scaling=None)
    assert np.abs(rotary_frequencies(config)[0] - rotary_frequencies(plain)[0]).max() > 1e-3


def test_packed_segments_are_independent(decoder, parameters):
    apply = jax.jit(decoder.apply)
    packed = apply(parameters, TOKENS, SEGMENTS)
    alone = jnp.stack([jnp.pad(TOKENS[0, 2:5], (0, 5)), jnp.pad(TOKENS[0, 5:], (5, 0))])
    segments = jnp.array([[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]])
    separate = apply(parameters, alone, segments)
    np.testing.assert_allclose(packed[0, 2:5], separate[0, :3], atol=1e-5)
    np.testing.assert_allclose(packed[0, 5:], separate[1, 5:], atol=1e-5)


def test_log_probs_match_logits(decoder, parameters, monkeypatch):
    every = jax.nn.log_softmax(jax.jit(decoder.apply)(parameters, TOKENS, SEGMENTS))
    expected = np.zeros((2, 8))
    for n, t in [(0, 3), (0, 4), (0, 6), (0, 7), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]:
        expected[n, t] = every[n, t - 1, TOKENS[n, t]]
    for max_logits in (1 << 20, 3 * V):  # all positions at once, and three at a time
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", max_logits)
        found = jax.jit(lambda p: decoder.log_probs(p, TOKENS, SEGMENTS))(parameters)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    hidden = jax.jit(decoder.hidden)(parameters, TOKENS, SEGMENTS)
    tempered, entropy = decoder.token_log_probs(parameters, hidden, TOKENS, SEGMENTS, temperature=2.0)
    probabilities = jax.nn.softmax(decoder.logits(parameters, hidden)[1, 2] / 2)
    np.testing.assert_allclose(tempered[1, 3], jnp.log(probabilities[TOKENS[1, 3]]), rtol=1e-5)
    np.testing.assert_allclose(entropy[1, 3], -jnp.sum(probabilities * jnp.log(probabilities)), rtol=1e-5)


def test_gradients_with_remat_and_bfloat16(decoder, parameters):
    tokens, segments = TOKENS[:1, :6], SEGMENTS[1:, :6]

    def gradient(**changes):
        other = Decoder(dataclasses.replace(decoder.config, **changes))
        return jax.jit(jax.grad(lambda p: jnp.sum(other.log_probs(p, tokens, segments))))(parameters)

    plain = gradient()
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(gradient(remat=True)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
    bfloat16 = gradient(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(bfloat16)} == {jnp.float32.dtype}
    one, two = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(each)]) for each in (plain, bfloat16))
    assert jnp.linalg.norm(one - two) < 0.05 * jnp.linalg.norm(one)


def test_adapters_start_at_zero_and_merge(decoder, parameters):
    config = dataclasses.replace(decoder.config, lora_rank=2, lora_alpha=6.0)
    adapted = Decoder(config)
    initial = adapted.with_adapters(parameters, jax.random.key(3))
    apply, plain = jax.jit(adapted.apply), jax.jit(decoder.apply)
    expected = plain(parameters, TOKENS, SEGMENTS)
    np.testing.assert_allclose(apply(initial, TOKENS, SEGMENTS), expected, atol=1e-6)
    adapters, base = initial["adapters"], initial["base"]
    changed = {"base": base, "adapters": jax.tree.map(lambda x: x + 0.1, adapters)}
    found = apply(changed, TOKENS, SEGMENTS)
    assert jnp.abs(found - expected).max() > 0.1
    merged = merge_adapters(config, changed)
    np.testing.assert_allclose(plain(merged, TOKENS, SEGMENTS), found, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"hidden_size": 62}, "hidden_size=62 is not divisible by num_heads=4: give head_dim"),
        ({"head_dim": 7}, "head_dim=7: rotary positions need an even width"),
        ({"dtype": "float16"}, "dtype='float16': it must be 'float32' or 'bfloat16'"),
        ({"lora_targets": ("query", "keys")}, r"lora_targets=['keys']: a block has query, key"),
        ({"lora_targets": ["query"]}, "lora_targets=['query']: give a tuple of names"),
        ({"lora_targets": None}, "lora_targets=None: give a tuple of names"),
        ({"lora_alpha": "16"}, "lora_alpha='16': it must be a finite number"),
        ({"lora_alpha": math.nan}, "lora_alpha=nan: it must be a finite number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling={'rope_type': 'linear', 'factor': 2.0}: give pairs, tuple(sorted(...items()))",
        ),
        ({"rope_scaling": (("rope_type", ["a"]),)}, "give pairs, tuple(sorted(...items()))"),
        ({"rope_scaling": 3}, "rope_scaling=3: give pairs, tuple(sorted(...items()))"),
        (
            {"rope_scaling": (("rope_type", "mrope"),)},
            "rope_type='mrope' is not supported: supported are default, linear, dynamic, llama3",
        ),
        ({"num_layers": 0}, "num_layers=0: it must be a whole number above zero"),
    ],
)
def test_invalid_configs(fields, message):
    with refuses(message):
        DecoderConfig.tiny(V, **fields)


def test_yarn_by_its_equations():
    """arXiv 2309.00071, equations 17 to 23: a head of 64 and a context of 2,048 extended by a factor of 4."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = DecoderConfig.tiny(11, head_dim=64, rope_scaling=tuple(sorted(scaling.items())))
    found, attention = rotary_frequencies(config)
    expected = []
    for pair in range(32):
        plain = 10_000.0 ** (-pair / 32)
        # Pairs with 32 or more rotations within the context stay; those with less than one are interpolated.
        low = math.floor(32 * math.log(2048 / (32 * 2 * math.pi)) / math.log(10_000.0))
        high = math.ceil(32 * math.log(2048 / (2 * math.pi)) / math.log(10_000.0))
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        expected.append(plain * (1 - ramp) + plain / 4 * ramp)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert attention == pytest.approx(0.1 * math.log(4.0) + 1)
