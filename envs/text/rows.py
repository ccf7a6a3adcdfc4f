"""`Row`: a problem that is there already; a `TextProblem` of such has them as its `rows`, a tuple."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fdg.errors import FdgError

Message: TypeAlias = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else it has


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A problem, its answer, and all that its source says of it.

    Attributes:
      prompt: the problem as text, or the messages of a conversation that ends where the answer begins.
      answer: a right answer as text; None where there is none.
      columns: every column of the source by name, for functions that judge responses.
      where: file and line, for messages; empty where there is none.
    """

    prompt: str | tuple[Message, ...]
    answer: str | None = None
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = dataclasses.field(default="", compare=False)

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """What the chat template gets of its columns, as in TRL: `tools`, and all of `chat_template_kwargs`;
        a text there is JSON.
        """
        tools, more = (_read(self.columns.get(name)) for name in ("tools", "chat_template_kwargs"))
        found = {"tools": tools} if isinstance(tools, list) and tools else {}
        return {**found, **more} if isinstance(more, Mapping) else found

    @property
    def text(self) -> str:
        """The prompt as plain text: of messages, what each says, a line each.

        >>> Row(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"})).text
        'Be brief.\\n1+1=?'
        """
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(map(content_of, self.prompt))


def _read(value: Any) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value


def content_of(message: Message) -> str:
    """What a message says: its content, or the texts of its content's parts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def refuse_calls(rows: Sequence[Row]) -> None:
    """Refuses rows whose messages call tools, for a tokenizer without a template, which would drop them."""
    for row in rows:
        for i, one in enumerate(() if isinstance(row.prompt, str) else row.prompt, 1):
            if one.get("tool_calls"):
                raise FdgError(
                    f"{row.where or repr(row.text[:60])}: message {i} calls tools (tool_calls), and its"
                    " tokenizer has no chat template to format them: write the call as its content, leave"
                    " the row out, or start from a checkpoint that has a template (model=)"
                )


def messages_of(prompt: str | Sequence[Message], instruction: str, system: str) -> list[Message]:
    """A problem as messages: those that it is, or a user's.

    `instruction` begins the last message of a user; `system` is a message in front of all, if they have none
    such.
    """
    found: list[Message] = [*prompt] if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    if system and not (found and found[0].get("role") == "system"):
        found = [{"role": "system", "content": system}, *found]
    last = max((i for i, one in enumerate(found) if one.get("role") == "user"), default=None)
    if instruction and last is not None:
        content = found[last].get("content") or ""
        parts = [{"type": "text", "text": f"{instruction}\n"}]
        content = f"{instruction}\n{content}" if isinstance(content, str) else [*parts, *content]
        found[last] = {**found[last], "content": content}
    return found
