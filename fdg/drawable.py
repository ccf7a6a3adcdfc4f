"""The base class of graphs and plans, which print as text and are drawn in notebooks and documentation."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple


class Drawings(NamedTuple):
    """The functions that convert a value of one type to text, Mermaid and SVG."""

    text: Callable[[Any], str]
    mermaid: Callable[[Any], str]
    svg: Callable[[Any], str]


class Drawable:
    """Base class of values that print and draw themselves. `fdg.showing` sets `drawings` of each subclass."""

    drawings: ClassVar[Drawings]

    def __str__(self) -> str:
        return self.drawings.text(self)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart (rendered by notebooks, GitHub and most documentation tools)."""
        return self.drawings.mermaid(self)

    def _repr_svg_(self) -> str:
        return self.drawings.svg(self)
