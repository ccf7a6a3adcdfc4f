"""A canvas for SVG pictures: boxes, texts and lines, and the picture around them."""

import html
from typing import Any

INK, GREY = "#1a1a1a", "#5c5c5c"  # of lines and texts
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito, colour-blind safe
ARROW = "url(#fdg-move)"  # the arrow head of each picture, for the attribute `marker_end` of lines


class Canvas:
    """Collects SVG elements, in pixels; later elements are drawn over earlier ones.

    `attributes` are further attributes of SVG, with underscores for hyphens ("": left out), and `tooltip`,
    which appears where the mouse points. Texts and attributes are escaped.
    """

    def __init__(self) -> None:
        self.elements: list[str] = []

    def text(
        self, x: float, y: float, text: str, size: float = 12, fill: str = INK, **attributes: Any
    ) -> None:
        """A line of text, whose start is at `x`; with `text_anchor` "middle" or "end", its middle or end."""
        self._add("text", html.escape(text), x=x, y=y, font_size=size, fill=fill, **attributes)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str, **attributes: Any
    ) -> None:
        """A rectangle, given its upper left corner."""
        self._add("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, **attributes)

    def line(self, path: str, stroke: str = INK, stroke_width: float = 1.2, **attributes: Any) -> None:
        """A line along a path, in SVG's notation: "M0 5 H20" goes from (0, 5) to (20, 5)."""
        self._add("path", d=path, fill="none", stroke=stroke, stroke_width=stroke_width, **attributes)

    def draw(self, other: "Canvas", x: float = 0, y: float = 0) -> None:
        """All elements of another canvas, moved by (x, y)."""
        elements = "".join(other.elements)
        self.elements.append(f'<g transform="translate({x:g},{y:g})">{elements}</g>' if x or y else elements)

    def picture(self, width: float, height: float, label: str) -> str:
        """The picture as SVG, on white; `label` describes it for screen readers."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui,-apple-system,Helvetica,Arial,'
            'sans-serif" style="background:#fff;max-width:100%;height:auto" role="img" '
            f'aria-label="{html.escape(label)}">'
            '<defs><marker id="fdg-move" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
            f'<rect width="100%" height="100%" fill="#fff"/>{"".join(self.elements)}</svg>'
        )

    def _add(self, name: str, content: str = "", tooltip: str = "", **attributes: Any) -> None:
        texts = {key: value if isinstance(value, str) else f"{value:g}" for key, value in attributes.items()}
        start = name + "".join(
            f' {key.replace("_", "-")}="{html.escape(text)}"' for key, text in texts.items() if text
        )
        content += f"<title>{html.escape(tooltip)}</title>" if tooltip else ""
        self.elements.append(f"<{start}>{content}</{name}>" if content else f"<{start}/>")
