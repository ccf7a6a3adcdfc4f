"""Programs for three interpreters: plain Python with versions per group, unrolled JAX, and JAX with loops.

A program maps (interpreter, leaves) to (leaves, metrics). Plain Python is the oracle. Its values are
`Versions`, the newest and an older one for each delayed group: a fragment reads its group's version, code
between fragments computes every version, and a fragment that returns `Same(i)` passes operand i through.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import fdg
from fdg.placing.policy import Group

# Groups by role.
COARSE = {
    "environment": "actors",
    "encoder": "actors",
    "actor": "actors",
    "learner": "learners",
    "update": "learners",
}
CENTRAL = {
    "environment": "workers",
    "encoder": "workers",
    "actor": "workers",
    "learner": "workers",
    "update": "servers",
}
THREE = {"environment": "a", "encoder": "b", "actor": "a", "learner": "c", "update": "b"}
GROUPS = {"coarse": COARSE, "central": CENTRAL, "three": THREE}


@dataclasses.dataclass(frozen=True)
class Same:
    """A fragment's result that is an operand passed through unchanged."""

    operand: int


@dataclasses.dataclass(frozen=True)
class Versions:
    newest: Any
    older: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    makers: frozenset[str] = frozenset()  # groups

    def of(self, group: str | None) -> Any:
        return self.older.get(group, self.newest)


class Python:
    """The oracle."""

    def __init__(self, groups: Mapping[str, str]):
        self.groups = groups  # of each role

    def fragment(self, role: str, name: str, function: Callable, *operands: Any) -> tuple:
        group = self.groups[role]
        results = function(*(v.of(group) if isinstance(v, Versions) else v for v in operands))
        made = frozenset({group})
        return tuple(
            operands[r.operand] if isinstance(r, Same) else Versions(r, makers=made) for r in results
        )

    def glue(self, function: Callable, *operands: Any) -> Versions:
        groups = {g for v in operands for g in v.older}
        older = {g: function(*(v.of(g) for v in operands)) for g in groups}
        makers = frozenset().union(*(v.makers for v in operands))
        return Versions(function(*(v.newest for v in operands)), older, makers)

    def loop(self, trips: int, body: Callable, carry: tuple, how: str = "scan") -> tuple:
        for i in range(trips):
            carry = body(carry, Versions(np.float32(i)))
        return carry

    def choose(self, choice: Any, yes: Callable, no: Callable, *operands: Any) -> tuple:
        both = yes(*operands), no(*operands)
        taken = both[0] if choice.newest > 0 else both[1]
        return tuple(
            dataclasses.replace(v, makers=v.makers | other.makers)
            for v, *others in zip(taken, *both, strict=True)
            for other in [dataclasses.replace(v, makers=frozenset().union(*(o.makers for o in others)))]
        )


class Unrolled:
    """JAX without loops."""

    def fragment(self, role: str, name: str, function: Callable, *operands: Any) -> tuple:
        def body(*values):
            results = function(*values)
            return tuple(values[r.operand] if isinstance(r, Same) else r for r in results)

        axis = 0 if jnp.ndim(operands[0]) else None
        return fdg.fragment(role, in_axes=axis, out_axes=axis, name=name)(body)(*operands)

    def glue(self, function: Callable, *operands: Any) -> Any:
        return function(*operands)

    def loop(self, trips: int, body: Callable, carry: tuple, how: str = "scan") -> tuple:
        for i in range(trips):
            carry = body(carry, jnp.float32(i))
        return carry

    def choose(self, choice: Any, yes: Callable, no: Callable, *operands: Any) -> tuple:
        return jax.lax.cond(choice > 0, yes, no, *operands)


class Looped(Unrolled):
    """JAX with scans and while loops."""

    def loop(self, trips: int, body: Callable, carry: tuple, how: str = "scan") -> tuple:
        if how == "while":

            def trip(state):
                return state[0] + 1, body(state[1], state[0].astype(jnp.float32))

            return jax.lax.while_loop(lambda state: state[0] < trips, trip, (jnp.int32(0), carry))[1]
        return jax.lax.scan(lambda c, i: (body(c, i), None), carry, jnp.arange(trips, dtype=jnp.float32))[0]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A program as an algorithm; `start` maps leaves to their first values."""

    program: Callable
    interpreter: Any
    start: tuple[tuple[str, Any], ...]

    def init(self, key):
        return {name: jnp.asarray(value, jnp.float32) for name, value in self.start}

    def iterate(self, state):
        return self.program(self.interpreter, state)


@dataclasses.dataclass(frozen=True)
class Roles:
    """Assigns groups to roles, each group on a separate device if there are enough."""

    groups: tuple[tuple[str, str], ...]  # role, group
    staleness: int = 0

    def place(self, devices):
        names = list(dict.fromkeys(group for _, group in self.groups))
        return {role: Group(g, (names.index(g) % len(devices),)) for role, g in self.groups}


def python(program, start, groups, staleness, iterations):
    """(state after, metrics of each iteration) of the oracle."""
    oracle, state = Python(groups), {name: np.float32(value) for name, value in start}
    acting = {group for role, group in groups.items() if role == "actor"}
    # The group that computes a leaf does not depend on the numbers.
    traced, _ = program(oracle, {name: Versions(value) for name, value in state.items()})
    past = [state] * (staleness + 1)  # oldest first, the newest last
    metrics = []
    for _ in range(iterations):
        leaves = {
            name: Versions(value, {g: past[0][name] for g in acting if traced[name].makers - {g}})
            for name, value in past[-1].items()
        }
        made, one = program(oracle, leaves)
        past = [*past[1:], {name: made[name].newest for name in state}]
        metrics.append({name: value.newest for name, value in one.items()})
    return past[-1], metrics


def delayed_graph(program, start, groups, staleness, interpreter):
    """The plan of a program on one device; its graph implements the staleness."""
    graph = fdg.trace(Algorithm(program, interpreter, tuple(start)))
    used = {groups[f.role] for f in graph.fragments}
    placed = tuple((role, group) for role, group in groups.items() if group in used)
    return fdg.place(graph, Roles(placed, staleness), 1)


def rewritten(program, start, groups, staleness, iterations, interpreter):
    """As `python`, by the rewritten graph, evaluated without an engine."""
    plan = delayed_graph(program, start, groups, staleness, interpreter)
    iterate = jax.jit(core.jaxpr_as_fun(plan.graph.jaxpr))
    first = Algorithm(program, interpreter, tuple(start)).init(None)
    state = first if plan.delayed is None else plan.delayed.start(first)
    leaves, structure = jax.tree.flatten(state)
    metrics = []
    for _ in range(iterations):
        ends = iterate(*leaves)
        leaves = ends[: len(leaves)]
        metrics.append(jax.tree.unflatten(jax.tree.structure(plan.graph.metrics), ends[len(leaves) :]))
    state = jax.tree.unflatten(structure, leaves)
    return (state if plan.delayed is None else state.state), metrics


def assert_equal(expected, actual):
    """States and metrics agree to rounding."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-5)


# --- fragments of the programs ---

TWO = {"actor": "actors", "learner": "learners"}
START = (("w", 1.0), ("v", 2.0), ("x", 0.5))


def act(p, w, x, role="actor", name="act"):
    return p.fragment(role, name, lambda w, x: (0.5 * w + x,), w, x)[0]


def pass_through(p, w, x, role="actor", name="hand"):
    return p.fragment(role, name, lambda w, x: (Same(0), w - 0.25 * x), w, x)


def learn(p, w, y, role="learner", name="learn"):
    return p.fragment(role, name, lambda w, y: (w + 1.0 + 0.125 * y,), w, y)[0]
