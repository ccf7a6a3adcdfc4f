"""Arguments and defaults of the public interface, stored in `signatures.json`.

After an intended change, run `python -m tests.signatures` and describe it in CHANGELOG.md.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import fdg

FILE = Path(__file__).parent / "signatures.json"


def signatures() -> dict[str, dict[str, str]]:
    """Maps each function or method to its arguments' defaults ("needed" where there is none)."""
    found = {}
    for name in sorted(fdg.__all__):
        value = getattr(fdg, name)
        if inspect.isclass(value):
            if not issubclass(value, Exception):
                found.update({f"{name}.{key}": each for key, each in _methods(value)})
        elif callable(value):
            found[name] = _arguments(value)
    return found


def _methods(cls: type):
    if dataclasses.is_dataclass(cls):
        yield "__init__", _arguments(cls)
    for key, value in vars(cls).items():
        if inspect.isfunction(value) and not key.startswith("_"):
            yield key, _arguments(value)


def _arguments(function) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {
        one.name: "needed" if one.default is one.empty else _default_text(one.default)
        for one in parameters
        if one.name != "self"
    }


def _default_text(default: object) -> str:
    plain = isinstance(default, str | bytes | int | float | tuple | type(None))
    return repr(default) if plain else type(default).__name__


if __name__ == "__main__":
    FILE.write_text(json.dumps(signatures(), indent=1) + "\n")
