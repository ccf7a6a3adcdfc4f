"""Plans as Mermaid flowcharts, for documents."""

from fdg.placing.plans import BETWEEN, Plan
from fdg.showing.graph_drawings import escaped, mermaid_nodes, mermaid_styles
from fdg.showing.plan_outline import amount, crossings, from_to, outline
from fdg.showing.words import quantity, span


def plan_mermaid(plan: Plan) -> str:
    """A Mermaid flowchart: boxes are groups, arrows are transfers (dotted to the next step or iteration)."""
    lines = ["flowchart LR"]
    fragments = {f.name: f"f{i}" for i, f in enumerate(plan.graph.fragments)}
    groups = {group.name: f"g{i}" for i, group in enumerate(plan.groups)}
    collectives = [m for m in plan.movements if m.program]
    memory, styles = dict(plan.memory), []
    for group in plan.groups:
        plural = "s" if len(group) > 1 else ""
        size = quantity(memory[group.name], "B")
        devices = f"device{plural} {span(group.devices, 30)}, {size}{' each' * bool(plural)}"
        lines.append(f'  subgraph {groups[group.name]}["{escaped(group.name)}<br/>{devices}"]')
        group_fragments = [f for f in plan.graph.fragments if plan.group_of(f.name) == group]
        outermost = [f for f in group_fragments if (f.parent and plan.group_of(f.parent)) != group]
        lines += mermaid_nodes(outermost, group_fragments, fragments, "    ")
        styles += mermaid_styles(group_fragments, fragments)
        for i, m in enumerate(collectives):
            if m.where == group.name:
                source = "" if m.source == BETWEEN else f" of {escaped(m.source)}"
                lines.append(f'    c{i}{{{{"{m.how}{source}<br/>{amount(m, "x")}"}}}}')
        lines.append("  end")
    for line in crossings(outline(plan)):
        m = line.movement
        label = f"{escaped(from_to(plan, m, 60, ' to '))}<br/>{amount(m, 'x')}"
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
