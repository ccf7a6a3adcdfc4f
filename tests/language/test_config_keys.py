"""Keys of `config.json`: each is read, changes nothing, or is refused by its name."""

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
# Options of other networks that checkpoints of these families could have, or do.
OPTIONS = (
    "final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar embedding_multiplier logits_scaling"
    " residual_multiplier attention_multiplier scale_emb scale_depth dim_model_base no_rope_layers"
    " num_local_experts num_experts_per_tok quantization_config text_config clip_qkv use_qk_norm norm_type"
    " partial_rotary_factor rope_interleaved use_parallel_residual attention_sink expert_layers head_scale"
    " is_encoder_decoder bidirectional pruned_heads layer_scale block_types alibi num_nextn_predict_layers"
).split()


def files(seed):
    """A random network of some family, and its `config.json`."""
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


def refused(found, *words):
    with pytest.raises(FdgError) as error:
        DecoderConfig.from_hugging_face(found)
    said = str(error.value)
    assert said.startswith(("config.json: ", "DecoderConfig: ")) and "\n" not in said and len(said) < 500
    assert all(word in said for word in words), said


@pytest.mark.parametrize("seed", range(40))
def test_random_configs_are_read_as_written_and_with_one_more_option_refused(seed):
    draw, config, found = files(seed)
    assert DecoderConfig.from_hugging_face(json.loads(json.dumps(found))) == config
    harmless = {key: draw.choice([3, "x", {"a": 1}, True]) for key in draw.sample(sorted(IGNORED), 5)}
    silent = {
        key: draw.choice([None, False, 0, "", [], {}])
        for key in draw.sample(OPTIONS, 4)
        if key not in NEUTRAL
    }
    shuffled = [*{**harmless, **silent, **NEUTRAL, "_private": 1, **found}.items()]
    draw.shuffle(shuffled)
    assert DecoderConfig.from_hugging_face(dict(shuffled)) == config
    key = draw.choice([*OPTIONS, "".join(draw.choices("abcdefgh_", k=9)).strip("_")])
    value = draw.choice([2, 0.5, "a name", [1], {"b": 2}])
    refused({**dict(shuffled), key: value}, f"{key}={value!r} is not supported")


def test_what_only_other_families_have_is_refused():
    plain = DecoderConfig.tiny(50).to_hugging_face()
    refused({**plain, "sliding_window": 4096}, "sliding_window=4096 is not supported")
    refused(
        {**plain, "model_type": "mistral", "attention_bias": True}, "attention_bias=True is not supported"
    )
    refused({**plain, "is_causal": False}, "is_causal=False is not supported")
    refused({**plain, "a\nb" * 50: 1}, "is not supported")


def test_layers_that_slide_come_last():
    base = DecoderConfig.tiny(50, qkv_bias=True, num_layers=4).to_hugging_face()
    base |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    read = DecoderConfig.from_hugging_face({**base, "layer_types": kinds})  # which go first
    assert (read.sliding_window, read.first_sliding_layer) == (8, 2)
    none = DecoderConfig.from_hugging_face({**base, "layer_types": ["full_attention"] * 4})
    assert none.sliding_window is None
    refused({**base, "layer_types": kinds[::-1]}, "layer_types=['sliding_attention'")
    refused({**base, "layer_types": kinds[:3]}, "layer_types has 3 layers, and num_hidden_layers=4")
    for key in ("max_window_layers", "layer_types"):
        base.pop(key, None)
    assert DecoderConfig.from_hugging_face(base).sliding_window is None, "28 layers of Qwen2's do not slide"


def test_what_a_file_leaves_out_is_what_transformers_would_have():
    found = DecoderConfig.tiny(50, num_heads=8, num_kv_heads=8).to_hugging_face()
    bare = {key: found[key] for key in found if key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    )}  # fmt: skip
    mistral = DecoderConfig.from_hugging_face({**bare, "model_type": "mistral"})
    assert (mistral.sliding_window, mistral.num_kv_heads, mistral.max_positions) == (4096, 8, 131_072)
    assert (
        DecoderConfig.from_hugging_face(
            {**bare, "model_type": "mistral", "sliding_window": None}
        ).sliding_window
        is None
    )
    llama = DecoderConfig.from_hugging_face({**bare, "model_type": "llama"})
    assert (llama.num_kv_heads, llama.max_positions, llama.tie_embeddings) == (8, 2048, False)
    wide = {**bare, "model_type": "qwen3", "num_key_value_heads": 4}
    assert DecoderConfig.from_hugging_face(wide).head_dim == 128


ROPES = [
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


@pytest.mark.parametrize(("rope", "said"), ROPES)
def test_positions_that_are_not_known_are_named(rope, said):
    found = DecoderConfig.tiny(50).to_hugging_face()
    refused({**found, "rope_scaling": rope}, said)
    with pytest.raises(FdgError):
        DecoderConfig.from_hugging_face({**found, "rope_scaling": None, "rope_parameters": rope})


def test_where_positions_are_said_in_two_places():
    found = DecoderConfig.tiny(50).to_hugging_face()
    yarn = {"rope_type": "yarn", "rope_theta": 7e4}
    read = DecoderConfig.from_hugging_face(
        {**found, "rope_scaling": yarn, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    )
    assert (read.rope_theta, read.trained_positions, read.rope["factor"]) == (7e4, 128, 4.0)


def test_dynamic_positions_are_by_their_equation():
    """A base that grows with the text: theta (factor length / context - (factor - 1)) ^ (h / (h - 2))."""
    scaling = (("factor", 3.0), ("rope_type", "dynamic"))
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "hidden_size": 16, "max_positions": 8}
    plain = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5))
    dynamic = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5, rope_scaling=scaling))
    parameters = jax.jit(plain.init)(jax.random.key(0))
    tokens = jnp.arange(20)[None] % 11
    one = jnp.ones((1, 20), jnp.int32)
    packed = jnp.asarray([[1] * 8 + [2] * 6 + [0] * 6])
    np.testing.assert_array_equal(  # texts within the context, whatever stands next to them
        dynamic.apply(parameters, tokens, packed)[:, :14], plain.apply(parameters, tokens, packed)[:, :14]
    )
    base = 10_000 * (3.0 * 20 / 8 - 2.0) ** (8 / 6)
    grown = Decoder(DecoderConfig.tiny(11, **sizes, initializer_range=0.5, rope_theta=base))
    found = dynamic.apply(parameters, tokens, one)
    np.testing.assert_allclose(found, grown.apply(parameters, tokens, one), atol=1e-5)
    assert np.abs(found - plain.apply(parameters, tokens, one)).max() > 1e-3
