"""Reads the tokenizer in a checkpoint's folder, and makes the files of a tokenizer for a new checkpoint."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.text import tokenizer_files
from envs.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from fdg.errors import FdgError, one_line
from fdg.reading import open_regular, read_bytes, read_json, refuse_run

# Names of files, and of a folder, that a tokenizer consists of.
_TOKENIZER, _SETTINGS, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_TEMPLATE_DIR = "additional_chat_templates"
_FILES = (
    _TOKENIZER, _SETTINGS, _GENERATION, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
_MAX_FILE_BYTES = 40 << 20  # maximum size of each file
_MAX_CHARACTER_BYTES = 1 << 16  # maximum size of a character tokenizer's file
_OLDER_FORMATS = {  # files of older checkpoints, which have no tokenizer.json
    "tokenizer.model": "SentencePiece", "spiece.model": "SentencePiece",
    "sentencepiece.bpe.model": "SentencePiece", "vocab.json": "BPE", "vocab.txt": "WordPiece",
    "tokenizer.tiktoken": "tiktoken", "tekken.json": "Mistral's tekken",
}  # fmt: skip


def tokenizer_of(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer of a checkpoint's folder; a character tokenizer if `files_of` wrote it."""
    path = Path(folder)
    other = "or set tokenizer= (--tokenizer) to another folder, or to 'characters' for the task's own"
    if not path.is_dir():
        raise FdgError(f"{path}: no such folder: give one with {_TOKENIZER}, {other}")
    if not os.path.lexists(path / _TOKENIZER):
        older = next((name for name in _OLDER_FORMATS if os.path.lexists(path / name)), None)
        if older is None:
            refuse_run(path, "a folder with a tokenizer")
            fix = f"copy {_TOKENIZER} and {_SETTINGS} from the source of its weights"
            raise FdgError(f"{path}: has no tokenizer: {fix}, {other}")
        fix = "make one with Transformers, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise FdgError(f"{path}: has {older} ({_OLDER_FORMATS[older]}), and no {_TOKENIZER}: {fix}, {other}")
    try:
        tokenizer = _character_tokenizer(path / _TOKENIZER) or HuggingFaceTokenizer(str(folder))
        _ = tokenizer.stops  # raises if there are none
        return tokenizer
    except FdgError as error:
        raise FdgError(f"{error}: correct it, {other}") from None


def files_of(tokenizer: Any) -> dict[str, bytes]:
    """A tokenizer as files of a checkpoint's folder, by name; `generation_config.json` is one of them.

    Args:
      tokenizer: a `CharacterTokenizer`; a `HuggingFaceTokenizer`, whose files are copied; or any other with a
        method `files() -> {name: content}`.

    Raises:
      FdgError: the tokenizer is of another type; a file is missing, or cannot be read.

    >>> sorted(files_of(CharacterTokenizer("ab")))[:3]
    ['chat_template.jinja', 'generation_config.json', 'special_tokens_map.json']
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _read_files(tokenizer)
    if isinstance(tokenizer, CharacterTokenizer):
        contents = {
            _TOKENIZER: _tokenizer_json(tokenizer),
            _SETTINGS: {
                **_SPECIAL_BY_NAME,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 1 << 30,
            },
            "special_tokens_map.json": _SPECIAL_BY_NAME,
            _GENERATION: numbers_of(tokenizer),
        }
        return {
            **{name: _as_json_bytes(content) for name, content in contents.items()},
            "chat_template.jinja": _CHAT_TEMPLATE.encode(),
        }
    method = getattr(tokenizer, "files", None)
    if not callable(method):
        raise FdgError(
            f"{type(tokenizer).__name__} cannot be written with the network: give it a method files() that"
            " returns {name: bytes}, or write the network alone: algos.language.weights.save"
        )
    return dict(method())


@contextlib.contextmanager
def replacing_files(path: str | os.PathLike[str], tokenizer: Any) -> Iterator[dict[str, bytes]]:
    """Yields the files of a tokenizer, to be written to a folder; then removes others of an earlier one."""
    folder, files = Path(path), files_of(tokenizer)
    earlier = _names_in(folder) if os.path.lexists(folder / _TOKENIZER) else []
    yield files
    for name in earlier:
        try:
            if name not in files:
                (folder / name).unlink()
        except OSError as error:
            raise FdgError(f"{folder / name}: not removed by export ({one_line(error)}): remove it") from None


def _names_in(folder: Path) -> list[str]:
    """The names of a tokenizer's files in a folder."""
    templates = sorted((folder / _TEMPLATE_DIR).glob("*.jinja"))
    names = [*_FILES, *(f"{_TEMPLATE_DIR}/{file.name}" for file in templates)]
    return [name for name in names if os.path.lexists(folder / name)]


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers give each token the same number, added tokens included.

    Merges and normalisers are not compared. A user's tokenizer without a `tokenizer.json` differs from every
    tokenizer that is not equal to it.

    >>> same_tokens(CharacterTokenizer("ab"), CharacterTokenizer("ba"))
    False
    """
    if one == other:
        return True
    first, second = map(_token_table, (one, other))
    return bool(first == second) and first is not None


def _token_table(tokenizer: Any) -> Any:
    """The vocabulary and the added tokens in a tokenizer's `tokenizer.json`; None if it has no such file."""
    content = files_of(tokenizer).get(_TOKENIZER, b"null")
    try:
        parsed = json.loads(content)
        return parsed["model"]["vocab"], parsed.get("added_tokens")
    except (ValueError, TypeError, KeyError):  # a user's tokenizer may write any file
        return None


def numbers_of(tokenizer: Any) -> dict[str, Any]:
    """The begin, end and padding tokens, by the keys of `config.json` and `generation_config.json`.

    >>> numbers_of(CharacterTokenizer("ab"))
    {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 0}
    """
    stops = [int(stop) for stop in tokenizer.stops]
    return {
        "bos_token_id": getattr(tokenizer, "bos", None),
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": int(tokenizer.pad),
    }


# The special tokens of a character tokenizer; no text in a usual alphabet contains them.
_SPECIAL = ("\u27e8pad\u27e9", "\u27e8bos\u27e9", "\u27e8eos\u27e9")
_SPECIAL_BY_NAME = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
_ADDS_NOTHING = [{"Sequence": {"id": "A", "type_id": 0}}]  # a post-processor's template that adds no tokens
# This chat template renders the text that `CharacterTokenizer.encode_rows` encodes.
_CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _tokenizer_json(tokenizer: CharacterTokenizer) -> dict[str, Any]:
    """An equivalent `tokenizer.json` of the library `tokenizers`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    all_tokens = [*_SPECIAL, *tokenizer.alphabet]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(all_tokens)},
            "unk_token": "\u27e8unknown\u27e9",  # not in the vocabulary: unknown characters raise
        },
    }  # fmt: skip


def _character_tokenizer(file: Path) -> CharacterTokenizer | None:
    """The character tokenizer that `files_of` wrote to a file; None if the file is of another tokenizer."""
    with open_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_CHARACTER_BYTES:
            return None
    content = read_json(file, any_number=True)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    words = list(vocabulary)[len(_SPECIAL) :] if isinstance(vocabulary, dict) else []
    if not words or any(len(word) != 1 for word in words):
        return None
    candidate = CharacterTokenizer("".join(words))
    post_processor = content.get("post_processor")
    if (
        isinstance(post_processor, dict)
        and post_processor.get("single") == _ADDS_NOTHING
        and not post_processor.get("special_tokens")
    ):
        content["post_processor"] = None  # Transformers 5 writes a post-processor that adds nothing
    return candidate if content == _tokenizer_json(candidate) else None


def _read_files(tokenizer: HuggingFaceTokenizer) -> dict[str, bytes]:
    """The files of a checkpoint's tokenizer. Missing configurations are created."""
    folder = Path(tokenizer.path)
    files = {name: read_bytes(folder / name, _MAX_FILE_BYTES) for name in _names_in(folder)}
    if _TOKENIZER not in files:
        raise FdgError(f"{folder}: its {_TOKENIZER} is gone: put it back, and export again")
    numbers = numbers_of(tokenizer)
    if _SETTINGS not in files:
        loaded = tokenizer_files.load(folder / _TOKENIZER)
        special_tokens = {
            name: loaded.id_to_token(number[0] if isinstance(number, list) else number)
            for name, number in zip(("bos_token", "eos_token", "pad_token"), numbers.values(), strict=True)
            if number is not None
        }
        files[_SETTINGS] = _as_json_bytes({**special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"})
    files.setdefault(_GENERATION, _as_json_bytes(numbers))
    return files


def _as_json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
