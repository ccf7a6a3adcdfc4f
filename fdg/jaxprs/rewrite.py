"""Rewrites jaxprs by rules for single equations.

    def halve(eqn, inside):
        if eqn.primitive.name != "sin":
            return inside(eqn)  # the equation with the rule applied in its bodies
        return traced(lambda x: jnp.sin(x) / 2, eqn.invars, eqn.outvars)[0]

    rewrite(closed, halve)

Each body is rewritten once, however often it is called. Unchanged parts stay the same objects.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from fdg.identity_cache import IdentityCache
from fdg.jax_internals import HIGH_LEVEL, ClosedJaxpr
from fdg.jaxprs.read import (
    closed_bodies,
    inner_jaxprs,
    is_jaxpr,
    open_jaxpr,
    renamed,
    shapes_of,
    with_bodies,
    with_jaxpr,
    with_new_bodies,
)

Inside: TypeAlias = Callable[..., core.JaxprEqn]
"""(equation, how=None, blocks=None) to the equation with its bodies rewritten; `Rewriter.inside`."""

Rule: TypeAlias = Callable[[core.JaxprEqn, Inside], core.JaxprEqn | Iterable[core.JaxprEqn]]
"""The replacement of an equation: one or several equations; none if its results are not read."""

BlockRule: TypeAlias = Callable[[Any, Any, Inside], Any]
"""(block, how, inside) to the equations of a block, or to an open jaxpr of the same inputs and outputs.

A block is an open jaxpr, or what has one as its attribute `jaxpr` (a `batch.flow.Flow`).
"""


def rewrite(closed: Any, rule: Rule) -> Any:
    """Applies a rule to each equation of a jaxpr, in bodies if the rule calls `inside`.

    The jaxpr is open or closed, and returned unchanged if nothing changes. The rule gets an equation over the
    old jaxpr's variables, and keeps its result variables.
    """

    def of_block(jaxpr: Any, how: Any, inside: Inside) -> Iterator[core.JaxprEqn]:
        for eqn in jaxpr.eqns:
            made = rule(eqn, inside)
            yield from [made] if isinstance(made, core.JaxprEqn) else made

    return rewrite_blocks(closed, of_block)


def rewrite_blocks(closed: Any, rule: BlockRule, how: Any = None, traces: bool = True) -> Any:
    """Applies a rule to a jaxpr as a whole, and to inner ones where the rule calls `inside`."""
    return with_jaxpr(closed, Rewriter(rule, traces)(open_jaxpr(closed), how))


class Rewriter:
    """Applies a rule to blocks; one that is called from several places in the same way is rewritten once.

    New equations of a rule that `traces` do not say how values vary over devices, so it is not applied in a
    `shard_map` that checks this.
    """

    def __init__(self, rule: BlockRule, traces: bool = True):
        self._rule, self._traces = rule, traces
        self._known: IdentityCache[core.Jaxpr] = IdentityCache()

    def __call__(self, block: Any, how: Any = None) -> core.Jaxpr:
        """The rewritten open jaxpr of a block.

        `how` is any further input of the rule; hashable.
        """
        return self._known(block, how, lambda: self._new(block, how))

    def _new(self, block: Any, how: Any) -> core.Jaxpr:
        jaxpr = block if is_jaxpr(block) else block.jaxpr
        made = self._rule(block, how, self.inside)
        return made if is_jaxpr(made) else _with_equations(jaxpr, list(made))

    def inside(self, eqn: core.JaxprEqn, how: Any = None, blocks: Sequence[Any] | None = None) -> Any:
        """An equation with its bodies rewritten.

        `blocks` are those of its bodies, in order; their jaxprs, if None.
        """
        old = inner_jaxprs(eqn)
        if not old or (self._traces and eqn.params.get("check_vma")):
            return eqn
        if blocks is None:
            blocks = [open_jaxpr(inner) for inner in old]
        return with_new_bodies(eqn, [self(block, how) for block in blocks])


def _with_equations(jaxpr: Any, eqns: list[core.JaxprEqn]) -> core.Jaxpr:
    """The jaxpr with other equations; itself if they are the same."""
    if len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    before, now = (frozenset().union(*(eqn.effects for eqn in each)) for each in (jaxpr.eqns, eqns))
    changed: dict[str, Any] = {}
    if before != now:
        changed["effects"] = jaxpr.effects - (before - now) | (now - before)
    if getattr(jaxpr, "is_high", False) and not any(
        eqn.primitive.name in HIGH_LEVEL or any(body.is_high for body in inner_jaxprs(eqn)) for eqn in eqns
    ):
        changed["is_high"] = False
    return jaxpr.replace(eqns=eqns, **changed)


# --- helpers for rules ---


def traced(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any] | None = None
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """A function as equations over given operands, and its result variables.

    The function must compute each of `results`, if given.
    """
    made = open_jaxpr(jax.make_jaxpr(function)(*shapes_of(operands)))
    assert not made.constvars, "arrays that a rule needs are made by its operations"
    names: dict[Any, Any] = dict(zip(made.invars, operands, strict=True))
    if results is not None:
        assert len({*made.invars, *made.outvars}) == len(made.invars) + len(results), "a result is handed on"
        names.update(zip(made.outvars, results, strict=True))
    return list(copied(made.eqns, names)), renamed(made.outvars, names)


def copied(eqns: Iterable[core.JaxprEqn], names: dict[Any, Any]) -> Iterator[core.JaxprEqn]:
    """Equations with renamed variables; new result variables are added to `names`."""
    for eqn in eqns:
        for v in eqn.outvars:
            if not isinstance(v, core.DropVar):
                names.setdefault(v, core.Var(v.aval))
        yield eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))


def inlined(jaxpr: core.Jaxpr, body_of: Callable[[core.JaxprEqn], core.Jaxpr | None]) -> core.Jaxpr:
    """Inlines bodies of equations.

    `body_of` is the open jaxpr, without constants, for an equation; None to keep it.
    """
    names: dict[Any, Any] = {}

    def of(eqns: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
        for eqn in eqns:
            eqn = eqn.replace(invars=renamed(eqn.invars, names))
            body = body_of(eqn)
            if body is None:
                yield eqn
                continue
            inner = dict(zip(body.invars, eqn.invars, strict=True))
            yield from of(copied(body.eqns, inner))
            names.update(zip(eqn.outvars, renamed(renamed(body.outvars, inner), names), strict=True))

    eqns = list(of(jaxpr.eqns))
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


# --- common rules ---


def lowered(closed: Any) -> Any:
    """Replaces high-level operations by calls of what they lower to, at any depth."""

    def low(eqn: core.JaxprEqn, inside: Inside) -> core.JaxprEqn:
        eqn = inside(eqn)
        return with_bodies(eqn, closed_bodies(eqn)) if eqn.primitive.name in HIGH_LEVEL else eqn

    return rewrite(closed, low)


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Dead-code elimination, in branches, loops and calls too.

    XLA does the same, except in some branches, whose unused results and collectives it would compute.
    """
    jaxpr = rewrite(open_jaxpr(closed), _without_unread_constants)
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return with_jaxpr(closed, live)


def inputs_read(closed: ClosedJaxpr) -> list[bool]:
    """For each argument of a closed jaxpr, whether any output depends on it."""
    jaxpr = rewrite(open_jaxpr(closed), _without_unread_constants)
    _, read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(read)


def _without_unread_constants(eqn: core.JaxprEqn, inside: Inside) -> core.JaxprEqn:
    """Removes unused constants of `while` loops, which JAX keeps."""
    eqn = inside(eqn)
    if eqn.primitive.name != "while":
        return eqn
    closed, first, count = (eqn.params[key] for key in ("body_jaxpr", "cond_nconsts", "body_nconsts"))
    body = open_jaxpr(closed)
    carried = len(body.invars) - count
    all_of_it = [True] * len(body.outvars)
    live, read = partial_eval.dce_jaxpr(body, all_of_it, instantiate=[False] * count + [True] * carried)
    if all(read):
        return eqn
    kept = [*eqn.invars[:first], *itertools.compress(eqn.invars[first:], read)]
    params = {**eqn.params, "body_jaxpr": with_jaxpr(closed, live), "body_nconsts": sum(read[:count])}
    return eqn.replace(invars=kept, params=params)
