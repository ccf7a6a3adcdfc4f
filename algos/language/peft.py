"""Reads and writes PEFT's adapters: `adapter_config.json` and `adapter_model.safetensors`.

PEFT's `lora_A` [r, in] and `lora_B` [out, r] are `a` [in, r] and `b` [r, out] here; the scale is `lora_alpha
/ r`, or `lora_alpha / sqrt(r)` with `use_rslora`. A layer without an adapter in the folder gets an adapter of
zeros, which has no effect and no gradient.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from algos.language import weights
from algos.language.config import LINEAR, DecoderConfig
from algos.language.config_keys import check_config_keys
from algos.language.decoder import Decoder
from algos.language.layers import Weights
from algos.language.tensor_files import StoredTensor, safetensors
from fdg.arguments import quoted
from fdg.errors import FdgError
from fdg.reading import read_json, refuse_run

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# The beginning of the tensors' keys, and the endings of the keys of `a` and `b`.
_PREFIX, _LETTERS = "base_model.model.", {".lora_A.weight": "a", ".lora_B.weight": "b"}
_MAX_LAYERS = 4096
_READ_KEYS = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights")
_IGNORED_KEYS = frozenset(
    # How the adapters were made.
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout"
    # Which layers have adapters; the tensors' names show it.
    " target_modules exclude_modules layers_to_transform layers_pattern"
    # Settings of options that are off, or are checked separately.
    " megatron_core loftq_config eva_config corda_config lora_ga_config runtime_config"
    " qalora_group_size".split()
)
# Names as `init_lora_weights` that do not change the base's weights.
_INITIALISATIONS = ("gaussian", "orthogonal", "eva")


def read_config(directory: str | os.PathLike[str], config: DecoderConfig) -> DecoderConfig:
    """The base's config with the folder's rank and targets; reads no tensors; raises the errors of `load`."""
    folder = pathlib.Path(directory)
    if not os.path.lexists(folder / CONFIG):
        refuse_run(folder, "a folder with adapters", "--format peft ")
        problem = f"it has no {CONFIG}" if os.path.isdir(folder) else "no such directory"
        raise FdgError(f"{folder}: {problem}: give a folder that PEFT has written, with {TENSORS}")
    file, content = folder / CONFIG, read_json(folder / CONFIG, any_number=True)
    if content.get("peft_type") != "LORA":
        raise FdgError(f"{file}: peft_type={quoted(content.get('peft_type'))}: only 'LORA' is read")
    advice = "merge the adapters into their base with PEFT (merge_and_unload), and give the result instead"
    check_config_keys(content, _READ_KEYS, str(file), _IGNORED_KEYS, advice)
    if content.get("bias", "none") != "none":
        raise FdgError(f"{file}: bias={quoted(content['bias'])} is not supported: {advice}")
    initialisation = content.get("init_lora_weights")
    if not (initialisation is None or isinstance(initialisation, bool) or initialisation in _INITIALISATIONS):
        raise FdgError(f"{file}: init_lora_weights={quoted(initialisation)} changes the base: {advice}")
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    use_rslora = content.get("use_rslora", False)
    if type(rank) is not int or not 0 < rank <= config.hidden_size + config.intermediate_size:
        raise FdgError(f"{file}: r={quoted(rank)}: it must be a whole number, at most a layer's width")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or not isinstance(use_rslora, bool):
        raise FdgError(
            f"{file}: lora_alpha={quoted(alpha)}, use_rslora={quoted(use_rslora)}: give a number, and a bool"
        )
    targets = {path[3] for path, *_ in _match_tensors(folder, config, rank)}
    return dataclasses.replace(
        config,
        lora_rank=rank,
        lora_alpha=float(alpha * math.sqrt(rank) if use_rslora else alpha),
        lora_targets=tuple(name for name in LINEAR if name in targets),
    )


def base_name(directory: str | os.PathLike[str]) -> str:
    """The name of the base in a folder of adapters; empty if the folder does not name it."""
    name = read_json(pathlib.Path(directory) / CONFIG, any_number=True).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def load(directory: str | os.PathLike[str], config: DecoderConfig) -> tuple[DecoderConfig, Weights]:
    """The base's config with the rank and targets of LoRA adapters, and the adapters (float32, on the host).

    Raises:
      FdgError: no such folder or file, an unsupported kind of adapter or option, tensors that do not fit the
        base or are not finite.
    """
    folder = pathlib.Path(directory)
    adapted = read_config(folder, config)
    blocks: dict[str, Any] = {}
    for path, (columns, *rows), _ in weights.tensor_table(config).values():
        if path[-1] == "kernel" and path[3] in adapted.lora_targets:
            shapes = {"a": (*rows, adapted.lora_rank), "b": (adapted.lora_rank, columns)}
            zeros = {letter: np.zeros(shape, np.float32) for letter, shape in shapes.items()}
            blocks.setdefault(path[1], {}).setdefault(path[2], {})[path[3]] = zeros
    for (_, i, part, name), letter, key, tensor in _match_tensors(folder, config, adapted.lora_rank):
        blocks[i][part][name][letter] = np.ascontiguousarray(
            weights.read_finite(tensor, f"{folder}: '{key}'").T
        )
    return adapted, {"layers": blocks}


def _match_tensors(
    folder: pathlib.Path, config: DecoderConfig, rank: int
) -> Iterator[tuple[tuple[str, ...], str, str, StoredTensor]]:
    """Yields, for each tensor, the path of its layer, `a` or `b`, its key, and the stored tensor."""
    if not os.path.lexists(folder / TENSORS):
        older = " (adapter_model.bin is of an older format, which is not read)"
        raise FdgError(
            f"{folder}: {TENSORS} is missing{older * os.path.lexists(folder / 'adapter_model.bin')}: save the"
            " adapters again with PEFT"
        )
    if config.num_layers > _MAX_LAYERS:  # before a table of all layers is made
        raise FdgError(f"{folder}: its base has num_layers={config.num_layers}: give at most {_MAX_LAYERS}")
    tensors: Mapping[str, StoredTensor] = safetensors(folder / TENSORS)
    if not tensors:
        raise FdgError(f"{folder / TENSORS} holds no tensor: save the adapters again with PEFT")
    base_tensors = weights.tensor_table(config)
    found = set()  # (path, letter) of each tensor
    for key, tensor in tensors.items():
        name, part, _ = key.removeprefix(_PREFIX).partition(".lora_")
        letter = _LETTERS.get(key[len(key) - len(".lora_A.weight") :])
        adapted = base_tensors.get(f"{name}.weight", base_tensors.get(f"model.{name}.weight"))
        if not (key.startswith(_PREFIX) and part and letter and adapted and adapted[0][-1] == "kernel"):
            raise FdgError(
                f"{folder / TENSORS}: holds '{key:.120}', which adapts no linear layer of its base, a"
                f" {config.family} of {config.num_layers} layers"
            )
        path, (columns, rows), _ = adapted
        expected = (rank, rows) if letter == "a" else (columns, rank)
        if tensor.shape != expected:
            raise FdgError(
                f"{folder / TENSORS}: '{key:.120}' has shape {list(tensor.shape)}, but on this base with"
                f" r={rank} it must have {list(expected)}: give the base that it was trained on, or write its"
                f" rank as r in {CONFIG}"
            )
        found.add((path, letter))
        yield path[:4], letter, key, tensor
    incomplete = [
        (path, letter) for path, letter in found if (path, "b" if letter == "a" else "a") not in found
    ]
    if incomplete:
        path, letter = incomplete[0]
        has, lacks = ("lora_A", "lora_B") if letter == "a" else ("lora_B", "lora_A")
        raise FdgError(
            f"{folder / TENSORS}: {'.'.join(path[:4])} has {has}, but no {lacks}: save the adapters again"
            " with PEFT"
        )


def save(
    directory: str | os.PathLike[str],
    decoder: Decoder,
    parameters: Weights,
    base: str = "",
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes adapters, without the base, in PEFT's format.

    Adapters that are already in the directory are replaced. `base` is the path or name of the base, which is
    written too; `files` are further files by name.

    Raises:
      FdgError: there are no adapters; the directory cannot be written.
    """
    config = decoder.config
    if "adapters" not in parameters:
        raise FdgError(f"{directory}: the network has no adapters: train with lora_rank, or export all of it")
    tensors = {}
    for key, (path, _, _) in weights.tensor_table(config).items():
        if path[-1] == "kernel" and path[3] in config.lora_targets:
            adapter = parameters["adapters"]["layers"][path[1]][path[2]][path[3]]
            for ending, letter in _LETTERS.items():
                array = np.asarray(adapter[letter], np.float32)
                tensors[f"{_PREFIX}{key.removesuffix('.weight')}{ending}"] = np.ascontiguousarray(array.T)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({key.split(".")[-3] for key in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with weights.staging_folder(directory, CONFIG, files) as partial:
        weights.write_tensors(partial / TENSORS, tensors)
        (partial / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
