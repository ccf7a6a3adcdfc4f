"""Tokenizers, and their tables for encoding and decoding in compiled programs.

A tokenizer is a hashable value. `encode`, `encode_rows` and `decode` run on the host; programs decode with
the tables `codes_of_tokens` and `codes_at_ends`, or if there are none, with `decode` of each token. Programs
encode only for a `CharacterTokenizer`, one token per character; other tokenizers encode whole texts on the
host (`envs/text/encoding.py`).
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from envs.text import token_bytes, tokenizer_config, tokenizer_files, turns
from envs.text.rows import Message, Row, content_of, messages_of, refuse_tool_calls
from fdg.arguments import checked_names, quoted
from fdg.errors import FdgError, listed, one_line

COMMON = "0123456789+-*/%()=<>,;:?!. " + "abcdefghijklmnopqrstuvwxyz"
"""The characters of all problems here, so that one small model can learn all of them."""


Arguments = Mapping[str, Any]  # of a chat template, by name
_NO_ARGS: Arguments = types.MappingProxyType({})


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def pad(self) -> int:
        """The padding token."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[tuple[list[int], list[int]]]:
        """For each row, the tokens of its prompt, which ends where the answer begins, and of its answer.

        Args:
          rows: problems; an answer of None has no tokens.
          instruction: text before each problem.
          system: the system message.
          arguments: arguments of the chat template.
        """

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[list[bool]]:
        """Masks of the assistant's tokens from earlier turns in each row's prompt, as in `encode_rows`."""


@checked_names
@dataclasses.dataclass(frozen=True)
class CharacterTokenizer:
    """A token for each character of an alphabet, after three special tokens.

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
    _FIRST_CHARACTER: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, str) or not self.alphabet:
            raise FdgError(
                f"CharacterTokenizer({self.alphabet!r:.60}): give a string of its characters, in order"
            )
        duplicates = [c for i, c in enumerate(self.alphabet) if c in self.alphabet[:i]]
        if duplicates:
            raise FdgError(
                f"CharacterTokenizer: {duplicates[0]!r} occurs twice in its alphabet {self.alphabet!r:.60}"
            )

    @property
    def vocab_size(self) -> int:
        """The number of characters and special tokens."""
        return self._FIRST_CHARACTER + len(self.alphabet)

    @property
    def stops(self) -> tuple[int, ...]:
        """The end-of-sequence token."""
        return (self.eos,)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
          FdgError: a character is not in the alphabet; the message names the first such character.
        """
        _check_text(text)
        for i, c in enumerate(text):
            if c not in self.alphabet:
                raise FdgError(
                    f"text {text!r:.60}: {c!r} at {i} is not in the alphabet {self.alphabet!r:.80}"
                )
        return [self._FIRST_CHARACTER + self.alphabet.index(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
          FdgError: a number is no token.
        """
        numbers = _token_numbers(ids, self.vocab_size)
        return "".join(
            self.alphabet[i - self._FIRST_CHARACTER] for i in numbers if i >= self._FIRST_CHARACTER
        )

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[tuple[list[int], list[int]]]:
        """See `Tokenizer.encode_rows`: a prompt is a begin token and the problem.

        Instructions are ignored, since a model trained from scratch does not know language.
        """
        refuse_tool_calls(rows)
        return [([self.bos, *self.encode(row.text)], self.encode(row.answer or "")) for row in rows]

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[list[bool]]:
        """See `Tokenizer.said_before`."""
        return [turns.mask_from_characters(row) for row in rows]


@checked_names
@dataclasses.dataclass(frozen=True)
class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint on disk: `tokenizer.json`, chat template, stop tokens.

    Attributes:
      path: the checkpoint's directory; nothing is downloaded. Tokenizers with equal files are equal, in any
        directory.
    """

    path: str = dataclasses.field(compare=False)
    digest: str = dataclasses.field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise FdgError(f"HuggingFaceTokenizer({quoted(self.path)}): give the directory of a checkpoint")
        object.__setattr__(self, "path", str(pathlib.Path(self.path).absolute()))
        tokenizer_config.load(self._folder)
        object.__setattr__(self, "digest", tokenizer_config.digest(self._folder))

    @functools.cached_property
    def _folder(self) -> tokenizer_config.Folder:
        """The folder as it was when this object was made."""
        return tokenizer_config.Folder.of(self.path)

    @property
    def vocab_size(self) -> int:
        """Tokens of the file, including added ones; a model's embedding may have more rows."""
        return tokenizer_files.vocab_size(tokenizer_config.load(self._folder))

    @property
    def pad(self) -> int:
        """The checkpoint's padding token, or its first stop token."""
        named = self._special_token("pad_token")
        return self.stops[0] if named is None else named

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token, if any."""
        return self._special_token("bos_token")

    @property
    def eos(self) -> int:
        """The first of `stops`."""
        return self.stops[0]

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end an answer.

        They are the tokenizer's end-of-sequence token, which also ends turns of its chat template, and those
        of `generation_config.json` and `config.json`.

        Raises:
          FdgError: the checkpoint defines none.
        """
        named = self._special_token("eos_token")
        ids = [
            *([] if named is None else [named]),
            *tokenizer_config.stop_tokens(self._folder, "generation_config.json"),
            *tokenizer_config.stop_tokens(self._folder, "config.json"),
        ]
        if not ids:
            raise FdgError(
                f"checkpoint '{self.path}': neither its tokenizer nor config.json has an eos token"
                " (eos_token_id)"
            )
        return tuple(dict.fromkeys(ids))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it.

        A special token that the text spells out is encoded as that token.
        """
        _check_text(text)
        return self.encode_with_offsets(text)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
          FdgError: a number is no token.
        """
        # The library's `skip_special_tokens` keeps those that its normalizer changes, as `</s>` to `▁</s>`.
        numbers = _token_numbers(ids, self.vocab_size)
        with self._library() as loaded:
            special = tokenizer_files.special_numbers(loaded)
            return loaded.decode([i for i in numbers if i not in special], skip_special_tokens=False)

    def encode_rows(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[tuple[list[int], list[int]]]:
        """See `Tokenizer.encode_rows`.

        A prompt is one text: the output of the chat template, or, without a template, one line per message
        after the library's begin tokens. The two are encoded together; the tokens after the prompt's are the
        answer's. If a token spans both, the answer is encoded alone. If prompt and answer then do not
        decode to their joint text, the answer is encoded after an anchor character, which is then removed.
        """
        has_template = bool(self.chat_templates) or "chat_template" in arguments
        conversations = [messages_of(row.prompt, instruction, system) for row in rows]
        if has_template:
            prompts = [
                self.render(messages, True, {**arguments, **row.template_arguments})
                for messages, row in zip(conversations, rows, strict=True)
            ]
        else:
            refuse_tool_calls(rows)
            prompts = ["".join(f"{content_of(m)}\n" for m in messages) for messages in conversations]
        begin = [] if has_template else self._begin_tokens
        prompt_ids = self._encode_batch(prompts)
        joint_ids = self._encode_batch([p + (row.answer or "") for p, row in zip(prompts, rows, strict=True)])
        encoded = []
        for row, before, joint in zip(rows, prompt_ids, joint_ids, strict=True):
            answer = [] if row.answer is None else joint[len(before) :]
            if joint[: len(before)] != before:
                answer = self._encode_after(before, joint, row.answer or "")
            encoded.append(([*begin, *before], answer))
        return encoded

    def said_before(
        self, rows: Sequence[Row], instruction: str = "", system: str = "", arguments: Arguments = _NO_ARGS
    ) -> list[list[bool]]:
        """See `Tokenizer.said_before`, and `envs/text/turns.py`."""
        if self.chat_templates or "chat_template" in arguments:
            return [turns.mask_from_template(self, row, instruction, system, arguments) for row in rows]
        begin = [False] * len(self._begin_tokens)
        messages = [messages_of(row.prompt, instruction, system) for row in rows]
        return [[*begin, *turns.mask_from_lines(self, conversation)] for conversation in messages]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, as in `encode`, and each token's start and end characters."""
        with self._library() as loaded:
            encoding = loaded.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _encode_after(self, before: list[int], joint: list[int], answer: str) -> list[int]:
        """Encodes an answer if `joint`, the tokens of prompt and answer, does not begin with the prompt's."""
        text = self.decode(joint)
        for anchor in ("", "\n", "a", "1", "."):
            start, ids = self.encode(anchor), self.encode(anchor + answer)
            if ids[: len(start)] == start and self.decode([*before, *ids[len(start) :]]) == text:
                return ids[len(start) :]
        return self.encode(answer)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        with self._library() as loaded:
            return [encoding.ids for encoding in loaded.encode_batch(texts, add_special_tokens=False)]

    @property
    def _begin_tokens(self) -> list[int]:
        """The special tokens that the library puts before a text."""
        with self._library() as loaded:
            words = filter(None, map(loaded.id_to_token, range(self.vocab_size)))
            for text in itertools.chain("a", words):  # a vocabulary may lack "a", which then has no tokens
                encoding = loaded.encode(text, add_special_tokens=True)
                if 0 in encoding.special_tokens_mask:
                    return encoding.ids[: encoding.special_tokens_mask.index(0)]
        return []

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        generation_marks: str = "",
        **arguments: Any,
    ) -> str:
        """Renders messages with the checkpoint's chat template, with the variables of Transformers.

        Args:
          messages: each has `role`, `content`, and other keys that the template reads; keys with the value
            None are dropped.
          add_generation_prompt: append the beginning of an answer.
          generation_marks: two characters that replace `{% generation %}` and its end.
          arguments: further JSON variables of the template: `tools`, `documents`, `enable_thinking`, ...;
            `chat_template`, the name of another template of the checkpoint, or its text.

        Raises:
          FdgError: there is no template, or it rejects the messages.
        """
        return self.render(messages, add_generation_prompt, arguments, generation_marks)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        arguments: Arguments,
        generation_marks: str = "",
    ) -> str:
        """`chat` with its arguments as a mapping; values are passed to the template as JSON values."""
        template = self._choose_template(arguments.get("chat_template"), arguments.get("tools"))
        for i, message in enumerate(messages if np.iterable(messages) else [messages]):
            if not isinstance(message, Mapping):
                raise FdgError(
                    f"message {i} is {quoted(message)}: it must be a mapping, as in"
                    ' {"role": "user", "content": "..."}'
                )
        cleaned = [{k: v for k, v in message.items() if v is not None} for message in messages]
        context = {"tools": None, "documents": None, **self.special_tokens, **arguments, "messages": cleaned}
        values = {"add_generation_prompt": add_generation_prompt, **context}
        values.pop("chat_template", None)
        for name, value in values.items():
            try:
                values[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError, RecursionError) as error:
                fix = "give text, numbers, booleans, None, lists and dicts"
                raise FdgError(f"chat template: {name} is not JSON ({one_line(error)}): {fix}") from error
        try:
            return _compile_template(template).render(generation_marks, **values)
        except FdgError:
            raise
        except Exception as error:
            raise FdgError(f"checkpoint '{self.path}': its chat template raised {one_line(error)}") from error

    @property
    def chat_template(self) -> str | None:
        """The default template; None if there is none."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates by name; that of `chat_template.jinja` is `default`.

        The others are in `additional_chat_templates/NAME.jinja`. Without such files, all are those of
        `tokenizer_config.json`.
        """
        return tokenizer_config.chat_templates(self._folder)

    def _choose_template(self, choice: Any, tools: Any) -> str:
        """The text of the template: `choice` (a name or a text), or the one for tools, or the default."""
        templates = self.chat_templates
        if isinstance(choice, str):
            return templates.get(choice, choice)
        if choice is not None:
            raise FdgError(f"chat_template={quoted(choice)}: it must be the name of a template, or its text")
        for name in ["tool_use"] * (tools is not None) + ["default"]:
            if name in templates:
                return templates[name]
        several = "it has several chat templates and no default"
        problem = several if templates else "no chat_template in tokenizer_config.json"
        names = listed([repr(name) for name in templates] or ["TEMPLATE"], "or")
        raise FdgError(f"checkpoint '{self.path}': {problem}: give chat_template={names}")

    @property
    def special_tokens(self) -> Mapping[str, str | list[str]]:
        """Special tokens by name (`bos_token`, `additional_special_tokens`, ...), for templates.

        They are those of the tokenizer's configuration or of `special_tokens_map.json`.
        """
        return tokenizer_config.special_tokens(self._folder)

    def codes_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """UTF-8 bytes of each token, `[V, C] uint8`, zero-padded; and their number, `[V] int32`.

        A token may have a part of a character. Special tokens have 0 bytes. Tokens of more than 128 bytes
        become a character `\\x7f`.
        """
        return token_bytes.pad_bytes(_token_bytes(self._folder)[0])

    def codes_at_ends(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`codes_of_tokens` for the first token of a text, the last, and the only one.

        Empty if no token has other bytes there.
        """
        return [token_bytes.pad_bytes(pieces) for pieces in _token_bytes(self._folder)[1:]]

    @contextlib.contextmanager
    def _library(self) -> Iterator[Any]:
        """The library's tokenizer, whose errors become one-line errors."""
        with tokenizer_files.library_errors(f"tokenizer of '{self.path}'"):
            yield tokenizer_config.load(self._folder)

    def _special_token(self, name: str) -> int | None:
        """The number of a special token; None if the checkpoint defines none."""
        word = self.special_tokens.get(name)
        return None if word is None else tokenizer_config.load(self._folder).token_to_id(word)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise FdgError(f"encode({quoted(text)}): give a string")


def _token_numbers(ids: Any, vocab_size: int) -> list[int]:
    """Tokens as integers; raises an `FdgError` that names the first number outside the vocabulary."""
    try:
        numbers = [int(i) for i in ids]
    except (TypeError, ValueError, OverflowError):  # None, text, NaN, infinity
        raise FdgError(
            f"decode({quoted(ids)}): give the numbers of tokens, as `encode` returns them"
        ) from None
    for i, token in enumerate(numbers):
        if not 0 <= token < vocab_size:
            raise FdgError(f"token {token} at {i} is not in the vocabulary, whose last is {vocab_size - 1}")
    return numbers


@functools.cache
def _compile_template(template: str) -> Any:
    """A template, compiled once."""
    try:
        from envs.text.templates import Template
    except ImportError as error:
        raise FdgError(
            f"chat templates need jinja2: pip install 'fdg[language]' ({one_line(error)})"
        ) from error
    return Template(template)


@functools.cache
def _token_bytes(folder: tokenizer_config.Folder) -> list[list[bytes]]:
    """The bytes of each token, as in `token_bytes.decode_each_token`."""
    with tokenizer_files.library_errors(f"tokenizer of '{folder}'"):
        return token_bytes.decode_each_token(tokenizer_config.load(folder), str(folder))
