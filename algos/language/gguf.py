"""GGUF files (llama.cpp's checkpoints), read: Llama, Qwen2 and Qwen3, whatever their quantisation.

    python -m algos.language.gguf MODEL.gguf DIRECTORY   # Hugging Face's directory of it, with its tokenizer

Weights are made float32; the quantised numbers are those that llama.cpp computes with.
"""

import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from algos.language import weights
from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.language.layers import Weights
from fdg.errors import FdgError, one_line

_FAMILIES = ("llama", "qwen2", "qwen3")

_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load(file: str | os.PathLike[str], **changes: Any) -> tuple[Decoder, Weights]:
    """A decoder and its parameters (float32, on the host) from a GGUF file.

    Args:
      file: of a Llama, Qwen2 or Qwen3.
      changes: fields of `DecoderConfig` that the file does not say.

    Raises:
      FdgError: no such file, another architecture, or tensors that do not fit it.
    """
    reader = _open(file)
    config = _config(reader, str(file), changes)
    return Decoder(config), weights.assemble(config, _tensors(reader, config), str(file))


def convert(file: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Writes Hugging Face's directory of a GGUF file: config, weights, tokenizer and chat template.

    Raises:
      FdgError: as `load`; a tokenizer of another kind than byte-level BPE.
    """
    tokenizer, settings = read_tokenizer(file)
    decoder, parameters = load(file)
    weights.save(directory, decoder, parameters)
    folder = pathlib.Path(directory)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _open(file: str | os.PathLike[str]) -> Any:
    try:
        import gguf
    except ImportError:
        raise FdgError("GGUF files need gguf: pip install 'fdg[gguf]'") from None
    if not os.path.isfile(file):
        raise FdgError(f"{file}: no such file: give a GGUF file")
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise FdgError(f"{file}: is no GGUF file, or not whole: {one_line(error)}") from None


def _field(reader: Any, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _config(reader: Any, file: str, changes: dict[str, Any]) -> DecoderConfig:
    family = _field(reader, "general.architecture")
    if family not in _FAMILIES:
        raise FdgError(
            f"{file}: architecture {family!r} is no decoder that can be read: known are"
            f" {', '.join(_FAMILIES)}"
        )
    if _field(reader, f"{family}.rope.scaling.type", "none") not in ("none", ""):
        raise FdgError(f"{file}: its rotary positions are stretched, which is not read from GGUF files")
    names = {tensor.name: tensor for tensor in reader.tensors}

    def number(name: str, default: Any = None) -> Any:
        found = _field(reader, f"{family}.{name}", default)
        if found is None:
            raise FdgError(f"{file}: has no {family}.{name}")
        return found

    heads, width = number("attention.head_count"), number("embedding_length")
    read: dict[str, Any] = {
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_layers": number("block_count"),
        "num_heads": heads,
        "num_kv_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", width // heads),
        "rope_theta": float(number("rope.freq_base", 10_000.0)),
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_embeddings": "output.weight" not in names,
        "qkv_bias": "blk.0.attn_q.bias" in names,
        "output_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "qk_norm": family == "qwen3",
        "max_positions": number("context_length", 2048),
    }
    return DecoderConfig(**{**read, **changes})


def _tensors(reader: Any, config: DecoderConfig) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors by Hugging Face's keys."""
    from gguf.quants import dequantize

    turned = _field(reader, "general.architecture") == "llama"
    for tensor in reader.tensors:
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        whole = re.fullmatch(r"(\w+)\.weight", tensor.name)
        if block and block[2] in _NAMES:
            key = f"model.layers.{block[1]}.{_NAMES[block[2]]}.{block[3]}"
        elif whole and whole[1] in _WHOLE:
            key = f"{_WHOLE[whole[1]]}.weight"
        else:
            key = tensor.name
        array = dequantize(tensor.data, tensor.tensor_type)
        if turned and block and block[2] in ("attn_q", "attn_k"):
            # llama.cpp turns pairs (2i, 2i + 1) of a Llama's heads, and has its rows in that order.
            heads = config.num_heads if block[2] == "attn_q" else config.num_kv_heads
            pairs = array.reshape(heads, config.width // 2, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        yield key, array


def read_tokenizer(file: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """A file's tokenizer (`tokenizers.Tokenizer`), and the contents of `tokenizer_config.json`.

    Raises:
      FdgError: no such file, or a tokenizer of another kind than byte-level BPE.
    """
    reader = _open(file)
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise FdgError("tokenizers are needed: pip install 'fdg[language]'") from None

    kind, pattern = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise FdgError(f"{file}: its tokenizer is {kind!r}, and only byte-level BPE ('gpt2') is converted")
    words = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pattern == "smollm" else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type", [])
    control = [words[i] for i, each in enumerate(kinds) if each == 3]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        at = _field(reader, f"tokenizer.ggml.{key}_token_id")
        if at is not None:
            settings[name] = words[at]
    template = _field(reader, "tokenizer.chat_template")
    return tokenizer, settings | ({"chat_template": template} if template else {})


if __name__ == "__main__":
    try:
        convert(*sys.argv[1:3])
    except (FdgError, TypeError) as error:
        sys.exit(f"{error if isinstance(error, FdgError) else __doc__}")
