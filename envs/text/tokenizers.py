"""Tokenizers: between text and numbers, and the tables by which compiled programs do the same.

A tokenizer is a value that hashes. `encode`, `encode_rows` and `decode` run on the host; `codes_of_tokens`
and `opening_blanks` are tables by which a program reads what tokens say, as `decode` does. A program writes
text by itself only for a `CharacterTokenizer`, a token a character; for any other, whole texts are encoded on
the host (`envs/text/encoding.py`).
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from envs.text import token_bytes, tokenizer_config, tokenizer_files, turns
from envs.text.rows import Message, Row, content_of, messages_of, refuse_calls
from fdg.arguments import checked_names, quoted
from fdg.errors import FdgError, listed, one_line

COMMON = "0123456789+-*/%()=<>,;:?!. " + "abcdefghijklmnopqrstuvwxyz"
"""The characters that every problem here makes do with, so that one small model can learn all of them."""


Arguments = Mapping[str, Any]
_NONE: Arguments = types.MappingProxyType({})


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

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[tuple[list[int], list[int]]]:
        """The tokens of each row's prompt, from the first to where its answer begins, and of its answer.

        Args:
          rows: problems; an answer of None has no tokens.
          instruction: text in front of each.
          system: the system message.
          arguments: of the chat template.
        """

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[list[bool]]:
        """Which tokens of each row's prompt, as in `encode_rows`, the assistant said in earlier turns."""

    def token_of_code(self) -> np.ndarray:
        """`[128] int32`: the token that this ASCII character is encoded as; -1 where there is none."""

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """`[V, C] uint8` bytes (UTF-8) of each token, and `[V] int32` how many; 0 for special ones."""

    def opening_blanks(self) -> np.ndarray:
        """`[V] int32`: how many bytes a token loses in front where it is the first of a text."""


@checked_names
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
        if not isinstance(self.alphabet, str) or not self.alphabet:
            raise FdgError(
                f"CharacterTokenizer({self.alphabet!r:.60}): give a string of its characters, in order"
            )
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

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[tuple[list[int], list[int]]]:
        """See `Tokenizer.encode_rows`: a beginning and the problem; a model that starts from nothing is not
        told what to do.
        """
        refuse_calls(rows)
        return [([self.bos, *self.encode(row.text)], self.encode(row.answer or "")) for row in rows]

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[list[bool]]:
        """See `Tokenizer.said_before`."""
        return [turns.of_characters(row) for row in rows]

    def token_of_code(self) -> np.ndarray:
        """See `Tokenizer.token_of_code`."""
        table = np.full(128, -1, np.int32)
        for i, c in enumerate(self.alphabet):
            if c.isascii():
                table[ord(c)] = self._FIRST + i
        return table

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.codes_of_tokens`."""
        return token_bytes.padded([*[b""] * self._FIRST, *(c.encode() for c in self.alphabet)])

    def opening_blanks(self) -> np.ndarray:
        """None: see `Tokenizer.opening_blanks`."""
        return np.zeros(self.vocab_size, np.int32)


@checked_names
@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint on disk: its `tokenizer.json`, chat template and stop
    tokens.

    Attributes:
      path: the checkpoint's directory; nothing is downloaded. Tokenizers are equal if their files say the
        same, wherever they are.
    """

    path: str = dataclasses.field(compare=False)
    digest: str = dataclasses.field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(pathlib.Path(self.path).absolute()))
        tokenizer_config.loaded(self.path)
        object.__setattr__(self, "digest", tokenizer_config.digest(self.path))

    @property
    def vocab_size(self) -> int:
        """Tokens of the file, added ones too; a model's embedding may have more rows."""
        return tokenizer_config.size(self.path)

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
        """The end of sequence of the tokenizer's configuration, which ends turns of its chat template, and
        the tokens of `generation_config.json`.

        Raises:
          FdgError: the checkpoint names none.
        """
        named = self._named("eos_token")
        found = [
            *([] if named is None else [named]),
            *tokenizer_config.stops(self.path, "generation_config.json"),
            *tokenizer_config.stops(self.path, "config.json"),
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
            return list(tokenizer_config.loaded(self.path).encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
          FdgError: a number that is no token.
        """
        ids = [int(i) for i in ids]
        check_tokens(ids, self.vocab_size)
        with self._library():
            return tokenizer_config.loaded(self.path).decode(ids, skip_special_tokens=True)

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[tuple[list[int], list[int]]]:
        """See `Tokenizer.encode_rows`. A prompt is one text, encoded whole: what the chat template makes of
        its messages, or, without a template, a line each, with the special tokens that the library puts in
        front.

        An answer is what the encoding of prompt and answer as one text has behind the prompt's tokens. Where
        it does not begin with these (a token reaches over the border), it is the answer's own encoding, by
        itself or behind another character, whichever makes the same text of both.
        """
        templated = self.chat_template is not None or "chat_template" in arguments
        conversations = [messages_of(row.prompt, instruction, system) for row in rows]
        if templated:
            prompts = [
                self._rendered(messages, True, {**arguments, **row.template_arguments})
                for messages, row in zip(conversations, rows, strict=True)
            ]
        else:
            refuse_calls(rows)
            prompts = ["".join(f"{content_of(one)}\n" for one in messages) for messages in conversations]
        front = [] if templated else self._front
        asked = self._encoded(prompts)
        whole = self._encoded([p + (row.answer or "") for p, row in zip(prompts, rows, strict=True)])
        found = []
        for row, before, both in zip(rows, asked, whole, strict=True):
            answer = [] if row.answer is None else both[len(before) :]
            if both[: len(before)] != before:
                answer = self._continued(before, both, row.answer or "")
            found.append(([*front, *before], answer))
        return found

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NONE
    ) -> list[list[bool]]:
        """See `Tokenizer.said_before`, and `envs/text/turns.py`."""
        if self.chat_template is not None or "chat_template" in arguments:
            return [turns.of_template(self, row, instruction, system, arguments) for row in rows]
        front = [False] * len(self._front)
        messages = [messages_of(row.prompt, instruction, system) for row in rows]
        return [[*front, *turns.of_lines(self, one)] for one in messages]

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, as `encode`, and where in it the characters of each begin and end."""
        with self._library():
            found = tokenizer_config.loaded(self.path).encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def _continued(self, before: list[int], both: list[int], answer: str) -> list[int]:
        """An answer behind tokens that its encoding together with them does not begin with."""
        text = self.decode(both)
        for anchor in ("", "\n", "a", "1", "."):
            start, ids = self.encode(anchor), self.encode(anchor + answer)
            if ids[: len(start)] == start and self.decode([*before, *ids[len(start) :]]) == text:
                return ids[len(start) :]
        return self.encode(answer)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        with self._library():
            return [
                one.ids
                for one in tokenizer_config.loaded(self.path).encode_batch(texts, add_special_tokens=False)
            ]

    @property
    def _front(self) -> list[int]:
        """The special tokens that the library puts in front of a text."""
        with self._library():
            found = tokenizer_config.loaded(self.path).encode("a", add_special_tokens=True)
        own = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        return found.ids[: own[0]] if own else []

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        generation_marks: str = "",
        **arguments: Any,
    ) -> str:
        """Messages as the checkpoint's chat template writes them, given what Transformers gives it.

        Args:
          messages: `role` and `content` each, and what else the template reads; what is None is left out.
          add_generation_prompt: whether the beginning of an answer follows.
          generation_marks: two characters, written where `{% generation %}` begins and where it ends.
          arguments: further ones of the template, JSON's kinds of values: `tools`, `documents`,
            `enable_thinking`, ...; `chat_template`, the name of another one of the checkpoint's, or its text.

        Raises:
          FdgError: it has no template, or the template refuses the messages.
        """
        return self._rendered(messages, add_generation_prompt, arguments, generation_marks)

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        arguments: Arguments,
        generation_marks: str = "",
    ) -> str:
        template = self._template(arguments.get("chat_template"), arguments.get("tools"))
        for i, one in enumerate(messages):
            if not isinstance(one, Mapping):
                raise FdgError(
                    f"message {i} is {quoted(one)}: it must be a mapping, as in"
                    ' {"role": "user", "content": "..."}'
                )
        kept = [{key: value for key, value in one.items() if value is not None} for one in messages]
        given = {"tools": None, "documents": None, **self.special_tokens, **arguments, "messages": kept}
        given = {"add_generation_prompt": add_generation_prompt, **given}
        given.pop("chat_template", None)
        try:
            values = json.loads(json.dumps(given))
        except (TypeError, ValueError) as error:
            raise FdgError(f"messages and arguments of a chat template: {one_line(error)}") from error
        try:
            return _compiled(template).render(generation_marks, **values)
        except FdgError:
            raise
        except Exception as error:
            raise FdgError(f"checkpoint '{self.path}': its chat template raised {one_line(error)}") from error

    @property
    def chat_template(self) -> str | None:
        """The template that is used where none is named; None where there is none."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates by name: of `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else of
        `tokenizer_config.json`.
        """
        return tokenizer_config.templates(self.path)

    def _template(self, named: Any, tools: Any) -> str:
        known = self.chat_templates
        if isinstance(named, str):
            return known.get(named, named)
        if named is not None:
            raise FdgError(f"chat_template={quoted(named)}: it must be the name of a template, or its text")
        found = known.get("tool_use") if tools is not None else None
        found = known.get("default") if found is None else found
        if found is None and known:
            raise FdgError(
                f"checkpoint '{self.path}': no chat template is its default: give chat_template="
                f"{listed([repr(name) for name in known], 'or')}"
            )
        if found is None:
            raise FdgError(
                f"checkpoint '{self.path}': no chat_template in tokenizer_config.json: give chat_template="
            )
        return found

    @property
    def special_tokens(self) -> Mapping[str, str | list[str]]:
        """The special tokens by name (`bos_token`, `unk_token`, `additional_special_tokens`, ...), as
        templates see them: those that the tokenizer's configuration or `special_tokens_map.json` has.
        """
        return tokenizer_config.special_tokens(self.path)

    def token_of_code(self) -> np.ndarray:
        """See `Tokenizer.token_of_code`."""
        table = np.full(128, -1, np.int32)
        for code, ids in enumerate(self._encoded([chr(code) for code in range(128)])):
            if ids and self.decode(ids[-1:]) == chr(code):
                table[code] = ids[-1]
        return table

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.codes_of_tokens`; tokens of more than 128 bytes are a character `\\x7f`."""
        return token_bytes.padded(_token_bytes(self.path)[0])

    def opening_blanks(self) -> np.ndarray:
        """See `Tokenizer.opening_blanks`."""
        return _token_bytes(self.path)[1]

    def _library(self) -> contextlib.AbstractContextManager[None]:
        return tokenizer_files.library_errors(f"tokenizer of '{self.path}'")

    def _named(self, name: str) -> int | None:
        word = self.special_tokens.get(name)
        return None if word is None else tokenizer_config.loaded(self.path).token_to_id(word)


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raises an `FdgError` that names the first number that is no token of the vocabulary."""
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise FdgError(f"token {token} at {i} is not in the vocabulary, whose last is {vocab_size - 1}")


@functools.cache
def _compiled(template: str) -> Any:
    try:
        from envs.text.templates import Template
    except ImportError as error:
        raise FdgError(f"chat templates: pip install 'fdg[language]' ({one_line(error)})") from error
    return Template(template)


@functools.cache
def _token_bytes(path: str) -> tuple[list[bytes], np.ndarray]:
    loaded = tokenizer_config.loaded(path)
    with tokenizer_files.library_errors(f"tokenizer of '{path}'"):
        return token_bytes.read(loaded)
