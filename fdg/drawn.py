"""Values that print as text and are drawn in notebooks and documents."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Drawings(NamedTuple):
    """How to show values of a type; `fdg.showing` registers them."""

    text: Callable[[Any], str]
    mermaid: Callable[[Any], str]
    svg: Callable[[Any], str]


_DRAWINGS: dict[type, Drawings] = {}


def draw_with(kind: type, drawings: Drawings) -> None:
    """Registers how values of type `kind` are shown, so that their module need not import `fdg.showing`."""
    _DRAWINGS[kind] = drawings


class Drawn:
    """Base of values that are shown by the drawings registered for their type; by `repr` without any."""

    def __str__(self) -> str:
        drawings = _DRAWINGS.get(type(self))
        return repr(self) if drawings is None else drawings.text(self)

    def to_mermaid(self) -> str:
        """As a Mermaid flowchart (rendered by notebooks, GitHub and most documentation tools)."""
        return _DRAWINGS[type(self)].mermaid(self)

    def _repr_svg_(self) -> str:
        return _DRAWINGS[type(self)].svg(self)
