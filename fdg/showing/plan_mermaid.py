"""Plans as Mermaid flowcharts, for documents."""

import html

from fdg.placing.plans import BETWEEN, Plan
from fdg.placing.policy import Group
from fdg.showing.plan_outline import amount, crossings, from_to, outline
from fdg.showing.words import COLOURS, OTHER, calls, quantity, span
from fdg.tracing.graph import Fragment


def plan_mermaid(plan: Plan) -> str:
    """A Mermaid flowchart: boxes are groups, arrows are transfers (dotted: to the next step or iteration)."""
    lines = ["flowchart LR"]
    fragments = {f.name: f"f{i}" for i, f in enumerate(plan.graph.fragments)}
    groups = {group.name: f"g{i}" for i, group in enumerate(plan.groups)}
    collectives = [m for m in plan.movements if m.program]
    styles = []
    memory = dict(plan.memory)

    def node(f: Fragment, group: Group, indent: str) -> None:
        inside = [c for c in plan.graph.fragments if c.parent == f.name and plan.group_of(c.name) == group]
        label = f'{fragments[f.name]}["{_escaped(f.name)}<br/><i>{_escaped(f.role)}</i> x{calls(f)}"]'
        styles.append(f"  style {fragments[f.name]} fill:{COLOURS.get(f.role, OTHER)},stroke:#555,color:#111")
        if not inside:
            lines.append(indent + label)
            return
        lines.append(f"{indent}subgraph {label}")
        for child in inside:
            node(child, group, indent + "  ")
        lines.append(f"{indent}end")

    for group in plan.groups:
        plural = "s" if len(group) > 1 else ""
        size = quantity(memory[group.name], "B")
        where = f"device{plural} {span(group.devices, 30)}, {size}{' each' * bool(plural)}"
        lines.append(f'  subgraph {groups[group.name]}["{_escaped(group.name)}<br/>{where}"]')
        for f in plan.graph.fragments:
            parent = f.parent and plan.group_of(f.parent)
            if plan.group_of(f.name) == group and parent != group:
                node(f, group, "    ")
        for i, m in enumerate(collectives):
            if m.where == group.name:
                inside = "" if m.source == BETWEEN else f" of {_escaped(m.source)}"
                lines.append(f'    c{i}{{{{"{m.how}{inside}<br/>{amount(m, "x")}"}}}}')
        lines.append("  end")
    for line in crossings(outline(plan)):
        m = line.movement
        label = f"{_escaped(from_to(plan, m, 60, ' to '))}<br/>{amount(m, 'x')}"
        link = f'-. "{label}, next {m.delay}" .->' if m.delay else f'-- "{label}" -->'
        lines.append(f"  {groups[line.source]} {link} {groups[line.target]}")
    for i, m in enumerate(collectives):
        if m.source in fragments:
            lines.append(f"  {fragments[m.source]} --- c{i}")
    if plan.idle:
        lines.append(f'  idle["idle: {span(plan.idle, 40)}"]')
        styles.append("  style idle fill:#fff,stroke:#999,color:#555,stroke-dasharray:4 3")
    styles += [f"  style {name} fill:#f6f6f4,stroke:#8a8a8a,color:#111" for name in groups.values()]
    return "\n".join([*lines, *styles])


def _escaped(text: str) -> str:
    return html.escape(text).replace("#", "&#35;")
