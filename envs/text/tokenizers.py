"""Tokenizers: between text and numbers, and the tables by which compiled programs do the same.

A tokenizer is a value that hashes. `encode` and `decode` are Python's, for people; `codes_of_tokens` and
`token_of_code` are tables of the same, so that problems can be written and answers read within a program,
whatever model there is.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from envs.text import tokenizer_files
from fdg.arguments import quoted
from fdg.errors import FdgError, one_line
from fdg.reading import read_json, read_text

COMMON = "0123456789+-*/%()=<>,;:?!. " + "abcdefghijklmnopqrstuvwxyz"
"""The characters that every problem here makes do with, so that one small model can learn all of them."""

_LONGEST = 12  # characters of a token that programs read; none of a number is longer


class Tokenizer(Protocol):
    """What tasks and reports ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    @property
    def pad(self) -> int:
        """The token of places that hold nothing."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens after which an answer is over."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, none in front or behind."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones say nothing."""

    def frame(self, instruction: str) -> tuple[list[int], list[int]]:
        """Tokens in front of and behind a problem, where a model is asked to answer it."""

    def token_of_code(self) -> np.ndarray:
        """`[128] int32`: the token that is just this ASCII character; -1 where there is none."""

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """`[V, C] uint8` ASCII codes of each token, and `[V] int32` how many; 0 for special ones."""


@dataclasses.dataclass(frozen=True)
class CharacterTokenizer:
    """A token for each character of an alphabet, after three special ones.

    >>> tokenizer = CharacterTokenizer("0123456789+=")
    >>> tokenizer.encode("1+1=2"), tokenizer.vocab_size
    ([4, 13, 4, 14, 5], 15)
    >>> tokenizer.decode([1, 4, 13, 4, 2, 0])
    '1+1'
    """

    alphabet: str = COMMON
    pad: ClassVar[int] = 0
    bos: ClassVar[int] = 1
    eos: ClassVar[int] = 2
    _FIRST: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, str) or not self.alphabet or not self.alphabet.isascii():
            raise FdgError(f"CharacterTokenizer({self.alphabet!r:.60}): give the ASCII characters, in order")
        twice = [c for i, c in enumerate(self.alphabet) if c in self.alphabet[:i]]
        if twice:
            raise FdgError(f"CharacterTokenizer: {twice[0]!r} is twice in its alphabet {self.alphabet!r:.60}")

    @property
    def vocab_size(self) -> int:
        """Characters and special tokens."""
        return self._FIRST + len(self.alphabet)

    @property
    def stops(self) -> tuple[int, ...]:
        """The end of a sequence."""
        return (self.eos,)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
          FdgError: it has characters that are not in the alphabet; names the first.
        """
        for i, c in enumerate(text):
            if c not in self.alphabet:
                raise FdgError(
                    f"text {text!r:.60}: {c!r} at {i} is not in the alphabet {self.alphabet!r:.80}"
                )
        return [self._FIRST + self.alphabet.index(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
          FdgError: a number that is no token.
        """
        ids = [int(i) for i in ids]
        check_tokens(ids, self.vocab_size)
        return "".join(self.alphabet[i - self._FIRST] for i in ids if i >= self._FIRST)

    def frame(self, instruction: str) -> tuple[list[int], list[int]]:
        """A beginning; a model that starts from nothing is not told what to do."""
        return [self.bos], []

    def token_of_code(self) -> np.ndarray:
        """See `Tokenizer.token_of_code`."""
        table = np.full(128, -1, np.int32)
        for i, c in enumerate(self.alphabet):
            table[ord(c)] = self._FIRST + i
        return table

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.codes_of_tokens`."""
        codes = np.zeros((self.vocab_size, 1), np.uint8)
        codes[self._FIRST :, 0] = list(self.alphabet.encode())
        return codes, (codes[:, 0] > 0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint on disk: its `tokenizer.json`, chat template and stop
    tokens.

    Attributes:
      path: the checkpoint's directory; nothing is downloaded.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(pathlib.Path(self.path).absolute()))
        _loaded(self.path)

    @property
    def vocab_size(self) -> int:
        """Tokens of the file, added ones too; a model's embedding may have more rows."""
        return _loaded(self.path).get_vocab_size(with_added_tokens=True)

    @property
    def pad(self) -> int:
        """The checkpoint's token for padding; its first stop token where it has none."""
        named = self._named("pad_token")
        return self.stops[0] if named is None else named

    @property
    def bos(self) -> int | None:
        """The token that begins a sequence, if there is one."""
        return self._named("bos_token")

    @property
    def eos(self) -> int:
        """The token that ends an answer: the first of `stops`."""
        return self.stops[0]

    @property
    def stops(self) -> tuple[int, ...]:
        """Those of `generation_config.json`, and the end of sequence of the tokenizer's configuration.

        Raises:
          FdgError: the checkpoint names none.
        """
        named = self._named("eos_token")
        found = [
            *_stops(self.path, "generation_config.json"),
            *([] if named is None else [named]),
            *_stops(self.path, "config.json"),
        ]
        if not found:
            raise FdgError(
                f"checkpoint '{self.path}': neither its tokenizer nor config.json has an eos token"
            )
        return tuple(dict.fromkeys(found))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, none in front or behind; special tokens that it spells out are taken as
        such.
        """
        with self._library():
            return list(_loaded(self.path).encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
          FdgError: a number that is no token.
        """
        ids = [int(i) for i in ids]
        check_tokens(ids, self.vocab_size)
        with self._library():
            return _loaded(self.path).decode(ids, skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages (`role`, `content`) as the checkpoint's chat template writes them.

        Raises:
          FdgError: it has no template, or the template refuses the messages.
        """
        template = self.chat_template
        if template is None:
            raise FdgError(f"checkpoint '{self.path}': no chat_template in tokenizer_config.json")
        try:
            return _compiled(template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._word("bos_token") or "",
                eos_token=self._word("eos_token") or "",
            )
        except FdgError:
            raise
        except Exception as error:
            raise FdgError(f"checkpoint '{self.path}': its chat template raised {one_line(error)}") from error

    @property
    def chat_template(self) -> str | None:
        """The template, of `tokenizer_config.json` or a file `chat_template.jinja`."""
        file = pathlib.Path(self.path) / "chat_template.jinja"
        if os.path.lexists(file):
            return read_text(file)
        found = _json(self.path, "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):
            named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
            found = named[0].get("template") if named else None
        if not isinstance(found, str | None):
            raise _wrong(self.path, "tokenizer_config.json", "chat_template", found, "a string")
        return found

    def frame(self, instruction: str) -> tuple[list[int], list[int]]:
        """The instruction as a user's message, which ends with the problem; without a template, as plain
        text.
        """
        mark = "\u2063problem\u2063"
        content = f"{instruction}\n{mark}" if instruction else mark
        if self.chat_template is None:
            before, after = ("\n".join([instruction, ""]) if instruction else ""), "\n"
            bos = [] if self.bos is None else [self.bos]
            return [*bos, *self.encode(before)], self.encode(after)
        before, found, after = self.chat([{"role": "user", "content": content}]).partition(mark)
        if not found:
            raise FdgError(f"checkpoint '{self.path}': its chat template leaves the user's message out")
        return self.encode(before), self.encode(after)

    def token_of_code(self) -> np.ndarray:
        """See `Tokenizer.token_of_code`."""
        codes, counts = self.codes_of_tokens()
        table = np.full(128, -1, np.int32)
        for token in np.flatnonzero(counts == 1)[::-1]:
            table[codes[token, 0]] = token
        return table

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.codes_of_tokens`; tokens beyond ASCII, and long ones, are a character `\\x7f`."""
        return _token_codes(self.path)

    def _word(self, name: str) -> str | None:
        found = _json(self.path, "tokenizer_config.json").get(name)
        word = found.get("content") if isinstance(found, dict) else found
        if not isinstance(word, str | None):
            raise _wrong(self.path, "tokenizer_config.json", name, found, "a token")
        return word

    def _library(self) -> contextlib.AbstractContextManager[None]:
        return tokenizer_files.library_errors(f"tokenizer of '{self.path}'")

    def _named(self, name: str) -> int | None:
        word = self._word(name)
        return None if word is None else _loaded(self.path).token_to_id(word)


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raises an `FdgError` that names the first number that is no token of the vocabulary."""
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise FdgError(f"token {token} at {i} is not in the vocabulary, whose last is {vocab_size - 1}")


def _stops(path: str, name: str) -> list[int]:
    """The tokens that end a text by a file of the checkpoint's."""
    found = _json(path, name).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if any(type(one) is not int or not 0 <= one < 1 << 31 for one in ids):
        raise _wrong(path, name, "eos_token_id", found, "a token's number, or several")
    return ids


def _wrong(path: str, file: str, name: str, found: Any, kind: str) -> FdgError:
    return FdgError(f"{pathlib.Path(path) / file}: {name}={quoted(found)}: it must be {kind}")


@functools.cache
def _loaded(path: str) -> Any:
    file = pathlib.Path(path) / "tokenizer.json"
    if not os.path.lexists(file):
        raise FdgError(
            f"tokenizer of '{path}': there is no file tokenizer.json; give a checkpoint's directory"
        )
    return tokenizer_files.load(file)


@functools.cache
def _json(path: str, name: str) -> dict[str, Any]:
    file = pathlib.Path(path) / name
    return read_json(file) if os.path.lexists(file) else {}


@functools.cache
def _compiled(template: str) -> Any:
    try:
        from envs.text.templates import Template
    except ImportError as error:
        raise FdgError(f"chat templates: pip install 'fdg[language]' ({one_line(error)})") from error
    return Template(template)


@functools.cache
def _token_codes(path: str) -> tuple[np.ndarray, np.ndarray]:
    loaded = _loaded(path)
    with tokenizer_files.library_errors(f"tokenizer of '{path}'"):
        return _read_codes(loaded)


def _read_codes(loaded: Any) -> tuple[np.ndarray, np.ndarray]:
    size = loaded.get_vocab_size(with_added_tokens=True)
    special = {i for i, added in loaded.get_added_tokens_decoder().items() if added.special}
    codes, counts = np.zeros((size, _LONGEST), np.uint8), np.zeros(size, np.int32)
    # Between two others, a token keeps the blank that some decoders take from the first one.
    anchor = loaded.encode("a", add_special_tokens=False).ids
    around = len(loaded.decode(anchor))
    texts = loaded.decode_batch([[*anchor, token] for token in range(size)], skip_special_tokens=False)
    for token, text in enumerate(texts):
        if token in special:
            continue
        text = text[around:]
        if not text.isascii() or len(text) > _LONGEST:
            text = "\x7f"
        counts[token] = len(text)
        codes[token, : len(text)] = list(text.encode())
    return codes, counts
