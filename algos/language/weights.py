"""Reads and writes checkpoints in Hugging Face's format (`config.json`, `*.safetensors`).

Kernels are [in, out] here and [out, in] in the files. A checkpoint is first written to a temporary folder, so
that the previous checkpoint stays complete until the new one is complete.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.language.layers import Weights, merge_adapters
from algos.language.tensor_files import StoredTensor, safetensors
from fdg.errors import FdgError, one_line
from fdg.reading import read_json, refuse_run

_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # endings of architecture names
_SHARD_BYTES = 5 << 30  # largest file, as in Hugging Face's checkpoints
_MAX_INDEX_BYTES = 32 << 20
_MAX_LAYERS = 1024
_LINEAR_NAMES = {  # Hugging Face's names of linear layers
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def tensor_table(
    config: DecoderConfig, scores: bool = False
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], bool]]:
    """By tensor name: the parameter's path, the shape in the file, and whether the file has the transpose.

    Names are Hugging Face's. `scores` is for a reward model, which has `score` [D, 1] instead of the head,
    applied at the last token (in Transformers, `...ForSequenceClassification` with one label).

    >>> tensor_table(DecoderConfig.tiny(17))["model.layers.1.self_attn.k_proj.weight"]
    (('layers', '1', 'attention', 'key', 'kernel'), (32, 64), True)
    """
    c = config
    table: dict[str, tuple[tuple[str, ...], tuple[int, ...], bool]] = {}
    table["model.embed_tokens.weight"] = ("embedding",), (c.vocab_size, c.hidden_size), False
    table["model.norm.weight"] = ("norm",), (c.hidden_size,), False
    if scores:
        table["score.weight"] = ("score",), (1, c.hidden_size), True
    elif not c.tie_embeddings:
        table["lm_head.weight"] = ("head",), (c.vocab_size, c.hidden_size), True
    norms: dict[str, tuple[tuple[str, ...], int]] = {
        "input_layernorm": (("attention_norm",), c.hidden_size),
        "post_attention_layernorm": (("mlp_norm",), c.hidden_size),
    }
    if c.qk_norm:
        norms["self_attn.q_norm"] = ("attention", "query_norm"), c.width
        norms["self_attn.k_norm"] = ("attention", "key_norm"), c.width
    for i in range(c.num_layers):
        block, prefix = ("layers", str(i)), f"model.layers.{i}"
        for name, (part, inputs, outputs, has_bias) in c.linear_layers.items():
            path, key = (*block, part, name), f"{prefix}.{_LINEAR_NAMES[name]}"
            table[f"{key}.weight"] = (*path, "kernel"), (outputs, inputs), True
            if has_bias:
                table[f"{key}.bias"] = (*path, "bias"), (outputs,), False
        for name, (norm_path, size) in norms.items():
            table[f"{prefix}.{name}.weight"] = (*block, *norm_path), (size,), False
    return table


def read_config(directory: str | os.PathLike[str], **changes: Any) -> DecoderConfig:
    """The config of the decoder in a directory; arguments and errors as in `load`. It reads no tensors."""
    file = pathlib.Path(directory) / "config.json"
    if not os.path.lexists(file):
        problem = "it has no config.json" if os.path.isdir(directory) else "no such directory"
        if os.path.lexists(file.with_name("adapter_config.json")):
            problem = "holds adapters alone (adapters=), and no checkpoint"
        fix = "give a directory with config.json and *.safetensors"
        name = os.path.relpath(directory)
        if problem == "no such directory" and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and name[0] != ".":
            fix += f" (nothing is downloaded: hf download {name} --local-dir {name})"
        raise FdgError(f"{directory}: {problem}: {fix}")
    content = read_json(file, any_number=True)
    refuse_run(directory, "a checkpoint")
    try:
        return DecoderConfig.from_hugging_face(content, **changes)
    except FdgError as error:
        raise FdgError(f"{file}: {str(error).partition(': ')[2]}") from None


def load(
    directory: str | os.PathLike[str], *, scores: bool = False, **changes: Any
) -> tuple[Decoder, Weights]:
    """Loads a decoder and its parameters (float32, on the host) from a Hugging Face directory.

    The directory has `config.json`, and `model.safetensors` or shards with an index. `scores` is for a reward
    model: see `tensor_table`. `changes` are fields of `DecoderConfig` that the file does not set, such as
    `dtype`, `remat`, `lora_rank`; with a rank the parameters get new adapters (from `jax.random.key(0)`).

    Raises:
      FdgError: no such directory or file, a missing shard, an unsupported architecture, numbers that are not
        finite.
    """
    folder = pathlib.Path(directory)
    config = read_config(folder, **changes)
    decoder = Decoder(config)
    base = assemble(config, _stored_tensors(folder), str(folder), scores)
    if not config.lora_rank:
        return decoder, base
    return decoder, decoder.with_adapters(base, jax.random.key(0))


def assemble(
    config: DecoderConfig, tensors: Mapping[str, StoredTensor], where: str, scores: bool = False
) -> Weights:
    """Makes parameters from tensors with Hugging Face's names and shapes; `where` begins messages.

    Raises:
      FdgError: a tensor is missing, unknown or of another shape, or has numbers that are not finite.
    """
    parameters: Weights = {}
    for key, (path, transposed, tensor) in _match_tensors(config, tensors, where, scores).items():
        array = read_finite(tensor, f"{where}: '{key}'")
        node = parameters
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = _transpose(array) if transposed else array
    heads = [tensor for name, tensor in tensors.items() if _plain_name(name) == "lm_head.weight"]
    head = heads[0] if heads and config.tie_embeddings and not scores else None
    if head and not np.array_equal(head.read(), parameters["embedding"]):
        raise FdgError(
            f"{where}: 'lm_head.weight' differs from the embedding, and config.json ties them: set its"
            " tie_word_embeddings to false, or remove the tensor"
        )
    return parameters


def read_finite(tensor: StoredTensor, where: str) -> np.ndarray:
    """Reads a tensor as float32, and checks that it is finite."""
    array = tensor.read()
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        total = np.dot(flat, flat)
    # The sum of squares is a fast first test: it is finite only if all numbers are.
    if not math.isfinite(total) and (count := array.size - np.count_nonzero(np.isfinite(array))):
        raise FdgError(
            f"{where}: {count} of its {array.size} numbers are NaN or infinite in float32: take another"
            " checkpoint"
        )
    return array


def _transpose(array: np.ndarray) -> np.ndarray:
    """A contiguous transpose, a few rows at a time, which stay in the CPU's cache."""
    out = np.empty(array.shape[::-1], array.dtype)
    for i in range(0, len(array), 32):
        out[:, i : i + 32] = array[i : i + 32].T
    return out


def has_tensors(directory: str | os.PathLike[str]) -> bool:
    """True if a directory has weights, or cannot be listed."""
    try:
        return any(pathlib.Path(directory).glob("*.safetensors"))
    except OSError:  # reading the directory then raises a better error
        return True


def planned_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The config of a directory that may lack weights, which a plan does not need."""
    config = read_config(directory)
    if config.num_layers > _MAX_LAYERS:
        raise FdgError(
            f"{directory}: num_hidden_layers={config.num_layers} in its config.json: without weights give at"
            f" most {_MAX_LAYERS}"
        )
    return config


def check(directory: str | os.PathLike[str], scores: bool = False) -> DecoderConfig:
    """The config of a directory; checks that it has all tensors in their shapes, without reading them."""
    folder = pathlib.Path(directory)
    config = read_config(folder)
    _match_tensors(config, _stored_tensors(folder), str(folder), scores)
    return config


def _match_tensors(
    config: DecoderConfig, tensors: Mapping[str, StoredTensor], where: str, scores: bool
) -> dict[str, tuple[tuple[str, ...], bool, StoredTensor]]:
    """For each name in `tensor_table`: the parameter's path, whether it is transposed, and the tensor."""
    if config.num_layers > len(tensors):  # before a table of all layers is made
        raise FdgError(
            f"{where}: num_hidden_layers={config.num_layers} in its config.json, but it holds only"
            f" {len(tensors)} tensors, fewer than layers: correct config.json, or download all weights"
        )
    expected = tensor_table(config, scores)
    matched: dict[str, tuple[tuple[str, ...], bool, StoredTensor]] = {}
    plain_names = {name: _plain_name(name) for name in tensors}
    for name, tensor in tensors.items():
        plain = plain_names[name]
        key = plain if plain in expected else f"model.{plain}"  # a model saved without its head has no prefix
        if plain == "lm_head.weight" and config.tie_embeddings:
            key = "model.embed_tokens.weight"
            if not {key, key.removeprefix("model.")}.isdisjoint(plain_names.values()):
                continue
        if key not in expected:
            if _IGNORED.search(plain):
                continue
            if plain == "score.weight":
                raise FdgError(
                    f"{where}: is a reward model, which generates no text: give it as reward_model= of"
                    " GRPO, PPORLHF or DPO, and a language model here"
                )
            raise FdgError(
                f"{where}: holds '{name:.120}', which the {config.family} of its config.json"
                f" lacks: is the checkpoint of another architecture?"
            )
        path, shape, transposed = expected[key]
        if key in matched:
            raise FdgError(f"{where}: '{key}' is there twice, as '{name}' too: remove one")
        if tensor.shape != shape:
            raise FdgError(
                f"{where}: '{key}' is {list(tensor.shape)}, but by its config.json it must be {list(shape)}:"
                " give the config.json that was saved with these weights"
            )
        matched[key] = path, transposed, tensor
    missing = [key for key in expected if key not in matched]
    if missing:
        raise FdgError(
            f"{where}: '{missing[0]}' is missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else "")
            + f", which the {config.family} of its config.json has"
            + (
                ": this is no reward model: give one that RewardModel has trained and exported"
                if missing == ["score.weight"]
                else ""
            )
        )
    return matched


def _plain_name(name: str) -> str:
    """A tensor's name without the prefixes of compiled, distributed and wrapped models."""
    return _WRAPPERS.sub("", name)


_WRAPPERS = re.compile(r"^(?:(?:_orig_mod|module|_fsdp_wrapped_module|pretrained_model)\.)+")
# Tensors that are not read: buffers of old checkpoints, the head of a reward model's base, a value head.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|lm_head\.weight$|masked_bias$|^v_head\.")


def save(
    directory: str | os.PathLike[str],
    decoder: Decoder,
    parameters: Weights,
    shard_bytes: int = _SHARD_BYTES,
    dtype: str = "float32",
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a directory that Hugging Face's library loads; adapters are merged into their kernels.

    Replaces a checkpoint in the directory; other files in it stay. `parameters` with `score` are a reward
    model's (see `tensor_table`). `shard_bytes` is the largest file, unless a single tensor is larger. The
    `dtype` of tensors is "float32", "bfloat16" or "float16". `settings` are further keys of `config.json`,
    such as the end token; `files` are further files by name, such as a tokenizer's.

    Raises:
      FdgError: Hugging Face has no model of this config; the directory cannot be written, or holds adapters,
        which Hugging Face's library would add to the checkpoint.
    """
    config = {**decoder.config.to_hugging_face(), **(settings or {}), "torch_dtype": dtype}
    base = merge_adapters(decoder.config, parameters)
    if "score" in base:
        config |= {
            "architectures": [name.replace(_LANGUAGE_MODEL, _CLASSIFIER) for name in config["architectures"]],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    if os.path.lexists(pathlib.Path(directory) / "adapter_config.json"):
        raise FdgError(
            f"{directory}: holds adapters, which would be added to the checkpoint: give another directory"
        )
    with staging_folder(directory, "config.json", files) as partial:
        shards = _shards(decoder.config, base, shard_bytes, np.dtype(jax.numpy.dtype(dtype)))
        count = len(shards)
        file_names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        file_names = file_names if count > 1 else [_SINGLE_FILE]
        index: dict[str, str] = {}
        size = 0
        for file, keys in zip(file_names, shards, strict=True):
            tensors = {key: make() for key, make in keys.items()}
            write_tensors(partial / file, tensors)
            index.update(dict.fromkeys(tensors, file))
            size += sum(tensor.nbytes for tensor in tensors.values())
        if len(file_names) > 1:
            listing = {"metadata": {"total_size": size}, "weight_map": index}
            (partial / _INDEX).write_text(json.dumps(listing, indent=2, sort_keys=True) + "\n")
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        new = {file.name for file in partial.iterdir()}
    for old in pathlib.Path(directory).glob("model*.safetensors*"):  # of the previous checkpoint
        if old.name not in new:
            old.unlink()


def write_tensors(file: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file as PyTorch's libraries expect it."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise FdgError("checkpoints need safetensors: pip install 'fdg[language]'") from None
    save_file(tensors, file, metadata={"format": "pt"})


@contextlib.contextmanager
def staging_folder(
    directory: str | os.PathLike[str], last: str, files: Mapping[str, bytes] | None = None
) -> Iterator[pathlib.Path]:
    """Yields a temporary folder; then adds `files`, and moves all into `directory`, the file `last` last."""
    folder = pathlib.Path(directory)
    absolute = pathlib.Path(os.path.abspath(folder))  # "." and ".." have no names of their own
    partial = absolute.parent / f".{absolute.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for name, content in (files or {}).items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        new = [file.relative_to(partial) for file in partial.rglob("*") if file.is_file()]
        for file in sorted(new, key=lambda file: str(file) == last):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / file, folder / file)
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise FdgError(f"{folder}: the checkpoint cannot be written: {one_line(error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(config: DecoderConfig, base: Weights, max_bytes: int, dtype: np.dtype) -> list[dict[str, Any]]:
    """Divides tensors into files; returns, for each file, functions that make its tensors."""
    shards: list[dict[str, Any]] = [{}]
    room = max_bytes
    for key, (path, shape, transposed) in tensor_table(config, "score" in base).items():
        node: Any = base
        for name in path:
            node = node[name]

        def make(array: Any = node, transposed: bool = transposed) -> np.ndarray:
            array = np.asarray(array)
            return np.ascontiguousarray(array.T if transposed else array).astype(dtype)

        size = int(np.prod(shape)) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][key] = make
        room -= size
    return shards


def _stored_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a directory's files, by name."""
    index: dict[str, Any] = {}
    if os.path.lexists(folder / _SINGLE_FILE):  # takes precedence over an index, as in Hugging Face's library
        files = [_SINGLE_FILE]
    elif os.path.lexists(folder / _INDEX):
        index = read_json(folder / _INDEX, _MAX_INDEX_BYTES).get("weight_map") or {}
        if not (isinstance(index, dict) and index and all(map(_is_file_name, index.values()))):
            raise FdgError(f"{folder / _INDEX}: has no weight_map of tensors to files in this directory")
        files = sorted(set(index.values()))
    else:
        old_files = sorted(file.name for file in folder.glob("*.bin"))
        hint = (
            f"; {old_files[0]} is of an older format, which is not read: load it with Transformers, and save"
            " it by save_pretrained(DIR)"
            if old_files
            else ""
        )
        raise FdgError(f"{folder}: it has neither {_SINGLE_FILE} nor {_INDEX}{hint}")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if not os.path.lexists(folder / file):
            count = sum(name == file for name in index.values())
            raise FdgError(
                f"{folder}: shard {file} is missing, with {count} of the {len(index)} tensors that"
                f" {_INDEX} lists: copy it there"
            )
        tensors = safetensors(folder / file)
        if twice := sorted(stored.keys() & tensors.keys()):
            raise FdgError(f"{folder / file}: '{twice[0]}' is in an earlier shard too: remove one")
        stored |= tensors
    return stored


def _is_file_name(file: Any) -> bool:
    """True for a file's name without a path."""
    return isinstance(file, str) and file not in ("", ".", "..") and not set("/\\\0") & set(file)
