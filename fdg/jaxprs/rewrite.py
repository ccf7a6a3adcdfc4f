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
from fdg.jax_internals import HIGH_LEVEL_PRIMITIVES, ClosedJaxpr
from fdg.jaxprs.read import (
    call_of,
    closed_bodies,
    inner_jaxprs,
    is_jaxpr,
    open_jaxpr,
    renamed,
    shapes_of,
    walk,
    with_bodies,
    with_jaxpr,
    with_new_bodies,
)

Inside: TypeAlias = Callable[..., core.JaxprEqn]
"""`Rewriter.inside`: maps (equation, context=None, blocks=None) to the equation with rewritten bodies."""

Rule: TypeAlias = Callable[[core.JaxprEqn, Inside], core.JaxprEqn | Iterable[core.JaxprEqn]]
"""Maps (equation, inside) to its replacement: an equation or several; none only if its results are unused."""

BlockRule: TypeAlias = Callable[[Any, Any, Inside], Any]
"""Maps (block, context, inside) to the block's new equations, or to an open jaxpr that replaces it.

A block is an open jaxpr, or an object with an open jaxpr as its attribute `jaxpr` (a `batch.flow.Flow`).
"""


def rewrite(closed: Any, rule: Rule) -> Any:
    """Applies a rule to each equation of a jaxpr, and to equations of bodies if the rule calls `inside`.

    The jaxpr is open or closed; the same object is returned if nothing changes. The equations that replace an
    equation must define the same result variables.
    """

    def rewrite_block(jaxpr: Any, context: Any, inside: Inside) -> Iterator[core.JaxprEqn]:
        for eqn in jaxpr.eqns:
            new = rule(eqn, inside)
            yield from [new] if isinstance(new, core.JaxprEqn) else new

    return rewrite_blocks(closed, rewrite_block)


def rewrite_blocks(closed: Any, rule: BlockRule, context: Any = None, traces: bool = True) -> Any:
    """Applies a rule to a whole jaxpr, and to inner jaxprs if the rule calls `inside`; see `Rewriter`."""
    return with_jaxpr(closed, Rewriter(rule, traces)(open_jaxpr(closed), context))


class Rewriter:
    """Applies a rule to blocks; a block that several places call with equal `context` is rewritten once.

    `traces` is True if the rule traces new equations. Their types do not say how values vary over devices, so
    such a rule is not applied inside a `shard_map` with `check_vma`.
    """

    def __init__(self, rule: BlockRule, traces: bool = True):
        self._rule, self._traces = rule, traces
        self._cache: IdentityCache[core.Jaxpr] = IdentityCache()

    def __call__(self, block: Any, context: Any = None) -> core.Jaxpr:
        """The rewritten open jaxpr of a block; `context` is a further, hashable input of the rule."""
        return self._cache(block, context, lambda: self._rewrite(block, context))

    def _rewrite(self, block: Any, context: Any) -> core.Jaxpr:
        jaxpr = block if is_jaxpr(block) else block.jaxpr
        result = self._rule(block, context, self.inside)
        return result if is_jaxpr(result) else _with_equations(jaxpr, list(result))

    def inside(self, eqn: core.JaxprEqn, context: Any = None, blocks: Sequence[Any] | None = None) -> Any:
        """The equation with its bodies (inner jaxprs) rewritten; the same object if nothing changes.

        For each body, the rule gets `context` and a block (see `BlockRule`): of `blocks`, or the body itself.
        """
        old = inner_jaxprs(eqn)
        if not old or (self._traces and eqn.params.get("check_vma")):
            return eqn
        if blocks is None:
            blocks = [open_jaxpr(inner) for inner in old]
        return with_new_bodies(eqn, [self(block, context) for block in blocks])


def _with_equations(jaxpr: Any, eqns: list[core.JaxprEqn]) -> core.Jaxpr:
    """The jaxpr with other equations; the same object if the equations are the same."""
    if len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    old_effects, new_effects = (
        frozenset().union(*(eqn.effects for eqn in equations)) for equations in (jaxpr.eqns, eqns)
    )
    changed: dict[str, Any] = {}
    if old_effects != new_effects:
        changed["effects"] = jaxpr.effects - (old_effects - new_effects) | (new_effects - old_effects)
    if getattr(jaxpr, "is_high", False) and not any(
        eqn.primitive.name in HIGH_LEVEL_PRIMITIVES or any(body.is_high for body in inner_jaxprs(eqn))
        for eqn in eqns
    ):
        changed["is_high"] = False
    return jaxpr.replace(eqns=eqns, **changed)


# --- helpers for rules ---


def traced(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any] | None = None
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """Traces a function to equations that read `operands`; returns the equations and the result variables.

    If `results` are given, they are the result variables, and the function must compute each of them.
    """
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(*shapes_of(operands)))
    assert not jaxpr.constvars, "a rule must compute arrays by operations, not capture them"
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    if results is not None:
        assert len({*jaxpr.invars, *jaxpr.outvars}) == len(jaxpr.invars) + len(results), (
            "a result is an operand, a literal or another result"
        )
        names.update(zip(jaxpr.outvars, results, strict=True))
    return list(copy_equations(jaxpr.eqns, names)), renamed(jaxpr.outvars, names)


def copy_equations(eqns: Iterable[core.JaxprEqn], names: dict[Any, Any]) -> Iterator[core.JaxprEqn]:
    """Copies equations with renamed variables; adds new result variables to `names`."""
    for eqn in eqns:
        for v in eqn.outvars:
            if not isinstance(v, core.DropVar):
                names.setdefault(v, core.Var(v.aval))
        yield eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))


def inline(jaxpr: core.Jaxpr, body_of: Callable[[core.JaxprEqn], core.Jaxpr | None]) -> core.Jaxpr:
    """The jaxpr with equations replaced by the equations of their bodies, also inside these bodies.

    `body_of` returns the body of an equation, an open jaxpr without constants, or None to keep the equation.
    """
    names: dict[Any, Any] = {}

    def inline_equations(eqns: Iterable[core.JaxprEqn]) -> Iterator[core.JaxprEqn]:
        for eqn in eqns:
            eqn = eqn.replace(invars=renamed(eqn.invars, names))
            body = body_of(eqn)
            if body is None:
                yield eqn
                continue
            inner = dict(zip(body.invars, eqn.invars, strict=True))
            yield from inline_equations(copy_equations(body.eqns, inner))
            names.update(zip(eqn.outvars, renamed(renamed(body.outvars, inner), names), strict=True))

    eqns = list(inline_equations(jaxpr.eqns))
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


# --- common rules ---


def lowered(closed: Any) -> Any:
    """Replaces JAX's high-level operations (`HiPrim`s), at any depth, by calls of their lowered jaxprs."""

    def lower_equation(eqn: core.JaxprEqn, inside: Inside) -> core.JaxprEqn:
        eqn = inside(eqn)
        return with_bodies(eqn, closed_bodies(eqn)) if eqn.primitive.name in HIGH_LEVEL_PRIMITIVES else eqn

    return rewrite(closed, lower_equation)


def may_run_all_branches(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a `cond` all of whose branches may run.

    Side effects would happen that must not, and a `while` loop might never end in a branch that is not taken.
    """
    return (
        eqn.primitive.name == "cond"
        and not eqn.effects
        and all(inner.primitive.name != "while" for inner in walk([eqn]))
    )


def all_branches(eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Equations that call every branch of a `cond` and select the results of one, as `jax.vmap` does."""
    index, *operands = eqn.invars
    calls = [
        call_of(closed, f"branch_{i}", operands, [core.Var(v.aval) for v in eqn.outvars])
        for i, closed in enumerate(closed_bodies(eqn))
    ]
    selections = [
        traced(_select, [index, *results], [v])[0]
        for v, *results in zip(eqn.outvars, *(call.outvars for call in calls), strict=True)
    ]
    return [*calls, *itertools.chain(*selections)]


def _select(index: jax.Array, *branches: jax.Array) -> jax.Array:
    """The result of one branch; the index is clamped, as in `lax.switch`."""
    first, last = (index.dtype.type(i) for i in (0, len(branches) - 1))  # with x64, `clamp(0, ...)` is int64
    return jax.lax.select_n(jax.lax.clamp(first, index, last), *branches)


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Removes dead code, also in branches, loops and calls.

    XLA removes dead code too, except in some branches, where it would keep unused results and collectives.
    """
    jaxpr = rewrite(open_jaxpr(closed), _without_unread_constants)
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return with_jaxpr(closed, live)


def inputs_read(closed: ClosedJaxpr) -> list[bool]:
    """For each argument of a closed jaxpr, whether an output depends on it."""
    jaxpr = rewrite(open_jaxpr(closed), _without_unread_constants)
    _, read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(read)


def _without_unread_constants(eqn: core.JaxprEqn, inside: Inside) -> core.JaxprEqn:
    """Removes unused constants of `while` loops, which JAX keeps."""
    eqn = inside(eqn)
    if eqn.primitive.name != "while":
        return eqn
    closed, num_test_constants, num_constants = (
        eqn.params[key] for key in ("body_jaxpr", "cond_nconsts", "body_nconsts")
    )
    body = open_jaxpr(closed)
    num_carried = len(body.invars) - num_constants
    outputs_read = [True] * len(body.outvars)
    live, read = partial_eval.dce_jaxpr(
        body, outputs_read, instantiate=[False] * num_constants + [True] * num_carried
    )
    if all(read):
        return eqn
    operands = [*eqn.invars[:num_test_constants], *itertools.compress(eqn.invars[num_test_constants:], read)]
    params = {**eqn.params, "body_jaxpr": with_jaxpr(closed, live), "body_nconsts": sum(read[:num_constants])}
    return eqn.replace(invars=operands, params=params)
