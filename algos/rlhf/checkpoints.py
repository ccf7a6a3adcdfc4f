"""Initial checkpoints on disk: tracing reads only their shapes; programs read the arrays when they run."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from algos.language import peft, weights
from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.rlhf.reward_models import with_head
from envs.text import CharacterTokenizer, TextTask
from envs.text.tokenizer_folders import numbers_of, replacing_files, tokenizer_of
from fdg.errors import FdgError, FdgWarning, HostError
from fdg.reading import read_json, stamp

# In place of a tokenizer's folder, "characters" means the task's own tokenizer, and "characters=ab" one with
# the alphabet "ab".
CHARACTERS = "characters"
_DEFAULT_RESPONSE = 64  # tokens of a response, if the checkpoint's tokens are not characters


def config_of(path: str, scores: bool = False, adapters: str | None = None) -> DecoderConfig:
    """The configuration of the checkpoint, or the reward model, in a folder, with adapters in another folder.

    If the folder has no weights, its `config.json` is enough: plans do not read weights. Warns if the
    adapters name another base. It is cached until one of the configuration files is written again.
    """
    files = [Path(path, "config.json"), *([] if adapters is None else [Path(adapters, peft.CONFIG)])]
    return _config_of(path, scores, adapters, tuple(map(stamp, files)))


@functools.lru_cache(maxsize=16)
def _config_of(
    path: str, scores: bool, adapters: str | None, versions: tuple[tuple[int, ...], ...]
) -> DecoderConfig:
    if adapters is None:
        return weights.check(path, scores) if weights.has_tensors(path) else weights.planned_config(path)
    adapted = peft.read_config(adapters, config_of(path))
    adapters_base = peft.base_name(adapters)
    base = read_json(Path(path) / "config.json", any_number=True).get("_name_or_path")
    base_names = f"{Path(path).resolve()} {base}".lower()
    if Path(adapters_base).name.lower() not in base_names:  # as in `models--Qwen--Qwen3-0.6B/snapshots/...`
        warnings.warn(
            f"adapters={adapters}: they were trained on '{adapters_base}' (base_model_name_or_path of"
            f" {peft.CONFIG}),"
            f" and the shapes of model={path} fit, but its name differs: adapters are useless on another"
            " base; if the base is the same, write its name there",
            FdgWarning,
            stacklevel=3,
        )
    return adapted


def initial_parameters(network: Decoder, path: str, adapters: str | None, key: jax.Array) -> Any:
    """The parameters of the checkpoint in the folder `path`.

    If the network has adapters, the result is `{"base": ..., "adapters": ...}`. Adapters are read from the
    folder `adapters`; if it is None, new ones are drawn from `key`.
    """
    plain = Decoder(dataclasses.replace(network.config, lora_rank=0))
    base = _read_on_host(jax.eval_shape(plain.init, key), lambda: weights.load(path)[1])
    if adapters is None:
        return network.with_adapters(base, key) if network.config.lora_rank else base
    adapter_shapes = jax.eval_shape(network.init, key)["adapters"]
    read_adapters = _read_on_host(adapter_shapes, lambda: peft.load(adapters, plain.config)[1])
    return {"base": base, "adapters": read_adapters}


def check_weights_exist(path: str, scores: bool = False) -> None:
    """Checks that the weights of an initial checkpoint exist."""
    if not weights.has_tensors(path):
        weights.check(path, scores)


def initial_reward_model(network: Decoder, path: str, key: jax.Array) -> Any:
    """The reward model in a folder: `{"network": a decoder's parameters without a head, "score": [D, 1]}`."""
    shapes = jax.eval_shape(lambda: with_head(network, network.init(key)))
    shapes["network"].pop("head", None)  # in its place, a reward model has `score`

    def read() -> Any:
        network = weights.load(path, scores=True)[1]
        return {"score": network.pop("score"), "network": network}

    return _read_on_host(shapes, read)


def with_checkpoint_tokenizer(
    env: Any, path: str | None, tokenizer: str | None, max_response: int | None
) -> Any:
    """The task with the tokenizer of a checkpoint.

    - `tokenizer` is a folder: the tokenizer in it. 'characters=ab': one with the alphabet 'ab'. 'characters':
      the task's own.
    - `tokenizer` is None: if the task's own tokenizer is one of characters, the checkpoint's, in the folder
      `path`; else the task's own.

    Responses have at most `max_response` tokens, or the task's limit. If both are None and tokens are longer
    than characters, the limit is 64, or less if the context is shorter, but at least a file's longest answer.
    """
    by_character = isinstance(env.tokenizer, CharacterTokenizer)
    if tokenizer == CHARACTERS or (tokenizer is None and not by_character):
        return env
    where = path if tokenizer is None else tokenizer
    kind, _, alphabet = str(tokenizer).partition("=")
    stored = CharacterTokenizer(alphabet) if kind == CHARACTERS else tokenizer_of(str(where))
    if stored == env.tokenizer:
        return env
    if not isinstance(env, TextTask):
        raise FdgError(
            f"game '{env.name}' has a tokenizer of its own, and {where} another: train a network with the"
            f" game's tokenizer, or give tokenizer='{CHARACTERS}' if the checkpoint was trained on characters"
        )
    limit = max_response or env.max_response
    task = env.with_tokenizer(stored, max_response=limit)
    if type(stored) is CharacterTokenizer or limit is not None:
        return task
    longest_answer = task.response_length if hasattr(env.problem, "rows") else 0
    room = _DEFAULT_RESPONSE if path is None else config_of(path).max_positions - task.prompt_length
    limit = max(longest_answer, min(_DEFAULT_RESPONSE, max(room, 1)))
    return dataclasses.replace(task, max_response=limit)


def save(path: Path, network: Decoder, parameters: Any, tokenizer: Any) -> None:
    """Writes a checkpoint with its tokenizer: see `weights.save` and `replacing_files`."""
    with replacing_files(path, tokenizer) as files:
        weights.save(path, network, parameters, settings=numbers_of(tokenizer), files=files)


def save_adapters(path: Path, network: Decoder, parameters: Any, tokenizer: Any, model: str | None) -> None:
    """Writes only the adapters, with the tokenizer, in PEFT's format."""
    if model is None or "base" not in parameters:
        raise FdgError(
            f"{path}: this run has no LoRA adapters of a checkpoint: leave out format= to export the whole"
            " network, or train with model= and lora_rank="
        )
    base = weights.load(model)[1]
    if not jax.tree.all(jax.tree.map(np.array_equal, base, parameters["base"])):
        raise FdgError(
            f"{path}: the base of the adapters is not the checkpoint in {model} (the run started from other"
            " weights): export the whole network"
        )
    with replacing_files(path, tokenizer) as files:
        peft.save(path, network, parameters, model, files)


def _read_on_host(shapes: Any, read: Callable[[], Any]) -> Any:
    """Reads parameters when the program runs, so that they are not constants of the program."""

    def callback() -> Any:
        try:
            return jax.tree.map(lambda shape, x: x.astype(shape.dtype, copy=False), shapes, read())
        except FdgError as error:
            raise HostError(str(error)) from error  # which passes through XLA unchanged

    return jax.pure_callback(callback, shapes)
