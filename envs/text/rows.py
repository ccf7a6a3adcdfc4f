"""`Row`: a ready-made problem. A problem that is not sampled has a tuple of them, `rows`."""

import ast
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fdg.errors import FdgError

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}, possibly with more keys


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A problem, its answer, and the columns of its source.

    Attributes:
      prompt: the problem as text, or the messages of a conversation up to the answer.
      answer: a right answer as text; None if there is none.
      columns: every column of the source by name, for reward functions.
      where: file and line, for messages; may be empty.
    """

    prompt: str | tuple[Message, ...]
    answer: str | None = None
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = dataclasses.field(default="", compare=False)

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Arguments of the chat template from the row's columns, as in TRL.

        They are `tools`, and the items of `chat_template_kwargs`; texts are parsed as JSON.
        """
        tools, kwargs = (_parse_json(self.columns.get(name)) for name in ("tools", "chat_template_kwargs"))
        arguments = {"tools": tools} if isinstance(tools, list) and tools else {}
        return {**arguments, **kwargs} if isinstance(kwargs, Mapping) else arguments

    @property
    def text(self) -> str:
        """The prompt as plain text: for messages, one line each.

        >>> Row(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"})).text
        'Be brief.\\n1+1=?'
        """
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(map(content_of, self.prompt))


def _parse_json(value: Any) -> Any:
    """The JSON value of a text; None if it is not JSON; other values are unchanged."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value


def content_of(message: Message) -> str:
    """A message's text: its content, or the texts of its content's parts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def refuse_tool_calls(rows: Sequence[Row]) -> None:
    """Raises an `FdgError` if messages call tools: without a chat template, the calls would be lost."""
    for row in rows:
        for i, message in enumerate(() if isinstance(row.prompt, str) else row.prompt, 1):
            if message.get("tool_calls"):
                raise FdgError(
                    f"{row.where or repr(row.text[:60])}: message {i} calls tools (tool_calls), and the"
                    " tokenizer has no chat template to format them: write the call as its content, leave"
                    " the row out, or start from a checkpoint that has a template (model=)"
                )


def messages_of(prompt: str | Sequence[Message], instruction: str, system: str) -> list[Message]:
    """A problem as messages: a conversation is unchanged, a text becomes one user message.

    `instruction` is prepended to the last user message; `system` becomes the first message, unless the
    conversation begins with a system message.
    """
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if system and not (messages and messages[0].get("role") == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if instruction and last is not None:
        content = messages[last].get("content") or ""
        parts = [{"type": "text", "text": f"{instruction}\n"}]
        content = f"{instruction}\n{content}" if isinstance(content, str) else [*parts, *content]
        messages[last] = {**messages[last], "content": content}
    return messages


def as_json(arguments: Any, what: str, example: Mapping[str, Any]) -> str:
    """Converts a mapping with names as keys, or its text (JSON or a Python literal), to JSON; "" if empty.

    Error messages begin with `what`, and show `example`.
    """
    value = arguments
    for parse in (json.loads, ast.literal_eval) if isinstance(arguments, str) and arguments else ():
        try:
            value = parse(arguments)
            break
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    try:
        if not value or (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            return json.dumps(dict(value)) if value else ""
    except (TypeError, ValueError):
        pass
    raise FdgError(f"{what}={arguments!r:.60} must be a mapping by name, or its JSON: {json.dumps(example)}")
