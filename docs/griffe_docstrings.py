"""Prepares docstrings for the documentation site: an extension of griffe, which `mkdocs.yml` loads.

Examples (`>>>`) within text become blocks of code. Arguments that share a description (`low, high: ...`)
become separate entries. Algorithms get a list of all their hyperparameters, with types and defaults.
"""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
# An entry `low, high: text`, with further lines that are indented more.
_SHARED_ENTRY = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)$", re.MULTILINE
)


class Docstrings(griffe.Extension):
    """The extension; griffe calls its methods for each object and package that it reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the examples and shared entries of a docstring."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = _SHARED_ENTRY.sub(_separate_entries, text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds hyperparameters to the docstrings of algorithms."""
        if pkg.name == "algos":
            for module in pkg.modules.values():
                for algorithm in module.classes.values():
                    _list_hyperparameters(algorithm)


def _separate_entries(shared: re.Match[str]) -> str:
    names = shared["names"].split(", ")
    return "\n".join(f"{shared['indent']}{name}: {shared['text']}" for name in names)


def _list_hyperparameters(algorithm: Any) -> None:
    """Adds a list of hyperparameters to a class's docstring, if the class is a dataclass with such fields."""
    if algorithm.is_alias or algorithm.docstring is None:
        return
    cls = getattr(importlib.import_module(algorithm.module.path), algorithm.name, None)
    if not dataclasses.is_dataclass(cls):
        return
    lines = []
    for field in dataclasses.fields(cls):  # includes shared parts, which the source does not show
        if text := field.metadata.get("help"):
            kind = inspect.formatannotation(field.type).replace("typing.", "")
            lines.append(f"- **`{field.name}`** (`{kind}`, default `{field.default!r}`): {text}")
    if lines:
        algorithm.docstring.value += "\n\n**Hyperparameters**\n\n" + "\n".join(lines) + "\n"
