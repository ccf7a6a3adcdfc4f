"""Values that can be looked at: printed, and drawn in a notebook or a document."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Drawings(NamedTuple):
    """How values of a type are shown; `fdg.showing` has them."""

    text: Callable[[Any], str]
    mermaid: Callable[[Any], str]
    svg: Callable[[Any], str]


_DRAWINGS: dict[type, Drawings] = {}


def draw_with(kind: type, drawings: Drawings) -> None:
    """Has values of type `kind` shown by these drawings. So a value need not know who draws it."""
    _DRAWINGS[kind] = drawings


class Drawn:
    """Shown by the drawings that are registered for its type; as its `repr` where there are none."""

    def __str__(self) -> str:
        drawings = _DRAWINGS.get(type(self))
        return repr(self) if drawings is None else drawings.text(self)

    def to_mermaid(self) -> str:
        """As a Mermaid flowchart (rendered by notebooks, GitHub and most documentation tools)."""
        return _DRAWINGS[type(self)].mermaid(self)

    def _repr_svg_(self) -> str:
        return _DRAWINGS[type(self)].svg(self)
