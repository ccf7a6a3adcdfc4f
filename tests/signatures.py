"""What everything public takes and with which defaults, as `signatures.json` has it.

Code that others have written rests on it. Whoever changes one on purpose runs `python -m tests.signatures`,
and says so in CHANGELOG.md.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import fdg

FILE = Path(__file__).parent / "signatures.json"


def signatures() -> dict[str, dict[str, str]]:
    """Defaults by argument ("needed" where there is none), by the name of a function or method."""
    found = {}
    for name in sorted(fdg.__all__):
        value = getattr(fdg, name)
        if inspect.isclass(value):
            if not issubclass(value, Exception):
                found.update({f"{name}.{key}": each for key, each in _methods(value)})
        elif callable(value):
            found[name] = _taken(value)
    return found


def _methods(cls: type):
    if dataclasses.is_dataclass(cls):
        yield "__init__", _taken(cls)
    for key, value in vars(cls).items():
        if inspect.isfunction(value) and not key.startswith("_"):
            yield key, _taken(value)


def _taken(function) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {
        one.name: "needed" if one.default is one.empty else _said(one.default)
        for one in parameters
        if one.name != "self"
    }


def _said(default: object) -> str:
    plain = isinstance(default, str | bytes | int | float | tuple | type(None))
    return repr(default) if plain else type(default).__name__


if __name__ == "__main__":
    FILE.write_text(json.dumps(signatures(), indent=1) + "\n")
