"""Finds prompts, answers and preferences in the columns of a data file, with the names of TRL's datasets.

A text is a string, or messages of a conversation: `[{"role": "user", "content": "1+1=?"}]`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.text.files import Record
from envs.text.rows import Message, Row
from fdg.errors import FdgError, listed

PROMPTS = ("prompt", "problem", "question")
ANSWERS = ("completion", "answer", "solution", "response")

Conversation = tuple[Message, ...]


def row(record: Record, prompt: str = "", answer: str = "") -> Row:
    """A prompt and its answer, from `prompt` and `completion`, or from `messages` that end with the
    assistant's.

    `prompt` and `answer` are column names; if empty, the first existing one of `PROMPTS` and `ANSWERS`.

    >>> row(Record("data.jsonl, line 1", {"prompt": "1+1=", "answer": 2, "level": 3})).answer
    '2'
    >>> row(Record("data.jsonl, line 1", {"text": "1+1=2"}))
    Traceback (most recent call last):
    fdg.errors.FdgError: data.jsonl, line 1: has no column 'prompt' (or problem, question, messages), only
      'text': rename one of them, or name it (prompt_column=)
    """
    location, columns = record
    prompt_column = _column(record, PROMPTS, prompt)
    answer_column = _column(record, ANSWERS, answer)
    if answer_column is None and columns.keys() >= {"chosen", "rejected"}:
        raise FdgError(
            f"{location}: has preferences, 'chosen' and 'rejected': write text:preferences?path=..."
        )
    if prompt_column is None and "messages" in columns and not prompt:
        messages = _messages(location, "messages", columns["messages"])
        last_message = messages[-1]
        if last_message["role"] != "assistant":
            return Row(messages, _answer(record, answer_column), columns, location)
        if len(messages) == 1:
            raise FdgError(f"{location}: 'messages' has only an answer: put a message of the user before it")
        return Row(
            messages[:-1], _content(f"{location}: the last of 'messages'", last_message), columns, location
        )
    if prompt_column is None:
        columns_text = listed([repr(name) for name in columns], "and") or "nothing"
        expected = f"'{prompt}'" if prompt else f"'{PROMPTS[0]}' (or {', '.join(PROMPTS[1:])}, messages)"
        raise FdgError(
            f"{location}: has no column {expected}, only {columns_text}: rename one of them, or name it"
            " (prompt_column=)"
        )
    if answer and answer_column is None:
        raise FdgError(f"{location}: has no column '{answer}': rename one, or leave answer_column= out")
    return Row(
        _text(location, prompt_column, columns[prompt_column]),
        _answer(record, answer_column),
        columns,
        location,
    )


def pair(record: Record) -> tuple[Row, Row]:
    """A prompt with its preferred and rejected answers, from `prompt`, `chosen` and `rejected`.

    If the prompt is missing, or repeated in the answers' messages, it is their common beginning.

    >>> both = {"chosen": "Hi! Bye.", "rejected": "Hi! No."}
    >>> [(one.prompt, one.answer) for one in pair(Record("data.jsonl, line 1", both))]
    [('Hi!', ' Bye.'), ('Hi!', ' No.')]
    """
    location, columns = record
    for name in ("chosen", "rejected"):
        if name not in columns:
            columns_text = listed([repr(column) for column in columns], "and") or "nothing"
            candidates = [column for column in columns if column not in (*PROMPTS, "chosen", "rejected")]
            fix = "rename one, or write text:file?path=..."
            if len(candidates) == 1 and columns.keys() & {"chosen", "rejected"}:
                fix = f"rename '{candidates[0]}' to '{name}'"
            raise FdgError(f"{location}: has no column '{name}', only {columns_text}: {fix}")
    chosen, rejected = (_text(location, name, columns[name]) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise FdgError(
            f"{location}: 'chosen' and 'rejected' are a text and messages: write both as text, or both as"
            " messages"
        )
    prompt_column = _column(record, PROMPTS, "")
    prompt = None if prompt_column is None else _text(location, prompt_column, columns[prompt_column])
    if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
        shared = _common_prefix_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt or not chosen or not rejected:
            raise FdgError(
                f"{location}: has no column 'prompt', and 'chosen' and 'rejected' do not begin alike and then"
                " differ: give the prompt"
            )
    answers = (_answer_text(location, "chosen", chosen), _answer_text(location, "rejected", rejected))
    return Row(prompt, answers[0], columns, location), Row(prompt, answers[1], columns, location)


def _column(record: Record, names: Sequence[str], given_name: str) -> str | None:
    """The column `given_name`, or else the first of `names`, if the row has it; None otherwise."""
    return next((name for name in ([given_name] if given_name else names) if name in record.columns), None)


def _answer(record: Record, column: str | None) -> str | None:
    if column is None or record.columns[column] is None:
        return None
    return _answer_text(record.location, column, record.columns[column])


def _answer_text(location: str, column: str, value: Any) -> str:
    """An answer as text; it may be an assistant message."""
    text = _text(location, column, value, "")
    if isinstance(text, str):
        return text
    if len(text) != 1 or text[0]["role"] != "assistant":
        roles = listed([message["role"] for message in text], "and")
        raise FdgError(f"{location}: '{column}' has messages of {roles}: give one message of the assistant")
    return _content(f"{location}: '{column}'", text[0])


def _content(label: str, message: Message) -> str:
    """The text of an answer's message."""
    if message.get("tool_calls"):
        raise FdgError(
            f"{label} calls tools (tool_calls), but only the content of an answer is learned: write the"
            " call there, as the chat template writes it, or leave the row out"
        )
    return str(message["content"])


def _text(location: str, column: str, value: Any, default: str = " ") -> Any:
    """A text, or messages; numbers become text."""
    if isinstance(value, list | tuple):
        return _messages(location, column, value)
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and (value or not default):
        return value
    problem = "is empty" if value == "" else f"is {json.dumps(value):.60}"
    raise FdgError(f"{location}: '{column}' {problem}: write a text or messages there, or leave the row out")


def _messages(location: str, column: str, value: Any) -> Conversation:
    fix = 'write [{"role": "user", "content": "1+1=?"}]'
    if not isinstance(value, list | tuple) or not value:
        raise FdgError(f"{location}: '{column}' is {json.dumps(value):.60}, not a list of messages: {fix}")
    return tuple(
        _message(f"{location}: message {i} of '{column}'", message, fix) for i, message in enumerate(value, 1)
    )


def _message(location: str, value: Any, fix: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise FdgError(f"{location} is {json.dumps(value):.60}, without a role: {fix}")
    content = value.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
        raise FdgError(f"{location} has content {json.dumps(content):.60}, which is not a text: {fix}")
    return {**value, "content": content}


def _common_prefix_length(chosen: Any, rejected: Any) -> int:
    """Length of the common beginning of two answers, in characters or messages; blanks before texts
    excluded."""
    shorter = min(len(chosen), len(rejected))
    length = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    is_text = isinstance(chosen, str)
    return length - 1 if is_text and length > 0 and chosen[length - 1] == " " else length
