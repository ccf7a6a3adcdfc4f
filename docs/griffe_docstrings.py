"""What mkdocstrings does not read of our docstrings by itself, for `mkdocs.yml`.

Examples (`>>>`) that stand in the text become blocks of code, arguments that share a text (`low, high:`) one
each, and an algorithm's hyperparameters, inherited ones too, a list with their defaults and what they are.
"""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
# `low, high: text` of arguments, with the lines that go on further in.
_SEVERAL = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)$", re.MULTILINE
)


class Docstrings(griffe.Extension):
    """See the module's docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Examples as blocks of code, and arguments one by one."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = _SEVERAL.sub(_one_by_one, text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Hyperparameters in the docstrings of their classes."""
        if pkg.name == "algos":
            for module in pkg.modules.values():
                for found in module.classes.values():
                    _list_hyperparameters(found)


def _one_by_one(several: re.Match[str]) -> str:
    names = several["names"].split(", ")
    return "\n".join(f"{several['indent']}{name}: {several['text']}" for name in names)


def _list_hyperparameters(found: Any) -> None:
    if found.is_alias or found.docstring is None:
        return
    cls = getattr(importlib.import_module(found.module.path), found.name, None)
    if not dataclasses.is_dataclass(cls):
        return
    lines = []
    for field in dataclasses.fields(cls):  # the fields of parts among them, which the source does not show
        if text := field.metadata.get("help"):
            kind = inspect.formatannotation(field.type).replace("typing.", "")
            lines.append(f"- **`{field.name}`** (`{kind}`, default `{field.default!r}`): {text}")
    if lines:
        found.docstring.value += "\n\n**Hyperparameters**\n\n" + "\n".join(lines) + "\n"
