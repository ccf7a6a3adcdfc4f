"""The cost of resharding parameters on 8 host devices, as planned and as compiled by XLA.

    python -m bench.resharding

The first table has the engines of HybridFlow's Table 2 (Sheng et al., arXiv 2409.19256): DeepSpeed-Chat's,
HybridFlow's with generation on consecutive devices ("-V"), and its own; the second has single leaves. All
figures are per device, in units of the leaf (or model) M: received data, peak memory, data kept twice.
"""

import math
import os
import re

from bench.harness import table

TRAIN, GENERATE, DATA = 4, 2, 2  # devices that share a model to train and to generate, and replicas of it
MESH = (("d", DATA), ("g", GENERATE), ("j", TRAIN // GENERATE))
SHAPE = (1024, 1024)

ENGINES = {  # before, while generating (None: the whole), and the formulas of the paper
    "DeepSpeed-Chat": ((("d", "g", "j"),), (), "(tpd-1)/tpd", "1", "1/tpd"),
    "HybridFlow-V": ((("g", "j"),), (), "(tp-1)/tp", "1", "1/tp"),
    "HybridFlow, and here": ((("g", "j"),), (("g",),), "(tp-tg)/(tg tp)", "1/tg", "0"),
}
LEAVES = {
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
        way, program = compiled(before, after)
        arrives, temporary, _ = read(program)
        part = 1 / way.target.number
        # The shard for training lies within the shard for generation, or is kept in addition to it.
        twice = 0.0 if way.kind == "all-gather" and after else 1 / way.source.number
        arriving, peak, kept = (value(formula, sizes) for formula in formulas)
        figures = (arriving, arrives, peak, part + temporary, kept, twice)
        rows.append((name, *(f"{figure:.3g}" for figure in figures)))
    head = ("engine", "arrives: paper", "read", "peak: paper", "read", "kept twice: paper", "here")
    print(f"{table(head, rows)}\n")
    rows = []
    for name, (before, after) in LEAVES.items():
        way, program = compiled(before, after)
        arrives, temporary, kinds = read(program)
        size = 4 * SHAPE[0] * SHAPE[1]
        figures = (way.arriving(size) / size / 8, arrives, way.temporary(size) / size, temporary)
        cells = (f"{figure:.3g}" for figure in figures)
        rows.append((name, way.kind, *cells, ", ".join(kinds) or "none"))
    head = ("leaf", "change", "arrives: plan", "read", "aside: plan, at most", "read", "collectives")
    print(table(head, rows))


def value(formula: str, sizes: dict[str, int]) -> float:
    """The value of one of the paper's formulas, which write products without a sign."""
    top, _, bottom = formula.partition("/")

    def product(text: str) -> int:
        factors = re.findall(r"tg|[tpd]|\d+", text)
        return math.prod(sizes[factor] if factor in sizes else int(factor) for factor in factors)

    first, *rest = map(product, top.strip("()").split("-"))
    return (first - sum(rest)) / product(bottom)


def compiled(before, after):
    """The change of layout of a leaf, and its compiled program."""
    import jax
    import numpy as np

    from fdg.lowering.mesh import mesh_of
    from fdg.placing.layout import Layout
    from fdg.placing.resharding import CommonMesh, change
    from fdg.running.steps import resharding, shardings

    names = tuple((name, (name,)) for name, _ in MESH)
    common = CommonMesh(MESH, tuple(range(8)), names, names)
    way = change(common, Layout(SHAPE, before, MESH), Layout(SHAPE, after, MESH))
    mesh = mesh_of(jax.devices()[:8], common.axes)
    source, _ = shardings(way, mesh)
    argument = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=source)
    return way, resharding(way, mesh).lower(argument).compile()


def read(program):
    """Received data and temporary memory of a device, in units of the leaf, and the kinds of collectives."""
    from fdg.running.hlo import read_collectives

    size = 4 * SHAPE[0] * SHAPE[1]
    text = program.as_text()
    arrives, kinds = 0.0, []
    for collective, line in zip(read_collectives(text), lines(text), strict=True):
        width = neighbours(line)
        share = (width - 1) / width if collective.kind in ("all-gather", "all-to-all") else 1.0
        arrives += collective.bytes * share / size
        kinds.append(collective.kind + (f" of {width}" if collective.kind == "all-gather" else ""))
    return arrives, program.memory_analysis().temp_size_in_bytes / size, kinds


def neighbours(line: str) -> int:
    """The group size of a collective: of `[4,2]<=...`, or of `mesh['a'=4,'b'=2]... {'a'}`."""
    if count := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(count[1])
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", line)}
    named = re.search(r"replica_groups=mesh.*?\{([^}]*)\}", line)
    return math.prod(sizes[name] for name in re.findall(r"\w+", named[1])) if named else 1


def lines(text: str) -> list[str]:
    kinds = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return [line for line in text.splitlines() if re.search(rf" = .*? {kinds}", line)]


if __name__ == "__main__":
    main()
