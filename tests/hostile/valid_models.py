"""Tiny valid checkpoints, tokenizers and exported policies, which `model_folders` corrupts."""

import dataclasses
import functools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

import fdg
from algos.language import Decoder, DecoderConfig, peft, weights
from tests.hostile import driver
from tests.training.trained import small

FAMILIES = {
    "llama": {},
    "biased": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": False},
}
TOKENIZERS = ("BPE", "WordPiece", "WordLevel", "Unigram")
SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"


@functools.cache
def _parameters(family: str) -> tuple[Decoder, Any]:
    config = DecoderConfig.tiny(
        120,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        max_positions=64,
        **FAMILIES[family],
    )
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    draw = np.random.default_rng(0)
    return Decoder(config), jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


def _tokenizer(kind: str) -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *map(chr, range(32, 127))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = {
        "BPE": lambda: models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"),
        "WordPiece": lambda: models.WordPiece(vocab=vocabulary, unk_token="<unk>"),
        "WordLevel": lambda: models.WordLevel(vocab=vocabulary, unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0),
    }[kind]()
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\t", " ")])
    pattern = tokenizers.Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    made.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    made.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return made


def valid_folder(
    folder: Path, family: str, kind: str, sharded: bool, dtype: str, adapters: bool = False
) -> None:
    """Writes a checkpoint as Hugging Face's library does, optionally with adapters as PEFT does."""
    weights.save(folder, *_parameters(family), shard_bytes=4000 if sharded else 1 << 30, dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "pad_token_id": 0}))
    words = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    if adapters:
        _save_adapters(folder, family)


def _save_adapters(folder: Path, family: str) -> None:
    config = dataclasses.replace(_parameters(family)[0].config, lora_rank=2, lora_targets=("query", "up"))
    decoder = Decoder(config)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    peft.save(folder, decoder, jax.tree.map(lambda x: np.full(x.shape, 0.01, np.float32), shapes))


def valid_gguf(path: Path, family: str) -> None:
    """Writes a file as llama.cpp does, with a byte-level tokenizer of three tokens."""
    c = _parameters(family)[0].config
    arch = {"biased": "llama", "mistral": "llama"}.get(family, family)

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def texts(values: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))

    numbers = {
        "block_count": c.num_layers, "embedding_length": c.hidden_size, "context_length": c.max_positions,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads, "attention.key_length": c.width,
    }  # fmt: skip
    values = [text("general.architecture") + struct.pack("<I", 8) + text(arch)]
    values += [text(f"{arch}.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    values += [
        text(f"{arch}.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"),
        text("tokenizer.ggml.tokens") + struct.pack("<I", 9) + texts(["a", "b", "ab"]),
        text("tokenizer.ggml.merges") + struct.pack("<I", 9) + texts(["a b"]),
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 1, 1, 1),
        text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
    ]
    there = {"embed_tokens": "token_embd", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
             "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_norm": "attn_q_norm",
             "k_norm": "attn_k_norm"}  # fmt: skip
    infos, data = [], b""
    for key, (_, shape, _) in weights.tensor_table(c).items():
        *start, name, suffix = key.split(".")
        place = {"norm": "output_norm", "lm_head": "output"}.get(name, there.get(name, name))
        full = f"blk.{start[2]}.{place}.{suffix}" if "layers" in start else f"{place}.{suffix}"
        content = np.full(shape, 0.01, np.float32).tobytes()
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos.append(text(full) + sizes + struct.pack("<IQ", 0, len(data)))
        data += content + bytes(-len(content) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values)) + b"".join([*values, *infos])
    path.write_bytes(header + bytes(-len(header) % 32) + data)


@functools.cache
def valid_package(kind: str) -> bytes:
    """The bytes of a file that `run.export` writes."""
    made = {"ppo": small(), "memory": small("recurrent_ppo", memory_size=4)}[kind]
    folder = driver.scratch()
    try:
        run = fdg.Run(made, jax.jit(made.init)(jax.random.key(1)), 0)
        return run.export(folder / "policy.jax", greedy=kind == "memory").read_bytes()
    finally:
        shutil.rmtree(folder)
