"""Checkpoints on disk that learning begins with: their shapes while tracing, their numbers as it runs."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax

from algos.language import weights
from algos.language.config import DecoderConfig
from algos.language.decoder import Decoder
from algos.rlhf import rewards
from envs.text import HuggingFaceTokenizer, TextTask
from fdg.errors import FdgError, HostError

_LONGEST = 64  # tokens of a response, where a checkpoint's tokenizer has no one token for each character


@functools.lru_cache(maxsize=16)
def config_of(path: str) -> DecoderConfig:
    """Of the checkpoint in a folder, all of which is there.

    Raises:
      FdgError: it is not, cannot be read, or is of another architecture.
    """
    return weights.check(path)


def begun(network: Decoder, path: str, key: jax.Array) -> Any:
    """Parameters of the checkpoint in a folder; with new adapters by `key`, where the network has some."""
    plain = Decoder(dataclasses.replace(network.config, lora_rank=0))
    # A call to the host, not constants of the program: the files are read as it runs.
    shapes = jax.eval_shape(plain.init, key)
    base = jax.pure_callback(functools.partial(_read, path, shapes["embedding"].dtype), shapes)
    return network.with_adapters(base, key) if network.config.lora_rank else base


@functools.lru_cache(maxsize=16)
def reward_config_of(path: str) -> DecoderConfig:
    """Of the reward model in a folder, all of which is there: see `config_of`."""
    return weights.check(path, scores=True)


def begun_reward(network: Decoder, path: str, key: jax.Array) -> Any:
    """The reward model in a folder: `{"network": parameters of a decoder, "score": [D, 1]}`."""
    shapes = jax.eval_shape(lambda: rewards.first(network, network.init(key)))
    dtype = shapes["network"]["embedding"].dtype
    return jax.pure_callback(functools.partial(_read_reward, path, dtype), shapes)


def in_its_words(env: Any, path: str, max_response: int | None) -> Any:
    """The task with the checkpoint's own tokenizer, where it has one and the task none of that kind.

    Responses have `max_response` tokens, or what the task was given; else 64, or as many as the longest answer
    of a file, or what the context has room for.
    """
    plain = isinstance(env, TextTask) and not isinstance(env.tokenizer, HuggingFaceTokenizer)
    if not plain or not os.path.lexists(Path(path, "tokenizer.json")):
        return env
    named = max_response or env.max_response
    found = env.with_tokenizer(HuggingFaceTokenizer(path), max_response=named)
    if named is not None:
        return found
    longest = found.response_length if hasattr(env.problem, "rows") else 0
    room = config_of(path).max_positions - found.prompt_length
    return dataclasses.replace(found, max_response=max(longest, min(_LONGEST, max(room, 1))))


def _read(path: str, dtype: Any, scores: bool = False) -> Any:
    try:
        found = weights.load(path, scores=scores)[1]
    except FdgError as error:
        raise HostError(str(error)) from error
    return jax.tree.map(lambda x: x.astype(dtype, copy=False), found)


def _read_reward(path: str, dtype: Any) -> Any:
    network = _read(path, dtype, scores=True)
    return {"score": network.pop("score"), "network": network}
