"""Default settings and presets of every algorithm, as stored in `settings.json`.

The results in docs/results.md belong to these settings. After an intended change, run
`python -m tests.algos.settings` and describe the measurement in CHANGELOG.md.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import algos
from algos import presets
from algos.rlhf.variants import VARIANTS

FILE = Path(__file__).parent / "settings.json"
IGNORED = ("env", "shuffle")  # not settings, or about to change


def defaults(name: str) -> dict[str, Any]:
    """Default values of an algorithm's fields."""
    fields = dataclasses.fields(getattr(algos, name))
    given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return json.loads(json.dumps({key: value for key, value in given.items() if key not in IGNORED}))


def entry(name: str, key: str, platform: str) -> dict[str, Any]:
    """A preset by its key, on devices of `platform`."""
    with mock.patch("jax.default_backend", lambda: platform):
        return json.loads(json.dumps(dict(presets.named(name, key).values)))


def algorithms() -> list[str]:
    """Names of the public algorithm classes."""
    return sorted(name for name in algos.__all__ if hasattr(getattr(algos, name), "iterate"))


def settings() -> dict[str, Any]:
    """All settings as JSON values."""
    names = algorithms()
    known = json.loads(FILE.read_text())["presets"] if FILE.exists() else {}
    environments = sorted({env for found in known.values() for env in found} | {"CartPole-v1", "Pendulum-v1"})
    return {
        "defaults": {name: defaults(name) for name in names},
        "variants": {name: dict(fields) for name, fields in VARIANTS.items()},
        "entries": {
            f"{name} {key} {platform}": entry(name, key, platform)
            for name in names
            for key in presets.names(name)
            for platform in ("cpu", "gpu")
        },
        "presets": {
            name: {
                env: json.loads(json.dumps(found)) for env in environments if (found := presets.of(name, env))
            }
            for name in names
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(settings(), indent=1) + "\n")
