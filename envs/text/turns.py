"""Masks of the assistant's tokens before its answer, for losses on every turn."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from envs.text.rows import Message, Row, content_of, messages_of
from fdg.errors import FdgError

_PRIVATE = range(0xE000, 0xF8FF)  # private-use characters


def of_characters(row: Row) -> list[bool]:
    """The mask for a prompt of characters, with a begin token and a line per message."""
    if isinstance(row.prompt, str):
        return [False] * (1 + len(row.prompt))
    lines = [[one["role"] == "assistant"] * len(content_of(one)) for one in row.prompt]
    return [False, *itertools.chain(*(([False] * (i > 0)) + line for i, line in enumerate(lines)))]


def of_template(
    tokenizer: Any, row: Row, instruction: str, system: str, arguments: Mapping[str, Any]
) -> list[bool]:
    """The mask for a prompt from a chat template.

    It marks the content of `{% generation %}`; without that tag, the text after each generation prompt, up to
    the token that ends it.
    """
    messages = messages_of(row.prompt, instruction, system)
    values = {**arguments, **row.template_arguments}
    text = tokenizer.chat(messages, True, **values)
    marks = "".join(itertools.islice((c for c in map(chr, _PRIVATE) if c not in text), 2))
    marked = tokenizer.chat(messages, True, marks, **values)
    if marked != text:
        spans = _spans_between_marks(marked, marks, text)
        return _mask_of_spans(tokenizer.places(text), spans, ())
    spans = []
    for i, one in enumerate(messages):
        if one["role"] == "assistant":
            before, after = (
                tokenizer.chat(messages[:i], True, **values),
                tokenizer.chat(messages[: i + 1], False, **values),
            )
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise FdgError(
                    f"message {i + 1} of '{row.text:.60}': the chat template formats it differently once the"
                    " conversation continues, so the assistant's tokens are unknown: put"
                    " {% generation %} and {% endgeneration %} around it in the template, or leave out"
                    " loss_on='assistant'"
                )
            spans.append((len(before), len(before) + len(text[len(before) : len(after)].rstrip())))
    return _mask_of_spans(tokenizer.places(text), spans, tokenizer.stops)


def of_lines(tokenizer: Any, messages: Sequence[Message]) -> list[bool]:
    """The mask for a prompt without a template, with a line per message."""
    lines = [f"{content_of(one)}\n" for one in messages]
    ends = list(itertools.accumulate(map(len, lines)))
    spans = [
        (end - len(line), end - 1)
        for one, line, end in zip(messages, lines, ends, strict=True)
        if one["role"] == "assistant"
    ]
    return _mask_of_spans(tokenizer.places("".join(lines)), spans, ())


def _spans_between_marks(marked: str, marks: str, text: str) -> list[tuple[int, int]]:
    """Removes marks from a text; returns the spans that they enclosed."""
    spans, start, place = [], 0, 0
    for c in marked:
        if c == marks[0]:
            start = place
        elif c == marks[1]:
            spans.append((start, place))
        else:
            place += 1
    if marked.replace(marks[0], "").replace(marks[1], "") != text:
        raise FdgError(
            "the chat template changes what is within {% generation %} afterwards: write it there unchanged"
        )
    return spans


def _mask_of_spans(
    ids_and_places: tuple[Sequence[int], Sequence[tuple[int, int]]],
    spans: Sequence[tuple[int, int]],
    stops: Sequence[int],
) -> list[bool]:
    """Mask of tokens (ids, and positions in a text) within spans; none after the last of `stops` in a
    span."""
    ids, places = ids_and_places
    marked = [False] * len(ids)
    for start, end in spans:
        touched = [i for i, (a, b) in enumerate(places) if a < end and b > start and b > a]
        last = max((i for i in touched if ids[i] in stops), default=max(touched, default=-1))
        for i in range(min(touched, default=0), last + 1):
            marked[i] = True
    return marked
