"""The tokenizer in a checkpoint's folder: its file, configuration and chat templates."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from typing import Any

from envs.text import tokenizer_files
from fdg.arguments import quoted
from fdg.errors import FdgError
from fdg.reading import read_json, read_text, stamp

_READ = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")  # the files that a tokenizer is read from
# Transformers' names of tokens. Flags and numbers of other keys, such as `add_bos_token`, are no tokens.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder and the stamps of its files, by which contents are cached: a changed folder is another one."""

    path: str
    stamps: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, path: str) -> "Folder":
        """The folder as it is now."""
        files: list[pathlib.Path] = []
        with contextlib.suppress(OSError):  # a name that is too long; reading a file raises a better error
            files = [file for pattern in _READ for file in sorted(pathlib.Path(path).glob(pattern))]
        return cls(path, tuple((str(file), stamp(file)) for file in files))

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__


def stop_tokens(path: Folder, name: str) -> list[int]:
    """The stop tokens in the JSON file `name` of the folder `path`."""
    value = _read_config(path, name).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        raise _invalid_value(path, name, "eos_token_id", value, "a token's number, or a list of them")
    return ids


def _invalid_value(path: Folder, file: str, name: str, value: Any, kind: str) -> FdgError:
    """An error for a value in a file; `kind` says what it must be."""
    return FdgError(f"{pathlib.Path(path) / file}: {name}={quoted(value)}: it must be {kind}")


@functools.cache
def load(path: Folder) -> Any:
    """The folder's `tokenizers.Tokenizer`, with the special tokens of the configuration."""
    file = pathlib.Path(path) / "tokenizer.json"
    if not os.path.lexists(file):
        raise FdgError(
            f"tokenizer of '{path}': there is no file tokenizer.json; give a checkpoint's directory"
        )
    tokenizer = tokenizer_files.load(file)
    with tokenizer_files.library_errors(f"tokenizer of '{path}'"):
        tokens = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        changed = {token.content: token for token in _added_tokens(path)}
        tokens |= changed  # the configuration's options, such as `lstrip`, replace those of the file
        named = itertools.chain(*([x] if isinstance(x, str) else x for x in special_tokens(path).values()))
        known = functools.partial(filter, lambda word: tokenizer.token_to_id(word) is not None)
        tokenizer.add_tokens([tokens[word] for word in known(changed)])
        tokenizer.add_special_tokens([tokens.get(word, word) for word in known(named)])
    return tokenizer


def _added_tokens(path: Folder) -> list[Any]:
    """The `tokenizers.AddedToken`s that the configuration lists."""
    from tokenizers import AddedToken

    listed = _read_config(path, "tokenizer_config.json").get("added_tokens_decoder") or {}
    if not (isinstance(listed, dict) and all(isinstance(token, dict) for token in listed.values())):
        raise _invalid_value(path, "tokenizer_config.json", "added_tokens_decoder", listed, "an object")
    options = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    return [AddedToken(**{key: token[key] for key in options if key in token}) for token in listed.values()]


@functools.cache
def digest(path: Folder) -> str:
    """A hash of the tokenizer: its file, special tokens, chat templates and stop tokens."""
    eos = [_read_config(path, name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    added = map(repr, _added_tokens(path))
    settings = json.dumps([special_tokens(path), chat_templates(path), eos, *added], sort_keys=True)
    content = (pathlib.Path(path) / "tokenizer.json").read_bytes()  # `load` has checked its size
    return hashlib.sha256(content + settings.encode()).hexdigest()


@functools.cache
def _read_config(path: Folder, name: str) -> dict[str, Any]:
    """A JSON file of the folder; empty if it is missing."""
    file = pathlib.Path(path) / name
    return read_json(file, any_number=True) if os.path.lexists(file) else {}


@functools.cache
def chat_templates(path: Folder) -> dict[str, str]:
    """Chat templates by name; see `HuggingFaceTokenizer.chat_templates`."""
    folder = pathlib.Path(path)
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    by_name = {name: read_text(file) for name, file in files.items() if os.path.lexists(file)}
    if by_name:
        return by_name
    value = _read_config(path, "tokenizer_config.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(template, dict) for template in value):
        by_name = {template.get("name"): template.get("template") for template in value}
    else:
        by_name = value if value and isinstance(value, dict) else {"default": value}
    if not all(isinstance(template, str) for template in [*by_name, *by_name.values()]):
        raise _invalid_value(path, "tokenizer_config.json", "chat_template", value, "a string")
    return by_name


@functools.cache
def special_tokens(path: Folder) -> dict[str, str | list[str]]:
    """Special tokens by name; see `HuggingFaceTokenizer.special_tokens`."""
    config = _read_config(path, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints keep special tokens in a separate file
        config = {**config, **_read_config(path, "special_tokens_map.json")}
    extra = config.get("extra_special_tokens")
    additional = config.get("additional_special_tokens", extra)  # a list by either name
    fields = {**config, **(extra if isinstance(extra, dict) else {})}
    texts: dict[str, Any] = {
        name: _token_text(path, name, text)
        for name, text in fields.items()
        if name in _NAMED or (name.endswith("_token") and not isinstance(text, bool | int | float))
    }
    if isinstance(additional, list):
        texts["additional_special_tokens"] = [
            _token_text(path, "additional_special_tokens", x) for x in additional
        ]
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(path: Folder, name: str, value: Any) -> str | None:
    """A token as text, from a text or an object with `content`; None for none."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str | None):
        raise _invalid_value(path, "tokenizer_config.json", name, value, "a token")
    return text
