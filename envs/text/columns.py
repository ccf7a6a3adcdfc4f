"""Finds prompts, answers and preferences in the columns of a data file, named as in TRL's datasets.

A text is a string, or messages of a conversation: `[{"role": "user", "content": "1+1=?"}]`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.text.files import Record
from envs.text.rows import Message, Row, content_of
from fdg.errors import FdgError, listed

PROMPTS = ("prompt", "problem", "question")  # names of columns; the first that exists counts
ANSWERS = ("completion", "answer", "solution", "response")  # likewise

Conversation = tuple[Message, ...]


def row(record: Record, prompt: str = "", answer: str = "") -> Row:
    """A prompt and its answer, from `prompt` and `completion`, or from `messages`.

    The last of `messages` is the answer if it is the assistant's. `prompt` and `answer` are column names; if
    empty, the first existing one of `PROMPTS` and `ANSWERS`.

    >>> row(Record("data.jsonl, line 1", {"prompt": "1+1=", "answer": 2, "level": 3})).answer
    '2'
    >>> row(Record("data.jsonl, line 1", {"text": "1+1=2"}))
    Traceback (most recent call last):
    fdg.errors.FdgError: data.jsonl, line 1: has no column 'prompt' (or problem, question, messages), only
      'text': rename one of them, or name it (prompt_column=)
    """
    where, columns = record
    prompt_column = _column(record, PROMPTS, prompt)
    column = _column(record, ANSWERS, answer)
    if column is None and columns.keys() >= {"chosen", "rejected"}:
        raise FdgError(f"{where}: has preferences ('chosen' and 'rejected'): use text:preferences?path=...")
    if prompt_column is None and "messages" in columns and not prompt:
        messages = _messages(where, "messages", columns["messages"])
        last = messages[-1]
        if last["role"] != "assistant":
            return Row(messages, _answer(record, column), columns, where)
        if len(messages) == 1:
            raise FdgError(f"{where}: 'messages' has only an answer: add a message of the user before it")
        return Row(messages[:-1], _message_text(f"{where}: the last of 'messages'", last), columns, where)
    if prompt_column is None:
        others = listed([repr(name) for name in columns], "and") or "nothing"
        wanted = f"'{prompt}'" if prompt else f"'{PROMPTS[0]}' (or {', '.join(PROMPTS[1:])}, messages)"
        raise FdgError(
            f"{where}: has no column {wanted}, only {others}: rename one of them, or name it (prompt_column=)"
        )
    if answer and column is None:
        raise FdgError(f"{where}: has no column '{answer}': rename one, or leave answer_column= out")
    return Row(_text(where, prompt_column, columns[prompt_column]), _answer(record, column), columns, where)


def pair(record: Record) -> tuple[Row, Row]:
    """A prompt with its preferred and rejected answers, from `prompt`, `chosen` and `rejected`.

    If there is no column for the prompt, or both answers' messages repeat it, it is their common beginning.

    >>> both = {"chosen": "Hi! Bye.", "rejected": "Hi! No."}
    >>> [(one.prompt, one.answer) for one in pair(Record("data.jsonl, line 1", both))]
    [('Hi!', ' Bye.'), ('Hi!', ' No.')]
    """
    where, columns = record
    for name in ("chosen", "rejected"):
        if name not in columns:
            others = listed([repr(column) for column in columns], "and") or "nothing"
            unnamed = [column for column in columns if column not in (*PROMPTS, "chosen", "rejected")]
            fix = "rename one, or write text:file?path=..."
            if len(unnamed) == 1 and columns.keys() & {"chosen", "rejected"}:
                fix = f"rename '{unnamed[0]}' to '{name}'"
            raise FdgError(f"{where}: has no column '{name}', only {others}: {fix}")
    chosen, rejected = (_text(where, name, columns[name]) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise FdgError(
            f"{where}: one of 'chosen' and 'rejected' is a text and the other a list of messages:"
            " write both as texts, or both as messages"
        )
    prompt_column = _column(record, PROMPTS, "")
    prompt = None if prompt_column is None else _text(where, prompt_column, columns[prompt_column])
    if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
        prefix_length = _common_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:prefix_length], chosen[prefix_length:], rejected[prefix_length:]
        if not prompt or not chosen or not rejected:
            raise FdgError(
                f"{where}: has no column 'prompt', and 'chosen' and 'rejected' do not share a beginning,"
                " from which the prompt could be taken: add a column 'prompt'"
            )
    answers = (_answer_text(where, "chosen", chosen), _answer_text(where, "rejected", rejected))
    return Row(prompt, answers[0], columns, where), Row(prompt, answers[1], columns, where)


def _column(record: Record, names: Sequence[str], requested: str) -> str | None:
    """The first of `names` that is a column of a record; only `requested`, if that is set."""
    return next((name for name in ([requested] if requested else names) if name in record.columns), None)


def _answer(record: Record, column: str | None) -> str | None:
    """The answer in a column as text; None if there is no column, or no value."""
    if column is None or record.columns[column] is None:
        return None
    return _answer_text(record.where, column, record.columns[column])


def _answer_text(where: str, column: str, value: Any) -> str:
    """An answer as text; it may be an assistant message."""
    content = _text(where, column, value, "")
    if isinstance(content, str):
        return content
    if len(content) != 1 or content[0]["role"] != "assistant":
        roles = listed([message["role"] for message in content], "and")
        raise FdgError(f"{where}: '{column}' has messages of {roles}: write one message of the assistant")
    return _message_text(f"{where}: '{column}'", content[0])


def _message_text(what: str, message: Message) -> str:
    """The text of an answer."""
    if message.get("tool_calls"):
        raise FdgError(
            f"{what} calls tools (tool_calls), but only its content is learned from: write the call into the"
            " content, as the chat template does, or remove the row"
        )
    return str(message["content"])


def _text(where: str, column: str, value: Any, shortest: str = " ") -> Any:
    """A text of at least the length of `shortest`, or messages. Numbers become text."""
    if isinstance(value, list | tuple):
        return _messages(where, column, value)
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        if isinstance(value, float) and not abs(value) < 2**63:  # NaN, or an integer that lost its digits
            raise FdgError(f"{where}: '{column}' is {value}: write it in quotes, or remove the row")
        return str(value)
    if isinstance(value, str) and (value or not shortest):
        return value
    what = "is empty" if value == "" else f"is {json.dumps(value):.60}"
    raise FdgError(f"{where}: '{column}' {what}: write a text or messages, or remove the row")


def _messages(where: str, column: str, value: Any) -> Conversation:
    """Messages of a column; raises an `FdgError` for other values."""
    fix = 'write [{"role": "user", "content": "1+1=?"}]'
    if not isinstance(value, list | tuple) or not value:
        raise FdgError(f"{where}: '{column}' is {json.dumps(value):.60}, not messages: {fix}")
    return tuple(_message(f"{where}: message {i} of '{column}'", x, fix) for i, x in enumerate(value, 1))


def _message(where: str, value: Any, fix: str) -> Message:
    """A message with its content as one text; raises an `FdgError` if it has no role or no text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise FdgError(f"{where} is {json.dumps(value):.60}, without a role: {fix}")
    content = value.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = content_of(value)
    if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
        raise FdgError(f"{where} has content {json.dumps(content):.60}, not a text: {fix}")
    return {**value, "content": content}


def _common_length(chosen: Any, rejected: Any) -> int:
    """The length of two answers' common beginning, in characters or messages, without a blank at its end."""
    length = min(len(chosen), len(rejected))
    shared = next((i for i in range(length) if chosen[i] != rejected[i]), length)
    is_text = isinstance(chosen, str)
    return shared - 1 if is_text and shared > 0 and chosen[shared - 1] == " " else shared
