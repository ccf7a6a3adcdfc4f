"""Compares the planned costs of resharding parameters with those of XLA's programs, on 8 host devices.

    python -m bench.resharding

The first table has the engines of HybridFlow's Table 2 (Sheng et al., arXiv 2409.19256): DeepSpeed-Chat,
HybridFlow with generation on consecutive devices ("-V"), and HybridFlow. The second table has single leaves.
All figures are per device, in units of the size of the model or leaf: received data, peak memory, and data
that are stored twice.
"""

import math
import os
import re

from bench.harness import table

TRAIN, GENERATE, DATA = 4, 2, 2  # devices per model in training and in generation, replicas of the model
# Axes: model replicas, generation shards, training shards within a generation shard.
MESH = (("d", DATA), ("g", GENERATE), ("j", TRAIN // GENERATE))
SHAPE = (1024, 1024)  # of a leaf, float32

# Mesh axes of each dimension in training and in generation; the paper's formulas for received data, peak
# memory, and data that are stored twice.
ENGINES = {
    "DeepSpeed-Chat": ((("d", "g", "j"),), (), "(tpd-1)/tpd", "1", "1/tpd"),
    "HybridFlow-V": ((("g", "j"),), (), "(tp-1)/tp", "1", "1/tp"),
    "HybridFlow, and here": ((("g", "j"),), (("g",),), "(tp-tg)/(tg tp)", "1/tg", "0"),
}
LEAVES = {  # mesh axes of each dimension before and after
    "rows, to fewer devices": ((("g", "j"),), (("g",),)),
    "and back": ((("g",),), (("g", "j"),)),
    "columns, to fewer": (((), ("g", "j")), ((), ("g",))),
    "FSDP x tensor parallel to tensor parallel": ((("d", "j"), ("g",)), ((), ("g",))),
    "both dimensions": ((("d",), ("g", "j")), ((), ("g",))),
    "FSDP to whole": ((("d", "g", "j"),), ()),
    "not contained: to the other axis": ((("g", "j"),), (("j",),)),
    "not contained: to another dimension": ((("g",),), ((), ("g",))),
}


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    print(f"t = {TRAIN}, tg = {GENERATE}, d = {DATA}, p = 1; per device, in units of the model M\n")
    sizes = {"t": TRAIN, "tg": GENERATE, "p": 1, "d": DATA}
    rows = []
    for name, (before, after, *formulas) in ENGINES.items():
        change_of_layout, program = plan_and_compile(before, after)
        received, temporary, _ = read_program(program)
        shard = 1 / change_of_layout.target.num_parts
        # The training shard lies within the generation shard, or is stored in addition to it.
        stored_twice = (
            0.0 if change_of_layout.kind == "all-gather" and after else 1 / change_of_layout.source.num_parts
        )
        paper_received, paper_peak, paper_stored = (evaluate_formula(formula, sizes) for formula in formulas)
        figures = (paper_received, received, paper_peak, shard + temporary, paper_stored, stored_twice)
        rows.append((name, *(f"{figure:.3g}" for figure in figures)))
    head = ("engine", "received: paper", "XLA", "peak: paper", "XLA", "stored twice: paper", "here")
    print(f"{table(head, rows)}\n")
    rows = []
    for name, (before, after) in LEAVES.items():
        change_of_layout, program = plan_and_compile(before, after)
        received, temporary, kinds = read_program(program)
        size = 4 * SHAPE[0] * SHAPE[1]
        figures = (
            change_of_layout.arriving(size) / size / 8,
            received,
            change_of_layout.temporary_bytes(size) / size,
            temporary,
        )
        cells = (f"{figure:.3g}" for figure in figures)
        rows.append((name, change_of_layout.kind, *cells, ", ".join(kinds) or "none"))
    head = ("leaf", "change", "received: plan", "XLA", "temporary: plan, at most", "XLA", "collectives")
    print(table(head, rows))


def evaluate_formula(formula: str, sizes: dict[str, int]) -> float:
    """The value of a formula of the paper, such as "(tp-tg)/(tg tp)"; a product is written without a sign.

    `sizes` has the values of `t`, `tg`, `p` and `d`.
    """
    top, _, bottom = formula.partition("/")

    def product(text: str) -> int:
        factors = re.findall(r"tg|[tpd]|\d+", text)
        return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in factors)

    first, *rest = map(product, top.strip("()").split("-"))
    return (first - sum(rest)) / product(bottom)


def plan_and_compile(before, after):
    """The planned change of a leaf's layout, and its compiled program; arguments as in `LEAVES`."""
    import jax
    import numpy as np

    from fdg.lowering.mesh import mesh_of
    from fdg.placing.layout import Layout
    from fdg.placing.resharding import CommonMesh, change
    from fdg.running.steps import resharding, shardings

    names = tuple((name, (name,)) for name, _ in MESH)
    common = CommonMesh(MESH, tuple(range(8)), names, names)
    change_of_layout = change(common, Layout(SHAPE, before, MESH), Layout(SHAPE, after, MESH))
    mesh = mesh_of(jax.devices()[:8], common.axes)
    source, _ = shardings(change_of_layout, mesh)
    argument = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=source)
    return change_of_layout, resharding(change_of_layout, mesh).lower(argument).compile()


def read_program(program):
    """Received data and temporary memory of a device, in units of the leaf, and the kinds of collectives."""
    from fdg.running.hlo import read_collectives

    size = 4 * SHAPE[0] * SHAPE[1]
    text = program.as_text()
    received, kinds = 0.0, []
    for collective, line in zip(read_collectives(text), collective_lines(text), strict=True):
        size_of_group = group_size(line)
        share = (
            (size_of_group - 1) / size_of_group if collective.kind in ("all-gather", "all-to-all") else 1.0
        )
        received += collective.bytes * share / size
        kinds.append(collective.kind + (f" of {size_of_group}" if collective.kind == "all-gather" else ""))
    return received, program.memory_analysis().temp_size_in_bytes / size, kinds


def group_size(line: str) -> int:
    """The group size of a collective in HLO, such as `[4,2]<=...` or `mesh['a'=4,'b'=2]... {'a'}`."""
    if count := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(count[1])
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", line)}
    axis_names = re.search(r"replica_groups=mesh.*?\{([^}]*)\}", line)
    return math.prod(sizes[name] for name in re.findall(r"\w+", axis_names[1])) if axis_names else 1


def collective_lines(text: str) -> list[str]:
    """The lines of a program's HLO that begin a collective."""
    kinds = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return [line for line in text.splitlines() if re.search(rf" = .*? {kinds}", line)]


if __name__ == "__main__":
    main()
