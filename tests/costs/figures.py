"""Every figure that predictions are made of where nothing was measured, as `figures.json` has them.

The tables of docs/scale.md belong to these. Whoever changes one on purpose runs
`python -m tests.costs.figures`.
"""

import json
from pathlib import Path
from typing import Any

from fdg.costs import machine, program_time, published
from fdg.costs.hardware import RATES, DeviceKind, Link

FILE = Path(__file__).parent / "figures.json"
PRODUCTS = ("product/float32", "product/bfloat16", "product/float64", "product/int8")


def figures() -> dict[str, Any]:
    """All of them, as JSON has them."""
    kinds = {**published.KINDS, machine.REFERENCE.name: machine.REFERENCE}
    links = {**published.LINKS, "shared memory": machine.SHARED_MEMORY, "sockets": machine.SOCKETS}
    found = {
        "kinds": {name: _of_kind(kind) for name, kind in kinds.items()},
        "links": {name: _of_link(link) for name, link in links.items()},
        "joined": {name: dict(shares) for name, shares in program_time.JOINED.items()},
    }
    return json.loads(json.dumps(found))


def _of_kind(kind: DeviceKind) -> dict[str, Any]:
    names = [name for name in RATES if not name.startswith("product/")]
    return {name: kind.rate(name) for name in (*names, *PRODUCTS)}


def _of_link(link: Link) -> dict[str, float]:
    return {name: getattr(link, name).value for name in ("latency", "bandwidth", "call")}


if __name__ == "__main__":
    FILE.write_text(json.dumps(figures(), indent=1) + "\n")
