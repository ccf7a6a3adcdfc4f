"""Draws graphs (`fdg.trace`) as text, Mermaid and SVG."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fdg.showing.canvas import ARROW, Canvas
from fdg.showing.words import COLOURS, OTHER_COLOUR, ancestors, calls, quantity, table
from fdg.tracing.graph import FDG, Fragment


def _edge_text(edge) -> str:
    """An edge as text: "act -> step (next step)"."""
    return f"{edge.source} -> {edge.target}" + (f" (next {edge.delay})" if edge.delay else "")


def graph_text(graph: FDG) -> str:
    """The text of a graph, which `print(graph)` prints."""
    agents = "" if graph.agents is None else f", of each of {graph.agents} agents"
    lines = [f"FDG of {graph.name}: {len(graph.fragments)} fragments, {len(graph.edges)} edges{agents}", ""]
    rows = [
        (
            "  " * len(ancestors(graph, fragment.name)) + fragment.name,
            fragment.role,
            calls(fragment),
            str(fragment.batch_size or "-"),
            quantity(fragment.flops_per_call),
            quantity(fragment.bytes_per_call, "B"),
        )
        for fragment in graph.fragments
    ]
    lines += table(("fragment", "role", "calls", "batch", "flops/call", "bytes/call"), rows, (2, 3, 4, 5))
    edges = [
        (_edge_text(edge), quantity(edge.bytes_per_crossing, "B"), str(edge.crossings_per_iteration),
         quantity(edge.bytes_per_iteration, "B"))
        for edge in graph.edges
    ]  # fmt: skip
    lines += ["", *table(("edge", "bytes/crossing", "crossings", "bytes/iteration"), edges, (1, 2, 3))]
    return "\n".join(lines)


def graph_mermaid(graph: FDG) -> str:
    """A Mermaid flowchart: nested fragments in boxes, delayed edges dotted."""
    node_ids = {f.name: f"n{i}" for i, f in enumerate(graph.fragments)}
    outermost = [f for f in graph.fragments if f.parent is None]
    lines = ["flowchart LR", *mermaid_nodes(outermost, graph.fragments, node_ids, "  ")]
    for edge in graph.edges:
        label = f"{quantity(edge.bytes_per_crossing, 'B')} x{edge.crossings_per_iteration}"
        link = f'-. "{label}, next {edge.delay}" .->' if edge.delay else f'-- "{label}" -->'
        lines.append(f"  {node_ids[edge.source]} {link} {node_ids[edge.target]}")
    return "\n".join([*lines, *mermaid_styles(graph.fragments, node_ids)])


def mermaid_nodes(
    fragments: Iterable[Fragment], drawn: Sequence[Fragment], node_ids: Mapping[str, str], indent: str
) -> Iterator[str]:
    """Yields the lines of these fragments' nodes; a fragment that encloses others of `drawn` is a box.

    `node_ids` has Mermaid's name of each fragment's node.
    """
    for f in fragments:
        label = f'{node_ids[f.name]}["{escape(f.name)}<br/><i>{escape(f.role)}</i> x{calls(f)}"]'
        children = [child for child in drawn if child.parent == f.name]
        yield f"{indent}{'subgraph ' * bool(children)}{label}"
        yield from mermaid_nodes(children, drawn, node_ids, indent + "  ")
        if children:
            yield f"{indent}end"


def escape(text: str) -> str:
    """Escapes a text for Mermaid."""
    return html.escape(text).replace("#", "&#35;")


def mermaid_styles(fragments: Iterable[Fragment], node_ids: Mapping[str, str]) -> list[str]:
    """The lines that set the colours of nodes."""
    return [
        f"  style {node_ids[f.name]} fill:{COLOURS.get(f.role, OTHER_COLOUR)},stroke:#555,color:#111"
        for f in fragments
    ]


# SVG: fragments of one nesting level are in a row, in program order, with nested rows inside. The horizontal
# part of an edge is its rail: above the row, or below the row for delayed edges, which are dashed.

_NODE_WIDTH, _NODE_HEIGHT, _NODE_GAP, _PADDING, _RAIL_GAP = 190, 58, 96, 18, 26  # pixels


def graph_svg(graph: FDG) -> str:
    """A self-contained SVG for notebooks."""
    canvas, width, height = _row(graph, None)
    return canvas.picture(width, height, f"FDG of {graph.name}")


def _row(graph: FDG, parent: str | None) -> tuple[Canvas, float, float]:
    """Draws the fragments of one nesting level at the origin; returns (canvas, width, height)."""
    members = [f for f in graph.fragments if f.parent == parent]
    inner = {f.name: _row(graph, f.name) for f in members if any(g.parent == f.name for g in graph.fragments)}
    edges = [e for e in graph.edges if e.source in {f.name for f in members}]
    rails_above, rails_below = _assign_rails(members, edges, False), _assign_rails(members, edges, True)
    top = _PADDING + _RAIL_GAP * (1 + max(rails_above.values(), default=-1)) + (8 if rails_above else 0)
    sizes: dict[str, tuple[float, float]] = {f.name: (_NODE_WIDTH, _NODE_HEIGHT) for f in members}
    sizes |= {name: (max(_NODE_WIDTH, width), _NODE_HEIGHT + height)
              for name, (_, width, height) in inner.items()}  # fmt: skip
    tallest = max((h for _, h in sizes.values()), default=0)
    canvas, x, left = Canvas(), float(_PADDING), {}  # `left`: the left border of each fragment
    for f in members:
        width, height = sizes[f.name]
        left[f.name] = x
        middle = x + width / 2
        work = f"{f.role} · ×{calls(f)} · {quantity(f.flops_per_call, 'flop')}"
        canvas.box(x, top, width, height, COLOURS.get(f.role, OTHER_COLOUR), "#555", rx=9)
        canvas.text(middle, top + 23, f.name, 15, text_anchor="middle", font_weight=600)
        canvas.text(middle, top + 42, work, text_anchor="middle")
        if f.name in inner:
            canvas.draw(inner[f.name][0], x, top + _NODE_HEIGHT - 6)
        x += width + _NODE_GAP
    bottom = top + tallest
    positions = {f.name: i for i, f in enumerate(members)}
    for rails, below in ((rails_above, False), (rails_below, True)):
        for edge, rail in rails.items():
            source_x, source_width = left[edge.source], sizes[edge.source][0]
            target_x, target_width = left[edge.target], sizes[edge.target][0]
            is_forward = positions[edge.target] >= positions[edge.source]
            # Where the edge leaves and enters, as fractions of the fragments' widths.
            start = source_x + source_width * (0.8 if is_forward and not below else 0.3 if below else 0.2)
            end = target_x + target_width * (0.2 if is_forward and not below else 0.7 if below else 0.8)
            edge_y = {f.name: (top + sizes[f.name][1] if below else top) for f in members}
            rail_above = top - 8 - _RAIL_GAP * (rail + 0.4)
            rail_y = bottom + 10 + _RAIL_GAP * (rail + 0.6) if below else rail_above
            label = f"{quantity(edge.bytes_per_crossing, 'B')} ×{edge.crossings_per_iteration}"
            path = f"M{start:g} {edge_y[edge.source]:g} V{rail_y:g} H{end:g} V{edge_y[edge.target]:g}"
            dashes = "5 4" if edge.delay else ""
            tooltip = f"{_edge_text(edge)}: {label}"
            canvas.line(path, tooltip=tooltip, stroke_dasharray=dashes, marker_end=ARROW)
            for stroke in ("#fff", ""):  # a white outline, then the text
                canvas.text(
                    (start + end) / 2, rail_y - 4, label, 11,
                    text_anchor="middle", stroke=stroke, stroke_width=3,
                )  # fmt: skip
    extent = bottom + 10 + _RAIL_GAP * (1 + max(rails_below.values(), default=-1)) + 8
    return canvas, x - _NODE_GAP + _PADDING, extent


def _assign_rails(members: Sequence[Fragment], edges: Sequence, delayed: bool) -> dict:
    """The rail of each edge that is (or is not) delayed: the lowest on which it overlaps no other of them."""
    position = {f.name: i for i, f in enumerate(members)}
    rails: dict = {}
    ends = {
        edge: sorted((position[edge.source], position[edge.target]))
        for edge in edges
        if bool(edge.delay) == delayed and edge.source != edge.target
    }
    for edge, (low, high) in sorted(ends.items(), key=lambda item: item[1][1] - item[1][0]):
        used = {rail for other, rail in rails.items() if ends[other][0] <= high and ends[other][1] >= low}
        rails[edge] = next(rail for rail in range(len(used) + 1) if rail not in used)
    return rails
