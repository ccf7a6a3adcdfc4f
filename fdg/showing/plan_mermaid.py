"""Draws plans as Mermaid flowcharts, for documents."""

from fdg.placing.plans import BETWEEN, Plan
from fdg.showing.graph_drawings import escape, mermaid_nodes, mermaid_styles
from fdg.showing.plan_outline import TransferLine, all_lines, amount_text, direction_text, outline
from fdg.showing.words import device_ranges, quantity


def plan_mermaid(plan: Plan) -> str:
    """A Mermaid flowchart of groups (boxes) with their fragments and collectives, and of transfers (arrows).

    A dotted arrow is a transfer to the next step or iteration.
    """
    lines = ["flowchart LR"]
    fragment_ids = {f.name: f"f{i}" for i, f in enumerate(plan.graph.fragments)}
    group_ids = {group.name: f"g{i}" for i, group in enumerate(plan.groups)}
    collectives = [movement for movement in plan.movements if movement.program]
    memory, styles = dict(plan.memory), []
    for group in plan.groups:
        memory_text, positions = quantity(memory[group.name], "B"), device_ranges(group.devices, 30)
        single = f"device {positions}, {memory_text}"
        devices = single if len(group) == 1 else f"devices {positions}, {memory_text} each"
        lines.append(f'  subgraph {group_ids[group.name]}["{escape(group.name)}<br/>{devices}"]')
        group_fragments = [f for f in plan.graph.fragments if plan.group_of(f.name) == group]
        outermost = [f for f in group_fragments if (f.parent and plan.group_of(f.parent)) != group]
        lines += mermaid_nodes(outermost, group_fragments, fragment_ids, "    ")
        styles += mermaid_styles(group_fragments, fragment_ids)
        for i, movement in enumerate(collectives):
            if movement.where == group.name:
                source = "" if movement.source == BETWEEN else f" of {escape(movement.source)}"
                lines.append(f'    c{i}{{{{"{movement.how}{source}<br/>{amount_text(movement, "x")}"}}}}')
        lines.append("  end")
    for line in all_lines(outline(plan), TransferLine):
        movement = line.movement
        label = f"{escape(direction_text(plan, movement, 60, ' to '))}<br/>{amount_text(movement, 'x')}"
        link = f'-. "{label}, next {movement.delay}" .->' if movement.delay else f'-- "{label}" -->'
        lines.append(f"  {group_ids[line.source]} {link} {group_ids[line.target]}")
    for i, movement in enumerate(collectives):
        if movement.source in fragment_ids:
            lines.append(f"  {fragment_ids[movement.source]} --- c{i}")
    if plan.idle:
        lines.append(f'  idle["idle: {device_ranges(plan.idle, 40)}"]')
        styles.append("  style idle fill:#fff,stroke:#999,color:#555,stroke-dasharray:4 3")
    styles += [
        f"  style {group_id} fill:#f6f6f4,stroke:#8a8a8a,color:#111" for group_id in group_ids.values()
    ]
    return "\n".join([*lines, *styles])
