"""Keys of `config.json`: each is read, ignored, or refused by name."""

import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.language import Decoder, DecoderConfig
from algos.language.config_keys import IGNORED, NEUTRAL
from fdg.errors import FdgError

FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
}  # fmt: skip
# Options of other architectures that a checkpoint of these families could have.
OPTIONS = (
    "final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar embedding_multiplier logits_scaling"
    " residual_multiplier attention_multiplier scale_emb scale_depth dim_model_base no_rope_layers"
    " num_local_experts num_experts_per_tok quantization_config text_config clip_qkv use_qk_norm norm_type"
    " partial_rotary_factor rope_interleaved use_parallel_residual attention_sink expert_layers head_scale"
    " is_encoder_decoder bidirectional pruned_heads layer_scale block_types alibi num_nextn_predict_layers"
).split()


def random_config(seed):
    """A random generator, a random configuration of a random family, and its `config.json`."""
    draw = random.Random(seed)
    heads, width = draw.choice([2, 4]), draw.choice([8, 16])
    options = {
        "hidden_size": heads * width, "num_heads": heads, "num_kv_heads": draw.choice([1, 2]),
        "num_layers": draw.randint(1, 5), "rope_theta": draw.choice([1e4, 5e5]), "head_dim": width,
        "max_positions": draw.choice([64, 4096]), "tie_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    family = draw.choice(list(FAMILIES))
    options |= FAMILIES[family]
    rope = draw.choice([None, {"factor": 2.0}, {"factor": 4.0, "rope_type": "yarn", "beta_fast": 16.0}])
    if rope:
        options["rope_scaling"] = tuple(
            sorted({"rope_type": draw.choice(["linear", "dynamic"]), **rope}.items())
        )
    if family == "llama":
        biased = draw.random() < 0.5
        options |= {"qkv_bias": biased, "output_bias": biased, "mlp_bias": draw.random() < 0.5}
    if family in ("qwen2", "qwen3") and draw.random() < 0.5:
        options |= {"sliding_window": 16, "first_sliding_layer": draw.randrange(options["num_layers"])}
    return draw, DecoderConfig(50, **options), DecoderConfig(50, **options).to_hugging_face()


def assert_refused(found, *words):
    with pytest.raises(FdgError) as error:
        DecoderConfig.from_hugging_face(found)
    text = str(error.value)
    assert text.startswith(("config.json: ", "DecoderConfig: ")) and "\n" not in text and len(text) < 500
    assert all(word in text for word in words), text


@pytest.mark.parametrize("seed", range(40))
def test_random_configs(seed):
    draw, config, found = random_config(seed)
    assert DecoderConfig.from_hugging_face(json.loads(json.dumps(found))) == config
    ignored = {key: draw.choice([3, "x", {"a": 1}, True]) for key in draw.sample(sorted(IGNORED), 5)}
    neutral = {
        key: draw.choice([None, False, 0, "", [], {}])
        for key in draw.sample(OPTIONS, 4)
        if key not in NEUTRAL
    }
    shuffled = [*{**ignored, **neutral, **NEUTRAL, "_private": 1, **found}.items()]
    draw.shuffle(shuffled)
    assert DecoderConfig.from_hugging_face(dict(shuffled)) == config
    key = draw.choice([*OPTIONS, "".join(draw.choices("abcdefgh_", k=9)).strip("_")])
    value = draw.choice([2, 0.5, "a name", [1], {"b": 2}])
    assert_refused({**dict(shuffled), key: value}, f"{key}={value!r} is not supported")


def test_options_of_other_families_are_refused():
    plain = DecoderConfig.tiny(50).to_hugging_face()
    assert_refused({**plain, "sliding_window": 4096}, "sliding_window=4096 is not supported")
    assert_refused(
        {**plain, "model_type": "mistral", "attention_bias": True}, "attention_bias=True is not supported"
    )
    assert_refused({**plain, "is_causal": False}, "is_causal=False is not supported")
    assert_refused({**plain, "a\nb" * 50: 1}, "is not supported")


def test_sliding_window_layers():
    base = DecoderConfig.tiny(50, qkv_bias=True, num_layers=4).to_hugging_face()
    base |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    read = DecoderConfig.from_hugging_face({**base, "layer_types": kinds})  # overrides max_window_layers
    assert (read.sliding_window, read.first_sliding_layer) == (8, 2)
    none = DecoderConfig.from_hugging_face({**base, "layer_types": ["full_attention"] * 4})
    assert none.sliding_window is None
    assert_refused({**base, "layer_types": kinds[::-1]}, "layer_types=['sliding_attention'")
    assert_refused({**base, "layer_types": kinds[:3]}, "layer_types has 3 layers, and num_hidden_layers=4")
    for key in ("max_window_layers", "layer_types"):
        base.pop(key, None)
    assert DecoderConfig.from_hugging_face(base).sliding_window is None, "28 layers of Qwen2's do not slide"


def test_defaults_of_transformers():
    found = DecoderConfig.tiny(50, num_heads=8, num_kv_heads=8).to_hugging_face()
    minimal = {key: found[key] for key in found if key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )}  # fmt: skip
    mistral = DecoderConfig.from_hugging_face({**minimal, "model_type": "mistral"})
    assert (mistral.sliding_window, mistral.num_kv_heads, mistral.max_positions) == (4096, 8, 131_072)
    assert (
        DecoderConfig.from_hugging_face(
            {**minimal, "model_type": "mistral", "sliding_window": None}
        ).sliding_window
        is None
    )
    llama = DecoderConfig.from_hugging_face({**minimal, "model_type": "llama"})
    assert (llama.num_kv_heads, llama.max_positions, llama.tie_embeddings) == (8, 2048, False)
    wide = {**minimal, "model_type": "qwen3", "num_key_value_heads": 4}
    assert DecoderConfig.from_hugging_face(wide).head_dim == 128


def test_large_rope_theta_and_numpy_numbers():
    config = DecoderConfig.tiny(np.int64(50), rope_theta=10**10, initializer_range=np.float32(0.5))
    written = json.dumps(config.to_hugging_face())
    assert '"vocab_size": 50,' in written and '"rope_theta": 10000000000,' in written
    assert DecoderConfig.from_hugging_face(json.loads(written)) == config


@pytest.mark.parametrize(
    "window", [{}, {"sliding_window": 8}, {"sliding_window": 8, "first_sliding_layer": 1}]
)
def test_every_combination_is_written_or_refused(window):
    names, refused = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm"), 0
    for values in itertools.product([False, True], repeat=4):
        config = DecoderConfig.tiny(17, **dict(zip(names, values, strict=True)), **window)
        try:
            written = config.to_hugging_face()
        except FdgError:
            refused += 1
        else:
            assert DecoderConfig.from_hugging_face(written) == config
    assert refused < 16


INVALID_ROPES = [
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "rope_scaling of 'linear': beta_fast=3.0"),
    ({"factor": 2.0}, "rope_scaling of 'default': factor=2.0 is not supported"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}, "long_factor missing"),
    ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}, "has 1 numbers"),
    (
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [0.0] * 8, "long_factor": [1.0] * 8},
        "above zero",
    ),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section=(1, 2) is not supported"),
    ({"rope_type": ["yarn"]}, "rope_type=('yarn',) is not supported: supported are"),
    ({"full_attention": {"rope_type": "default"}}, "it must be an object of numbers and names"),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "message"), INVALID_ROPES)
def test_invalid_rope_scaling_is_refused(rope, message):
    found = DecoderConfig.tiny(50).to_hugging_face()
    assert_refused({**found, "rope_scaling": rope}, message)
    with pytest.raises(FdgError):
        DecoderConfig.from_hugging_face({**found, "rope_scaling": None, "rope_parameters": rope})


def test_rope_settings_in_two_places():
    found = DecoderConfig.tiny(50).to_hugging_face()
    yarn = {"rope_type": "yarn", "rope_theta": 7e4}
    read = DecoderConfig.from_hugging_face(
        {**found, "rope_scaling": yarn, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    )
    assert (read.rope_theta, read.trained_positions, read.rope["factor"]) == (7e4, 128, 4.0)


def test_dynamic_rope_ignores_the_trained_context():
    """Transformers accepts the key for this type, and computes with `max_position_embeddings`."""
    found = DecoderConfig.tiny(50).to_hugging_face()
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    one, other = (
        DecoderConfig.from_hugging_face({**found, "rope_scaling": rope})
        for rope in (dynamic, {**dynamic, "original_max_position_embeddings": 64})
    )
    assert one == other


def test_dynamic_rope_by_its_equation():
    """The base grows with the length: theta (factor length / context - (factor - 1)) ^ (h / (h - 2))."""
    scaling = (("factor", 3.0), ("rope_type", "dynamic"))
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_size": 16, "max_positions": 8}
    plain = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5))
    dynamic = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5, rope_scaling=scaling))
    parameters = jax.jit(plain.init)(jax.random.key(0))
    tokens = jnp.arange(20)[None] % 11
    one = jnp.ones((1, 20), jnp.int32)
    packed = jnp.asarray([[1] * 8 + [2] * 6 + [0] * 6])
    np.testing.assert_array_equal(  # sequences within the context, also next to others in a packed row
        dynamic.apply(parameters, tokens, packed)[:, :14], plain.apply(parameters, tokens, packed)[:, :14]
    )
    base = 10_000 * (3.0 * 20 / 8 - 2.0) ** (8 / 6)
    grown = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5, rope_theta=base))
    found = dynamic.apply(parameters, tokens, one)
    np.testing.assert_allclose(found, grown.apply(parameters, tokens, one), atol=1e-5)
    assert np.abs(found - plain.apply(parameters, tokens, one)).max() > 1e-3
