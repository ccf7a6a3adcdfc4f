"""Reads GGUF files (llama.cpp's checkpoints) of Llama, Qwen2 and Qwen3, with any quantisation.

        python -m algos.language.gguf MODEL.gguf DIRECTORY   # converts to a Hugging Face directory

Weights become float32, equal to the values that llama.cpp computes with.
"""

import dataclasses
import functools
import io
import json
import math
import os
import re
import sys
import types
from typing import Any, NamedTuple

import numpy as np

from algos.language import weights
from algos.language.config import DecoderConfig
from algos.language.config_keys import check_config_keys
from algos.language.decoder import Decoder
from algos.language.layers import Weights, rotary_frequencies
from algos.language.tensor_files import StoredTensor
from envs.text.tokenizer_files import library_errors
from envs.text.tokenizer_folders import replacing_files
from fdg.arguments import quoted
from fdg.errors import FdgError, one_line
from fdg.reading import open_regular

_FAMILIES = ("llama", "qwen2", "qwen3")

# llama.cpp's names of tensors, and Hugging Face's.
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DIVISORS = "rope_freqs.weight"  # the tensor with divisors of the rotary frequencies
_LLAMA_3_SCALING = {  # `rope_scaling` in the config.json of Llama 3.1 to 3.3, without its factor
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# The pattern of Llama 3 and Qwen2, without the number of `digits` that form a piece.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3 = ("llama3", "llama-v3", "llama-bpe")
_WITHOUT_GPT2_PATTERN = (*_LLAMA_3, "qwen2", "stablelm2")
# The pre-tokenizer's patterns by `tokenizer.ggml.pre`, from llama.cpp's `src/llama-vocab.cpp`. They are
# applied before GPT-2's pattern; those of `_WITHOUT_GPT2_PATTERN` replace it. The key None is for older
# files, which do not name their pre-tokenizer.
_PATTERNS: dict[str | None, tuple[str, ...]] = {
    **dict.fromkeys((None, "gpt-2", "mpt", "olmo"), ()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}",)),
    **dict.fromkeys(_LLAMA_3, (_WORD_PATTERN.format(digits="{1,3}"),)),
    **dict.fromkeys(("qwen2", "stablelm2"), (_WORD_PATTERN.format(digits=""),)),
}
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


def load(file: str | os.PathLike[str], **changes: Any) -> tuple[Decoder, Weights]:
    """A decoder and its parameters (float32, on the host) from a GGUF file.

    `changes` are fields of `DecoderConfig` that the file does not set.

    Raises:
      FdgError: no such file, an unsupported architecture, or tensors of wrong shapes.
    """
    header = _open(file)
    config = _config(header, str(file), changes)
    return Decoder(config), weights.assemble(config, _tensors_by_key(header, config), str(file))


def convert(file: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Converts a GGUF file to a Hugging Face directory: config, weights, tokenizer and chat template.

    Raises:
      FdgError: an error of `load`, or a tokenizer other than byte-level BPE.
    """
    tokenizer, settings = read_tokenizer(file)
    decoder, parameters = load(file)
    texts = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
    written = types.SimpleNamespace(files=lambda: {name: text.encode() for name, text in texts.items()})
    with replacing_files(directory, written) as files:
        weights.save(directory, decoder, parameters, files=files)


class _Header(NamedTuple):
    """The content of a file's header: its values, and its tensors."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def of_kind(self, name: str, kind: type, where: object, default: Any = None) -> Any:
        """A value of one type, or the default."""
        value = self.values.get(name, default)
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise FdgError(f"{where}: {name}={quoted(value)} is not of type {kind.__name__}")
        return value


# GGUF's numbers of the types of values.
_SCALARS = {
    0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, 7: np.bool_,
    10: np.uint64, 11: np.int64, 12: np.float64,
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_STRINGS = 1 << 21  # in an array: more than any vocabulary or its merges have
_MAX_COUNT = 1 << 16  # of values, and of tensors
_MAX_DEPTH = 8  # of arrays in arrays


class _HeaderReader:
    """Reads a header sequentially; checks each length against the file's size before it reads.

    Its methods advance `position`, the number of bytes read so far.
    """

    def __init__(self, file: io.BufferedReader, where: object):
        self._file, self._where = file, where
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.error(f"{count} bytes at {self.position}, and it has {self.size}")
        self.position += count
        return self._file.read(count)

    def numbers(self, dtype: Any, count: int) -> np.ndarray:
        return np.frombuffer(self.bytes(count * np.dtype(dtype).itemsize), np.dtype(dtype).newbyteorder("<"))

    def scalar(self, dtype: Any = np.uint64, limit: int | None = None) -> Any:
        scalar = self.numbers(dtype, 1)[0].item()
        if limit is not None and scalar > limit:
            raise self.error(f"{scalar} at {self.position}, where at most {limit} can be")
        return scalar

    def text(self) -> str:
        content = self.bytes(self.scalar())
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.error(f"no UTF-8 at {self.position - len(content)}") from None

    def value(self) -> Any:
        kind = self.scalar(np.uint32)
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.error(f"a value of type {kind} at {self.position}")
        return self.array()

    def array(self, depth: int = 1) -> Any:
        """An array of numbers, or a list of texts or of arrays."""
        inner, count = self.scalar(np.uint32), self.scalar()
        if inner == _STRING and count <= min(_MAX_STRINGS, (self.size - self.position) // 8):
            return [self.text() for _ in range(count)]
        if inner == _ARRAY and count <= (self.size - self.position) // 12:
            if depth == _MAX_DEPTH:
                raise self.error(f"arrays in arrays, more than {_MAX_DEPTH} deep, at {self.position}")
            arrays = [self.array(depth + 1) for _ in range(count)]
            return [array.tolist() if isinstance(array, np.ndarray) else array for array in arrays]
        if inner not in _SCALARS:
            raise self.error(f"an array of {count} values of type {inner} at {self.position}")
        return self.numbers(_SCALARS[inner], count)

    def error(self, what: str) -> FdgError:
        return FdgError(f"{self._where}: is not a complete GGUF file: its header says {what}")


def _open(file: str | os.PathLike[str]) -> _Header:
    """Reads and checks the header of a file; its tensors are read later."""
    try:
        import gguf
    except ImportError:
        raise FdgError(
            f"{file}: GGUF files need the package gguf, which is not installed: pip install 'fdg[gguf]'"
        ) from None
    values: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    where = str(file)
    with open_regular(file) as opened:
        reader = _HeaderReader(opened, where)
        magic, version = reader.bytes(4), reader.scalar(np.uint32)
        if magic != b"GGUF" or version not in (2, 3):
            raise reader.error(f"{magic!r}, version {version}; known are 2 and 3")
        num_tensors, num_values = reader.scalar(limit=_MAX_COUNT), reader.scalar(limit=_MAX_COUNT)
        for _ in range(num_values):
            name = reader.text()
            if name in values:
                raise reader.error(f"{name:.60!r} twice")
            values[name] = reader.value()
        entries = []
        for _ in range(num_tensors):
            name = reader.text()
            shape = reader.numbers(np.uint64, reader.scalar(np.uint32, limit=8)).tolist()[::-1]
            entries.append((name, shape, reader.scalar(np.uint32), reader.scalar()))
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0:
            raise FdgError(
                f"{file}: general.alignment={quoted(alignment)} in its header must be an integer above 0:"
                " convert the model again"
            )
        start = -(-reader.position // alignment) * alignment
    for name, shape, type_number, offset in entries:
        try:
            kind = gguf.GGMLQuantizationType(type_number)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise reader.error(f"'{name:.60}' of type {type_number}, which is not known") from None
        length = math.prod(shape) // block * size
        if name in tensors or not shape or shape[-1] % block or start + offset + length > reader.size:
            raise reader.error(f"'{name:.60}' is {shape} of type {kind.name} at {start + offset}")
        decode = functools.partial(_decode, kind, shape[-1] // block * size, where)
        tensors[name] = StoredTensor(where, tuple(shape), start + offset, length, decode)
    if tensors and sum(tensor.size for tensor in tensors.values()) > reader.size - start:
        raise reader.error("that tensors overlap")
    header = _Header(values, tensors)
    if (parts := header.of_kind("split.count", int, where, 1)) > 1:
        number = header.of_kind("split.no", int, where, 0) + 1
        raise FdgError(
            f"{where}: is part {number} of {parts}: merge them, llama-gguf-split --merge PART_1 FILE"
        )
    return header


def _decode(kind: Any, row_bytes: int, where: str, content: np.ndarray) -> np.ndarray:
    """The float32 numbers of a tensor's bytes, `[size]` uint8, by its quantisation `kind`."""
    from gguf.quants import dequantize

    try:
        return dequantize(content.reshape(-1, row_bytes), kind)
    except NotImplementedError:
        raise FdgError(f"{where}: tensors of type {kind.name} are not read") from None


def _config(header: _Header, file: str, changes: dict[str, Any]) -> DecoderConfig:
    """The config of a file, with changed fields; raises an `FdgError` if it is not supported."""
    tensors = header.tensors
    family = header.of_kind("general.architecture", str, file)
    if family not in _FAMILIES:
        raise FdgError(
            f"{file}: architecture {quoted(family)} is not a supported decoder: supported are"
            f" {', '.join(_FAMILIES)}"
        )
    if header.of_kind(f"{family}.rope.scaling.type", str, file, "none") not in ("none", ""):
        raise _scaling_error(file)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FdgError(f"{file}: has no matrix token_embd.weight: convert the model again")

    def field(name: str, kind: type = int, default: Any = None) -> Any:
        value = header.of_kind(f"{family}.{name}", kind, file, default)
        if value is None:
            raise FdgError(f"{file}: its metadata has no {family}.{name}: convert the model again")
        return value

    heads = field("attention.head_count")
    read: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_layers": field("block_count"),
        "num_heads": heads,
        "num_kv_heads": field("attention.head_count_kv", default=heads),
        "head_dim": header.of_kind(f"{family}.attention.key_length", int, file),
        "rope_theta": field("rope.freq_base", float, 10_000.0),
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon', float):.6g}"),
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "qk_norm": family == "qwen3",
        "max_positions": field("context_length", default=2048),
    }
    try:
        config = DecoderConfig(**{**read, **changes})
    except FdgError as error:
        raise FdgError(f"{file}: {str(error).partition(': ')[2]}") from None
    if _DIVISORS in tensors:
        config = _with_llama_3_scaling(config, tensors[_DIVISORS].read(), file)
    _check_keys(header, family, config, file)
    return config


def _with_llama_3_scaling(config: DecoderConfig, divisors: np.ndarray, file: str) -> DecoderConfig:
    """The config with Llama 3's scaling, whose divisors of the rotary frequencies must be these, `[h / 2]`.

    The divisors are all that the file says about the scaling: the other numbers are those of Llama 3.1 to
    3.3, and the factor is the largest divisor. Raises an `FdgError` if the divisors are others.
    """
    factor = divisors.max(initial=0.0)
    if divisors.shape != (config.width // 2,) or not 1 <= factor < math.inf:
        raise _scaling_error(file)
    scaling = {**_LLAMA_3_SCALING, "factor": float(factor)}
    scaled = dataclasses.replace(config, rope_scaling=tuple(sorted(scaling.items())))
    expected = rotary_frequencies(config)[0] / rotary_frequencies(scaled)[0]
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise _scaling_error(file)
    return scaled


def _scaling_error(file: str) -> FdgError:
    return FdgError(f"{file}: it scales rotary positions, which is not supported in GGUF files")


# Keys of a family that do not affect logits.
_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.original_context_length")


def _check_keys(header: _Header, family: str, config: DecoderConfig, where: str) -> None:
    """Refuses keys about the network that `_config` does not read."""
    read = {"embedding_length", "feed_forward_length", "block_count", "attention.head_count"}
    read |= {"attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.scaling.type"}
    read |= {"attention.layer_norm_rms_epsilon", "context_length"}
    # Keys that are accepted only with these values.
    neutral_values: dict[str, Any] = dict.fromkeys(
        ("rope.dimension_count", "attention.value_length"), config.width
    )
    neutral_values |= {"rope.scaling.factor": 1.0, "attention.causal": True}
    values = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in header.values.items()
        if name.startswith(f"{family}.") and value is not None
    }
    neutral = [name for name, value in neutral_values.items() if values.get(f"{family}.{name}") == value]
    known = [f"{family}.{name}" for name in (*read, *neutral, *_IGNORED)]
    check_config_keys(values, known, where, (), "convert it from Hugging Face's checkpoint, or take another")


def _tensors_by_key(header: _Header, config: DecoderConfig) -> dict[str, StoredTensor]:
    """The tensors by Hugging Face's names, with the rows of heads in Hugging Face's order."""
    has_rotary_pairs = header.values["general.architecture"] == "llama"
    tensors = {}
    for name, tensor in header.tensors.items():
        if name == _DIVISORS:
            continue
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        other = re.fullmatch(r"(\w+)\.weight", name)
        if block and block[2] in _BLOCK_NAMES:
            key = f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
        elif other and other[1] in _OTHER_NAMES:
            key = f"{_OTHER_NAMES[other[1]]}.weight"
        else:
            key = name
        if has_rotary_pairs and block and block[2] in ("attn_q", "attn_k"):
            heads = config.num_heads if block[2] == "attn_q" else config.num_kv_heads
            decode = functools.partial(_split_pairs, heads, config.width, tensor.shape, tensor.decode)
            tensor = tensor._replace(decode=decode)
        tensors[key] = tensor
    return tensors


def _split_pairs(
    heads: int, width: int, shape: tuple[int, ...], decode: Any, content: np.ndarray
) -> np.ndarray:
    """Decodes a Llama's queries or keys; moves rows 2i and 2i + 1 of each head to i and i + width / 2."""
    # These two rows are a rotary pair, which llama.cpp stores side by side.
    return decode(content).reshape(heads, width // 2, 2, *shape[1:]).swapaxes(1, 2)


def read_tokenizer(file: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """A file's tokenizer (`tokenizers.Tokenizer`), and the contents of `tokenizer_config.json`."""
    header = _open(file)
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError:
        raise FdgError("tokenizers are needed: pip install 'fdg[language]'") from None

    kind, pattern = (header.of_kind(f"tokenizer.ggml.{name}", str, file) for name in ("model", "pre"))
    if kind != "gpt2":
        raise FdgError(
            f"{file}: its tokenizer is {quoted(kind)}, and only byte-level BPE ('gpt2') is converted"
        )
    patterns = _PATTERNS.get(pattern)
    if patterns is None:
        raise FdgError(
            f"{file}: tokenizer.ggml.pre={quoted(pattern)}, and only {', '.join(filter(None, _PATTERNS))} are"
            " converted: take tokenizer.json of Hugging Face's checkpoint"
        )
    words, merges = (
        header.of_kind(f"tokenizer.ggml.{name}", list, file, []) for name in ("tokens", "merges")
    )
    token_types = header.of_kind("tokenizer.ggml.token_type", np.ndarray, file, np.zeros(0, int))
    try:
        vocabulary = {word: i for i, word in enumerate(words)}
        pairs = [tuple(pair.split(" ")) for pair in merges]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pattern in _LLAMA_3))
    except Exception as error:  # the library raises bare Exceptions
        raise FdgError(f"{file}: its tokenizer cannot be made: {one_line(error)}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(regex), "isolated") for regex in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern not in _WITHOUT_GPT2_PATTERN),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for add, number in ((tokenizer.add_special_tokens, _CONTROL), (tokenizer.add_tokens, _USER_DEFINED)):
        added = [word for word, x in zip(words, token_types.tolist(), strict=False) if x == number]
        add([AddedToken(word, special=number == _CONTROL, normalized=False) for word in added])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token_id = header.of_kind(f"tokenizer.ggml.{key}_token_id", int, file)
        if token_id is not None:
            if not 0 <= token_id < len(words):
                raise FdgError(f"{file}: tokenizer.ggml.{key}_token_id={token_id}, of {len(words)} tokens")
            settings[name] = words[token_id]

    def boundary(name: str, by_default: bool) -> list[str]:
        """The token of this name, if it is added to each text; else an empty list."""
        adds = header.values.get(f"tokenizer.ggml.add_{name}_token", by_default)
        return [settings[f"{name}_token"]] if adds is True and f"{name}_token" in settings else []

    begin, end = boundary("bos", pattern in _LLAMA_3), boundary("eos", False)
    if begin or end:
        special_tokens = [(word, words.index(word)) for word in dict.fromkeys((*begin, *end))]
        with library_errors(f"{file}: its tokenizer"):
            tokenizer.post_processor = processors.TemplateProcessing(
                [*begin, "$A", *end], [*begin, "$A", "$B", *end], special_tokens
            )
    key = "tokenizer.chat_template"  # further templates have a name after it
    templates = [
        {"name": name[len(key) + 1 :] or "default", "template": text}
        for name in header.values
        if (name == key or name.startswith(f"{key}.")) and (text := header.of_kind(name, str, file))
    ]
    if templates:
        is_plain = [template["name"] for template in templates] == ["default"]
        settings["chat_template"] = templates[0]["template"] if is_plain else templates
    return tokenizer, settings


if __name__ == "__main__":
    try:
        convert(*sys.argv[1:3])
    except (FdgError, TypeError) as error:
        sys.exit(f"{error if isinstance(error, FdgError) else __doc__}")
