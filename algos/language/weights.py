"""Checkpoints of decoders: Hugging Face's directories, read and written (`config.json`, `*.safetensors`).

Kernels are [in, out] here and [out, in] there. A directory is written under a name of its own first: what was
there before is whole until the new one is.
"""

import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.language.layers import Weights
from algos.language.lora import merged
from fdg.errors import FdgError, one_line

_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"
_GENERATES, _SCORES = "ForCausalLM", "ForSequenceClassification"
_SHARD_BYTES = 5 << 30  # of a file, as Hugging Face's own are


def names(
    config: DecoderConfig, scores: bool = False
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], bool]]:
    """Hugging Face's key of each parameter: its path here, its shape there, and whether it is transposed.

    Args:
      config: of the decoder.
      scores: of one that gives a whole text one number, `score` [D, 1] of what it holds at the last token
        (there a `...ForSequenceClassification` with one label), in place of logits.

    >>> names(DecoderConfig.tiny(17))["model.layers.1.self_attn.k_proj.weight"]
    (('layers', '1', 'attention', 'key', 'kernel'), (32, 64), True)
    """
    c = config
    found: dict[str, tuple[tuple[str, ...], tuple[int, ...], bool]] = {}
    found["model.embed_tokens.weight"] = ("embedding",), (c.vocab_size, c.hidden_size), False
    found["model.norm.weight"] = ("norm",), (c.hidden_size,), False
    if scores:
        found["score.weight"] = ("score",), (1, c.hidden_size), True
    elif not c.tie_embeddings:
        found["lm_head.weight"] = ("head",), (c.vocab_size, c.hidden_size), True
    queries, pairs = c.num_heads * c.width, c.num_kv_heads * c.width
    linear = {  # key there: name here, columns, rows, whether there is a bias
        "self_attn.q_proj": (("attention", "query"), queries, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (("attention", "key"), pairs, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (("attention", "value"), pairs, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (("attention", "output"), c.hidden_size, queries, c.output_bias),
        "mlp.gate_proj": (("mlp", "gate"), c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (("mlp", "up"), c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (("mlp", "down"), c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    norms: dict[str, tuple[tuple[str, ...], int]] = {
        "input_layernorm": (("attention_norm",), c.hidden_size),
        "post_attention_layernorm": (("mlp_norm",), c.hidden_size),
    }
    if c.qk_norm:
        norms["self_attn.q_norm"] = ("attention", "query_norm"), c.width
        norms["self_attn.k_norm"] = ("attention", "key_norm"), c.width
    for i in range(c.num_layers):
        at, there = ("layers", str(i)), f"model.layers.{i}"
        for key, (pair, columns, rows, bias) in linear.items():
            found[f"{there}.{key}.weight"] = (*at, *pair, "kernel"), (columns, rows), True
            if bias:
                found[f"{there}.{key}.bias"] = (*at, *pair, "bias"), (columns,), False
        for key, (path, size) in norms.items():
            found[f"{there}.{key}.weight"] = (*at, *path), (size,), False
    return found


def read_config(directory: str | os.PathLike[str], **changes: Any) -> DecoderConfig:
    """The shape of a directory's decoder, without its tensors; as `load`."""
    file = pathlib.Path(directory) / "config.json"
    found = _read_json(file)
    try:
        return DecoderConfig.from_hugging_face(found, **changes)
    except FdgError as error:
        raise FdgError(f"{file}{str(error).removeprefix('config.json')}") from None


def load(
    directory: str | os.PathLike[str], *, scores: bool = False, **changes: Any
) -> tuple[Decoder, Weights]:
    """A decoder and its parameters (float32, on the host) from a directory that Hugging Face's library wrote.

    Args:
      directory: with `config.json`, and `model.safetensors` or its shards and their index.
      scores: whether it is a reward model's: see `names`.
      changes: fields of `DecoderConfig` that the file does not say, such as `dtype`, `remat`, `lora_rank`;
        with a rank the parameters get new adapters (of `jax.random.key(0)`; `Decoder.with_adapters` makes
        others).

    Raises:
      FdgError: no such directory or file, a missing shard, another architecture: names it.
    """
    folder = pathlib.Path(directory)
    config = read_config(folder, **changes)
    decoder = Decoder(config)
    base = assemble(config, _tensors(folder), str(folder), scores)
    if not config.lora_rank:
        return decoder, base
    return decoder, decoder.with_adapters(base, jax.random.key(0))


def assemble(
    config: DecoderConfig, tensors: Iterator[tuple[str, np.ndarray]], where: str, scores: bool = False
) -> Weights:
    """Parameters of tensors with Hugging Face's keys and shapes.

    Raises:
      FdgError: one is missing, is not the config's, or has another shape.
    """
    expected = names(config, scores)
    found: Weights = {}
    seen = set()
    for given, tensor in tensors:
        key = _key(config, expected, given, tuple(tensor.shape), where)
        if key is None:
            continue
        path, _, transposed = expected[key]
        array = np.asarray(tensor, np.float32)
        at = found
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = np.ascontiguousarray(array.T) if transposed else array
        seen.add(key)
    _require_all(config, expected, seen, where)
    return found


def check(directory: str | os.PathLike[str], scores: bool = False) -> DecoderConfig:
    """Whether `load` would find all that it needs, without reading a tensor: the config.

    Raises:
      FdgError: as `load`.
    """
    folder = pathlib.Path(directory)
    config = read_config(folder)
    expected = names(config, scores)
    found = (_key(config, expected, key, shape, str(folder)) for key, shape, _ in _entries(folder))
    _require_all(config, expected, {key for key in found if key is not None}, str(folder))
    return config


def _key(
    config: DecoderConfig, expected: Mapping[str, Any], given: str, shape: tuple[int, ...], where: str
) -> str | None:
    """Which of the `names` expected a tensor in a file is; None for one that is not needed."""
    key = given if given in expected else f"model.{given}"  # of a model that was saved without its head
    if key not in expected:
        if _IGNORED.search(given):
            return None
        raise FdgError(
            f"{where}: holds '{given}', which a {config.family} of its config.json"
            f" has not: is the checkpoint of another architecture?"
        )
    wanted = expected[key][1]
    if shape != wanted:
        raise FdgError(
            f"{where}: '{key}' is {list(shape)}, and by its config.json it would be {list(wanted)}"
        )
    return key


def _require_all(config: DecoderConfig, expected: Mapping[str, Any], seen: set[str], where: str) -> None:
    missing = [key for key in expected if key not in seen]
    if missing:
        raise FdgError(
            f"{where}: '{missing[0]}' is missing"
            + (f", and {len(missing) - 1} more" if missing[1:] else "")
            + f", which a {config.family} of its config.json has"
            + (": is it no reward model?" if missing == ["score.weight"] else "")
        )


# Buffers that old checkpoints hold, and a tied head that was written all the same.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|lm_head\.weight$|masked_bias$")


def save(
    directory: str | os.PathLike[str],
    decoder: Decoder,
    parameters: Weights,
    shard_bytes: int = _SHARD_BYTES,
    dtype: str = "float32",
) -> None:
    """Writes a directory that Hugging Face's library loads; adapters are added to what they adapt.

    Args:
      directory: new, or one that holds a checkpoint already, which is replaced; other files in it stay.
      decoder: whose parameters these are.
      parameters: as `decoder.init` makes them; with a `score` beside them, a reward model's: see `names`.
      shard_bytes: the largest file, where there is more than one tensor.
      dtype: of the tensors in the files: "float32", "bfloat16" or "float16".

    Raises:
      FdgError: what the config says is no model of Hugging Face's; the directory cannot be written.
    """
    from safetensors.numpy import save_file

    config = {**decoder.config.to_hugging_face(), "torch_dtype": dtype}
    base = merged(decoder.config, parameters)
    if "score" in base:
        config |= {
            "architectures": [each.replace(_GENERATES, _SCORES) for each in config["architectures"]],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    folder = pathlib.Path(directory)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shards = _shards(decoder.config, base, shard_bytes, np.dtype(jax.numpy.dtype(dtype)))
        files = [_ONE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        index: dict[str, str] = {}
        size = 0
        for file, keys in zip(files, shards, strict=True):
            tensors = {key: make() for key, make in keys.items()}
            save_file(tensors, partial / file, metadata={"format": "pt"})
            index.update(dict.fromkeys(tensors, file))
            size += sum(tensor.nbytes for tensor in tensors.values())
        if len(files) > 1:
            listing = {"metadata": {"total_size": size}, "weight_map": index}
            (partial / _INDEX).write_text(json.dumps(listing, indent=2, sort_keys=True) + "\n")
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        new = {file.name for file in partial.iterdir()}
        for name in sorted(new, key=lambda name: name == "config.json"):  # which comes last
            os.replace(partial / name, folder / name)
        for old in folder.glob("model*.safetensors*"):  # of the checkpoint that was there
            if old.name not in new:
                old.unlink()
        partial.rmdir()
    except OSError as error:
        raise FdgError(f"{folder}: the checkpoint cannot be written: {one_line(error)}") from None


def _shards(config: DecoderConfig, base: Weights, most: int, dtype: np.dtype) -> list[dict[str, Any]]:
    """Which tensors go into which file: functions that make them, one file's at a time."""
    shards: list[dict[str, Any]] = [{}]
    room = most
    for key, (path, shape, transposed) in names(config, "score" in base).items():
        at: Any = base
        for name in path:
            at = at[name]

        def make(array: Any = at, transposed: bool = transposed) -> np.ndarray:
            array = np.asarray(array)
            return np.ascontiguousarray(array.T if transposed else array).astype(dtype)

        size = int(np.prod(shape)) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][key] = make
        room -= size
    return shards


def _shard_name(i: int, count: int) -> str:
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError:
        known = "no such directory" if not os.path.isdir(path.parent) else f"it has no {path.name}"
        raise FdgError(
            f"{path.parent}: {known}: give a directory with config.json and *.safetensors"
        ) from None
    except ValueError as error:
        raise FdgError(f"{path}: is no JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise FdgError(f"{path}: holds no JSON object")
    return found


def _tensors(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a directory's files, one at a time."""
    return ((key, read()) for key, _, read in _entries(folder))


def _entries(folder: pathlib.Path) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """The tensors of a directory's files: key, shape, and a function that reads it while its turn lasts."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise FdgError("checkpoints need safetensors: pip install 'fdg[language]'") from None

    if os.path.exists(folder / _INDEX):
        index = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise FdgError(f"{folder / _INDEX}: has no weight_map")
        files = sorted(set(index.values()))
        for file in files:
            if not os.path.exists(folder / file):
                count = sum(each == file for each in index.values())
                raise FdgError(
                    f"{folder}: shard {file} is missing, which holds {count} of {len(index)} tensors by"
                    f" {_INDEX}: copy it there"
                )
    elif os.path.exists(folder / _ONE):
        files = [_ONE]
    else:
        other = sorted(file.name for file in folder.glob("*.bin"))
        hint = f"; {other[0]} is of an older format, which is not read" if other else ""
        raise FdgError(f"{folder}: it has neither {_ONE} nor {_INDEX}{hint}")
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as opened:
                for key in sorted(opened.keys()):
                    shape = tuple(opened.get_slice(key).get_shape())
                    yield key, shape, functools.partial(opened.get_tensor, key)
        except (SafetensorError, OSError) as error:
            raise FdgError(f"{folder / file}: cannot be read, is it whole? {one_line(error)}") from None
