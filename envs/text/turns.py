"""Masks of the assistant's tokens in a prompt, for losses on every turn of a conversation."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from envs.text.rows import Message, Row, content_of, messages_of
from fdg.errors import FdgError

_PRIVATE_USE = range(0xE000, 0xF8FF)  # Unicode's private-use characters


def mask_from_characters(row: Row) -> list[bool]:
    """The mask of a prompt's tokens (True: the assistant's) for a `CharacterTokenizer`, one per character.

    The tokens are a begin token and one line per message.
    """
    if isinstance(row.prompt, str):
        return [False] * (1 + len(row.prompt))
    lines = [[message["role"] == "assistant"] * len(content_of(message)) for message in row.prompt]
    return [False, *itertools.chain(*(([False] * (i > 0)) + line for i, line in enumerate(lines)))]


def mask_from_template(
    tokenizer: Any, row: Row, instruction: str, system: str, arguments: Mapping[str, Any]
) -> list[bool]:
    """The mask for a prompt from a chat template.

    It marks the content of `{% generation %}`. If the template has no such tag, it marks the text after each
    generation prompt, up to the token that ends the turn.
    """
    messages = messages_of(row.prompt, instruction, system)
    values = {**arguments, **row.template_arguments}
    text = tokenizer.render(messages, True, values)
    marks = "".join(itertools.islice((c for c in map(chr, _PRIVATE_USE) if c not in text), 2))
    marked = tokenizer.render(messages, True, values, marks)
    if marked != text:
        spans = _spans_between_marks(marked, marks, text, tokenizer.path)
        return _mark_spans(tokenizer.encode_with_offsets(text), spans, ())
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = (
                tokenizer.render(messages[:i], True, values),
                tokenizer.render(messages[: i + 1], False, values),
            )
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise FdgError(
                    f"message {i + 1} of '{row.text:.60}': the chat template formats it differently once the"
                    " conversation continues, so the assistant's tokens are unknown: put"
                    " {% generation %} and {% endgeneration %} around it in the template, or leave out"
                    " loss_on='assistant'"
                )
            spans.append((len(before), len(before) + len(text[len(before) : len(after)].rstrip())))
    return _mark_spans(tokenizer.encode_with_offsets(text), spans, tokenizer.stops)


def mask_from_lines(tokenizer: Any, messages: Sequence[Message]) -> list[bool]:
    """The mask for a prompt without a template, with a line per message."""
    lines = [f"{content_of(message)}\n" for message in messages]
    ends = list(itertools.accumulate(map(len, lines)))
    spans = [
        (end - len(line), end - 1)
        for message, line, end in zip(messages, lines, ends, strict=True)
        if message["role"] == "assistant"
    ]
    return _mark_spans(tokenizer.encode_with_offsets("".join(lines)), spans, ())


def _spans_between_marks(marked: str, marks: str, text: str, checkpoint: str) -> list[tuple[int, int]]:
    """The spans that the marks enclose, as positions in the text without marks."""
    spans, start, position = [], 0, 0
    for c in marked:
        if c == marks[0]:
            start = position
        elif c == marks[1]:
            spans.append((start, position))
        else:
            position += 1
    if (unmarked := marked.replace(marks[0], "").replace(marks[1], "")) != text:
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(text, unmarked)) if a != b)
        raise FdgError(
            f"checkpoint '{checkpoint}': its chat template filters the text inside {{% generation %}}:"
            f" {text[at:][:60]!r} becomes {unmarked[at:][:60]!r} when fdg puts marks around that text:"
            " remove the filter from the template"
        )
    return spans


def _mark_spans(
    ids_and_offsets: tuple[Sequence[int], Sequence[tuple[int, int]]],
    spans: Sequence[tuple[int, int]],
    stops: Sequence[int],
) -> list[bool]:
    """Marks the tokens that touch a span of the text, but not those after the last of `stops` in a span."""
    ids, offsets = ids_and_offsets
    mask = [False] * len(ids)
    for start, end in spans:
        touched = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
        last = max((i for i in touched if ids[i] in stops), default=max(touched, default=-1))
        for i in range(min(touched, default=0), last + 1):
            mask[i] = True
    return mask
