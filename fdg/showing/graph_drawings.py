"""Draws graphs (`fdg.trace`) as text, Mermaid and SVG."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    """Yields the lines of these fragments' nodes; a fragment that encloses others of `drawn` is a box."""
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
    body, width, height = _row(graph, None)
    style = "font-family:system-ui,-apple-system,sans-serif;background:#fff"
    label = f"FDG of {html.escape(graph.name)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="{style}" role="img" aria-label="{label}">'
        '<defs><marker id="fdg-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>'
        f"{body}</svg>"
    )


def _row(graph: FDG, parent: str | None) -> tuple[str, float, float]:
    """Draws the fragments of one nesting level at the origin; returns (markup, width, height)."""
    members = [f for f in graph.fragments if f.parent == parent]
    inner = {f.name: _row(graph, f.name) for f in members if any(g.parent == f.name for g in graph.fragments)}
    edges = [e for e in graph.edges if e.source in {f.name for f in members}]
    rails_above, rails_below = _assign_rails(members, edges, False), _assign_rails(members, edges, True)
    top = _PADDING + _RAIL_GAP * (1 + max(rails_above.values(), default=-1)) + (8 if rails_above else 0)
    sizes: dict[str, tuple[float, float]] = {f.name: (_NODE_WIDTH, _NODE_HEIGHT) for f in members}
    sizes |= {name: (max(_NODE_WIDTH, width), _NODE_HEIGHT + height)
              for name, (_, width, height) in inner.items()}  # fmt: skip
    tallest = max((h for _, h in sizes.values()), default=0)
    parts, x, left = [], float(_PADDING), {}  # `left`: the left border of each fragment
    for f in members:
        width, height = sizes[f.name]
        left[f.name] = x
        nested = ""
        if f.name in inner:
            nested = f'<g transform="translate(0,{_NODE_HEIGHT - 6})">{inner[f.name][0]}</g>'
        parts.append(
            f'<g transform="translate({x},{top})"><rect width="{width}" height="{height}" rx="9" '
            f'fill="{COLOURS.get(f.role, OTHER_COLOUR)}" stroke="#555"/>'
            f'<text x="{width / 2}" y="23" text-anchor="middle" font-size="15" font-weight="600" fill="#111">'
            f"{html.escape(f.name)}</text>"
            f'<text x="{width / 2}" y="42" text-anchor="middle" font-size="12" fill="#333">'
            f"{html.escape(f.role)} · ×{calls(f)} · {quantity(f.flops_per_call, 'flop')}</text>{nested}</g>"
        )
        x += width + _NODE_GAP
    bottom = top + tallest
    positions = {f.name: i for i, f in enumerate(members)}
    for rails, below in ((rails_above, False), (rails_below, True)):
        for edge, rail in rails.items():
            source_x, source_width = left[edge.source], sizes[edge.source][0]
            target_x, target_width = left[edge.target], sizes[edge.target][0]
            is_forward = positions[edge.target] >= positions[edge.source]
            start = source_x + source_width * (0.8 if is_forward and not below else 0.3 if below else 0.2)
            end = target_x + target_width * (0.2 if is_forward and not below else 0.7 if below else 0.8)
            edge_y = {f.name: (top + sizes[f.name][1] if below else top) for f in members}
            rail_above = top - 8 - _RAIL_GAP * (rail + 0.4)
            rail_y = bottom + 10 + _RAIL_GAP * (rail + 0.6) if below else rail_above
            label = f"{quantity(edge.bytes_per_crossing, 'B')} ×{edge.crossings_per_iteration}"
            dashes = ' stroke-dasharray="5 4"' if edge.delay else ""
            text_position = f'x="{(start + end) / 2}" y="{rail_y - 4}" text-anchor="middle" font-size="11"'
            parts.append(
                f'<path d="M{start} {edge_y[edge.source]} V{rail_y} H{end} V{edge_y[edge.target]}" '
                f'fill="none" stroke="#444" stroke-width="1.2"{dashes} marker-end="url(#fdg-arrow)"><title>'
                f"{html.escape(_edge_text(edge))}: {label}</title></path>"
                # a white outline, then the text
                f'<text {text_position} fill="none" stroke="#fff" stroke-width="3">{label}</text>'
                f'<text {text_position} fill="#222">{label}</text>'
            )
    extent = bottom + 10 + _RAIL_GAP * (1 + max(rails_below.values(), default=-1)) + 8
    return "".join(parts), x - _NODE_GAP + _PADDING, extent


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
