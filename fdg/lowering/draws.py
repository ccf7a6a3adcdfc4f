"""Random numbers drawn before a loop, not in each of its trips: as many, and the same ones, in one go.

Of a loop over keys, one a trip,

    scan 128 trips { x; key: k = split key; u = uniform k[0]; r = uniform k[1]; x = step x u r }

the draws depend on the keys alone, and on nothing that is carried. They are taken out of the body, and made
for all keys together:

    us, rs = for all 128 keys: k = split key; u = uniform k[0]; r = uniform k[1]
    scan 128 trips { x; u, r: x = step x u r }

On a CPU a draw is a small loop of small operations, half of what a step of few environments consists of; on a
GPU each is a kernel to start. The bits are those of the loop, since threefry hashes each key by itself; draws
of other generators, which depend on the batch that a key is in, stay where they are.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.rules.random import draws_from_the_batch
from fdg.placing.recall import Recall

# Of what is drawn for all trips of a loop: of more, the loop's own trips are the better ones.
MOST_BYTES = 64 << 20

_DRAWS = frozenset(
    "random_bits random_split random_fold_in random_gamma random_seed threefry2x32 random_clone".split()
)


_KNOWN: Recall[core.ClosedJaxpr] = Recall(most=256)


def draw_ahead(jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The program with the draws of its scans taken out of them, at any depth.

    Args:
      jaxpr: a traced program, in the global view; one that was rewritten before is not again.
    """

    def rewrite() -> core.ClosedJaxpr:
        lowered = _Hoister().rewrite(jaxprs.open_jaxpr(jaxpr))
        return jaxpr if lowered is None else jaxprs.with_jaxpr(jaxpr, lowered)

    return _KNOWN(jaxpr, MOST_BYTES, rewrite)


class _Parts(NamedTuple):
    """A jaxpr in two: what is drawn, and what is left to do with it.

    Attributes:
      early: equations that depend on no carried value.
      late: all others.
      drawn: what the latter read of the former.
    """

    early: list[Any]
    late: list[Any]
    drawn: list[core.Var]


class _Hoister:
    """Rewrites jaxprs; one that is called from several places is rewritten once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}

    def rewrite(self, jaxpr: Any) -> Any:
        """The jaxpr with its scans rewritten; None if nothing changes."""
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self.known[id(jaxpr)][1]

    def _rewrite(self, jaxpr: Any) -> Any:
        equations: list[Any] = []
        changed = False
        for eqn in jaxpr.eqns:
            now = jaxprs.with_new_bodies(eqn, [self.rewrite(body.jaxpr) for body in jaxprs.bodies(eqn)])
            made = _without_draws(now) if eqn.primitive.name == "scan" and not eqn.effects else None
            changed = changed or now is not eqn or made is not None
            equations += [now] if made is None else made
        return jaxpr.replace(eqns=equations) if changed else None


def _without_draws(eqn: Any) -> list[Any] | None:
    """A scan as a call that draws and a scan over what is drawn; None where it draws nothing by itself."""
    (body,) = jaxprs.bodies(eqn)
    closed = jaxprs.closed_bodies(eqn)[0]
    if jaxprs.constants_of(closed) or draws_from_the_batch(body.jaxpr):
        return None
    carried = {i for i, _ in body.carry}
    inputs = body.jaxpr.invars
    parts = _split(body.jaxpr, {v for i, v in enumerate(inputs) if i not in carried})
    if parts is None or body.trips * sum(jaxprs.bytes_of(v.aval) for v in parts.drawn) > MOST_BYTES:
        return None
    needed = _read(parts.early, parts.drawn)
    own = [i for i, v in enumerate(inputs) if v in needed]
    if not any(i in body.sliced for i in own):
        return None  # the same draw every trip, which XLA takes out itself
    draw = core.jaxpr_as_fun(jaxprs.build([inputs[i] for i in own], parts.drawn, parts.early))
    rows = [0 if i in body.sliced else None for i in own]
    operands = [eqn.invars[i] for i in own]
    draws = jax.make_jaxpr(jax.vmap(draw, in_axes=rows))(*_shapes(operands))
    stacks = [core.Var(aval) for aval in draws.out_avals]
    late = jaxprs.build([*inputs, *parts.drawn], body.jaxpr.outvars, parts.late)
    return [
        _call("draws", draws, operands, stacks),
        _scan(eqn, late, [*eqn.invars, *stacks], eqn.outvars),
    ]


def _split(jaxpr: Any, free: set[Any]) -> _Parts | None:
    """Takes a jaxpr's draws out of it, with what they need.

    Args:
      jaxpr: an open one.
      free: its inputs that may be known ahead.
    """
    free = set(free)
    equations: list[tuple[Any, bool, bool]] = []  # with whether it is free, and whether it draws
    for eqn in jaxpr.eqns:
        for each in _calls_apart(eqn, free):
            known = not each.effects and all(jaxprs.is_literal(v) or v in free for v in each.invars)
            if known:
                free.update(each.outvars)
            equations.append((each, known, known and _draws(each)))
    wanted: set[Any] = set()
    early: list[Any] = []
    late: list[Any] = []
    for each, known, draws in reversed(equations):
        taken = draws or (known and any(v in wanted for v in each.outvars))
        if taken:
            wanted.update(v for v in each.invars if not jaxprs.is_literal(v))
        (early if taken else late).append(each)
    if not early:
        return None
    early.reverse()
    late.reverse()
    read = _read(late, jaxpr.outvars)
    return _Parts(early, late, [v for each in early for v in each.outvars if v in read])


def _calls_apart(eqn: Any, free: set[Any]) -> list[Any]:
    """A call as two, of which the first draws what it can; any other equation by itself."""
    if eqn.primitive.name not in ("jit", "pjit") or eqn.effects:
        return [eqn]
    (body,), (closed,) = jaxprs.bodies(eqn), jaxprs.closed_bodies(eqn)
    pairs = list(zip(body.jaxpr.invars, eqn.invars, strict=True))
    known = {inner for inner, outer in pairs if jaxprs.is_literal(outer) or outer in free}
    if len(known) == len(pairs) or jaxprs.constants_of(closed):
        return [eqn]
    parts = _split(body.jaxpr, known)
    if parts is None:
        return [eqn]
    needed = _read(parts.early, parts.drawn)
    inputs = [(inner, outer) for inner, outer in pairs if inner in needed]
    drawn = [core.Var(v.aval) for v in parts.drawn]
    first = jaxprs.build([inner for inner, _ in inputs], parts.drawn, parts.early)
    second = jaxprs.build([*body.jaxpr.invars, *parts.drawn], body.jaxpr.outvars, parts.late)
    return [
        _call(eqn.params["name"], first, [outer for _, outer in inputs], drawn),
        _call(eqn.params["name"], second, [*eqn.invars, *drawn], eqn.outvars),
    ]


# Stands for a body while the equation around it is traced: JAX takes what a body hands on out of an equation,
# whose results would then be fewer than those that are wanted.
_body_p = core.Primitive("body")
_body_p.multiple_results = True
_body_p.def_abstract_eval(lambda *_, avals: list(avals))


def _call(name: str, body: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A call of a jaxpr."""
    avals = tuple(v.aval for v in jaxprs.open_jaxpr(body).outvars)

    def called(*operands: Any) -> list[Any]:
        return _body_p.bind(*operands, avals=avals)

    called.__name__ = called.__qualname__ = name
    return _with_body(jax.make_jaxpr(jax.jit(called))(*_shapes(invars)), body, invars, outvars)


def _scan(model: Any, late: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A scan like another one, with another body and more to go over."""
    (body,) = jaxprs.bodies(model)
    count = len(body.carry)
    first = len(model.invars) - len(body.sliced) - count
    avals = tuple(v.aval for v in body.jaxpr.outvars)

    def loop(*operands: Any) -> Any:
        constants, start, rows = operands[:first], operands[first : first + count], operands[first + count :]

        def one(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = _body_p.bind(*constants, *carry, *rows, avals=avals)
            return list(results[:count]), list(results[count:])

        how = {name: model.params[name] for name in ("reverse", "unroll")}
        return jax.lax.scan(one, list(start), list(rows), length=body.trips, **how)

    return _with_body(jax.make_jaxpr(loop)(*_shapes(invars)), late, invars, outvars)


def _with_body(traced: Any, body: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """The one equation that was traced, with the body in it that was stood for."""
    jaxpr = jaxprs.open_jaxpr(traced)
    (eqn,) = jaxpr.eqns
    assert list(eqn.invars) == list(jaxpr.invars) and len(eqn.outvars) == len(outvars), eqn
    return jaxprs.with_bodies(eqn, [body]).replace(invars=list(invars), outvars=list(outvars))


def _shapes(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    avals = [v.aval for v in atoms]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]


def _draws(eqn: Any) -> bool:
    return eqn.primitive.name in _DRAWS or any(
        any(map(_draws, body.jaxpr.eqns)) for body in jaxprs.bodies(eqn)
    )


def _read(equations: Iterable[Any], ends: Iterable[Any]) -> set[Any]:
    """The variables that equations, or what comes out at the end, need."""
    read = {v for each in equations for v in each.invars if not jaxprs.is_literal(v)}
    return read | {v for v in ends if not jaxprs.is_literal(v)}
