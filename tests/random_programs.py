"""Random algorithms: fragments of several roles, code between them, and loops, in any order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import fdg
from fdg.placing.policy import Group

BATCH = 12
ROLES = ("environment", "actor", "learner", "dreamer")
CAPTURED = np.linspace(-0.5, 0.5, BATCH, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Op:
    """One line of a program over a growing list of arrays [BATCH].

    Attributes:
      kind: "fragment" (of `role`; with "shared" results the batch's mean), "glue" or "scan".
      reads: positions in the list, modulo its length; a scan carries the first and reads the others.
      body: of a scan.
    """

    kind: str
    role: str = ""
    reads: tuple[int, ...] = (0,)
    variant: int = 0
    trips: int = 1
    body: tuple["Op", ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """An algorithm: `lines` over the leaves of the state; which arrays come next, and which are metrics."""

    num_leaves: int
    lines: tuple[Op, ...]
    ends: tuple[int, ...]
    metrics: tuple[int, ...]

    def init(self, key):
        return [jnp.linspace(-1, 1, BATCH) * (i + 1) for i in range(self.num_leaves)]

    def iterate(self, state):
        arrays = _run(self.lines, list(state))
        new = [arrays[i % len(arrays)] for i in self.ends]
        return new, {f"m{k}": jnp.mean(arrays[i % len(arrays)]) for k, i in enumerate(self.metrics)}


def _mix(arrays: list[Any], variant: int) -> Any:
    first, *others = arrays
    result = jnp.sin(first + 0.1 * variant)
    for x in others:
        result = 0.7 * result + 0.3 * jnp.tanh(x)
    if variant == 1:
        result = result - jnp.mean(result)
    if variant == 2:
        result = result + jnp.asarray(CAPTURED)
    return result


def _run(lines: tuple[Op, ...], arrays: list[Any]) -> list[Any]:
    for op in lines:
        read = [arrays[i % len(arrays)] for i in op.reads]
        if op.kind == "fragment" and op.variant == 3:  # what the whole batch shares
            mean = fdg.fragment(op.role, out_axes=None, name="share")(lambda *xs: jnp.mean(_mix(list(xs), 0)))
            arrays.append(jnp.zeros(BATCH) + mean(*read))
        elif op.kind == "fragment":
            name = f"{op.role}{op.variant}"
            made = fdg.fragment(op.role, name=name)(
                lambda *xs, op=op: (_mix(list(xs), op.variant), xs[0] * 0.5)
            )
            arrays += made(*read)
        elif op.kind == "glue":
            arrays.append(jnp.roll(_mix(read, op.variant), 1) if op.variant == 3 else _mix(read, op.variant))
        else:
            arrays += _scan(op, read)
    return arrays


def _scan(op: Op, read: list[Any]) -> list[Any]:
    first, *around = read

    def one(carry, x):
        made = _run(op.body, [carry[0] * x, carry[1], *around])
        return (made[-1], carry[0]), made[len(made) // 2]

    (last, before), stacked = jax.lax.scan(
        one, (first, first), 1.0 + 0.1 * jnp.arange(op.trips, dtype=jnp.float32), reverse=op.variant % 2 == 1
    )
    return [last, before, jnp.mean(stacked, axis=0), stacked[0]]


def _ops(depth: int) -> st.SearchStrategy:
    reads = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
    variant = st.integers(0, 3)
    fragment = st.builds(Op, st.just("fragment"), st.sampled_from(ROLES), reads, variant)
    kinds = [fragment, fragment, st.builds(Op, st.just("glue"), st.just(""), reads, variant)]
    if depth:
        body = st.lists(_ops(depth - 1), min_size=1, max_size=3).map(tuple)
        kinds.append(st.builds(Op, st.just("scan"), st.just(""), reads, variant, st.integers(1, 3), body))
    return st.one_of(kinds)


@dataclasses.dataclass(frozen=True)
class Scattered:
    """Any roles on any groups."""

    groups: tuple[tuple[str, Group], ...]

    def place(self, devices):
        return dict(self.groups)


@st.composite
def programs(draw):
    """(algorithm, policy): every placed role is there, on up to three groups of 1 to 3 devices."""
    lines = draw(st.lists(_ops(2), min_size=2, max_size=5))
    leaves = draw(st.integers(1, 3))
    first, second = draw(st.permutations(ROLES))[:2]  # at least two roles, so that groups can differ
    lines = (*lines, Op("fragment", first, (0, 3), 0), Op("fragment", second, (-1, 1), 1))
    choose = st.integers(-6, 8)
    ends = tuple(draw(st.lists(choose, min_size=leaves, max_size=leaves)))
    metrics = tuple(draw(st.lists(choose, min_size=0, max_size=2)))
    devices, groups, used = draw(st.permutations(range(8))), [], 0
    for name in "abc":
        size = draw(st.integers(1, 3)) if used < 6 else 2
        groups.append(Group(name, tuple(devices[used : used + size])))
        used += size
    chosen = {first: groups[0], second: groups[1]}
    present = _roles(lines)
    for role in ROLES:
        if role in present and role not in chosen and draw(st.booleans()):
            chosen[role] = draw(st.sampled_from(groups))
    return Program(leaves, lines, ends, metrics), Scattered(tuple(chosen.items()))


def _roles(lines) -> set[str]:
    return {op.role for op in lines} | set().union(*(_roles(op.body) for op in lines)) - {""}
