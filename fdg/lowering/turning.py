"""Gradients of kernels as products of rows with columns, which XLA's CPU library is quick at.

    g = dot_general d x    [O, I], summed over their rows, [N, O] and [N, I]
    w = transpose g        [I, O]

is to XLA one product that reads both operands down their columns, 1.1 to 2 times as slow on a core as the
same product of `x` turned in memory (512 x 256 x 256: 750 and 650 us; 128 x 1024 x 128: 670 and 340). XLA
folds a transpose into the product that follows it; a barrier, which it drops only later, keeps it apart.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.jax_internals import ClosedJaxpr

_LEAST_COLUMNS = 64  # of the other operand: with fewer, turning a large one takes longer than it saves
_LARGE_BYTES = 1 << 20
_OVER_ROWS = (((0,), (0,)), ((), ()))


def turn_kernels(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose products over rows have the first operand turned, in loops and calls too.

    >>> grad = jax.grad(lambda w, x: (x @ w).sum())
    >>> traced = jax.make_jaxpr(grad)(jax.numpy.ones((64, 64)), jax.numpy.ones((8, 64)))
    >>> [eqn.primitive.name for eqn in jaxprs.open_jaxpr(turn_kernels(traced)).eqns[-3:]]
    ['transpose', 'optimization_barrier', 'dot_general']
    """
    turned = _Turner().rewrite(jaxprs.open_jaxpr(closed))
    return closed if turned is None else jaxprs.with_jaxpr(closed, turned)


class _Turner:
    """Rewrites jaxprs; one that is called from several places is rewritten once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[core.Jaxpr, core.Jaxpr | None]] = {}

    def rewrite(self, jaxpr: core.Jaxpr) -> core.Jaxpr | None:
        """The jaxpr with its products turned; None if it has none, at any depth."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewrite(self, jaxpr: core.Jaxpr) -> core.Jaxpr | None:
        reads = Counter(v for v in jaxpr.outvars if not jaxprs.is_literal(v))
        for eqn in jaxpr.eqns:
            reads.update(v for v in eqn.invars if not jaxprs.is_literal(v))
        products = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if _adds_up_rows(eqn)}
        then = {  # the transpose that alone reads a product
            eqn.invars[0]: eqn
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "transpose"
            and not jaxprs.is_literal(eqn.invars[0])
            and eqn.invars[0] in products
            and reads[eqn.invars[0]] == 1
        }
        dropped = {id(eqn) for eqn in then.values()}
        columns: dict[core.Var, core.Var] = {}  # what is turned, and its name then
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            if id(eqn) in dropped:
                continue
            if eqn.outvars and eqn.outvars[0] in products:
                first, second = cast(Sequence[core.Var], eqn.invars)  # no literals: `_adds_up_rows`
                out = eqn.outvars[0]
                if out in then:
                    first, second, out = second, first, then[out].outvars[0]
                if _pays(first.aval, second.aval):
                    if first not in columns:
                        turning, columns[first] = _turned(first)
                        eqns += turning
                    eqns.append(_rows_with_columns(eqn, columns[first], second, out))
                    continue
                eqns.append(eqn)
                if eqn.outvars[0] in then:
                    eqns.append(then[eqn.outvars[0]])
                continue
            bodies = [self.rewrite(body.jaxpr) for body in jaxprs.bodies(eqn)]
            eqns.append(jaxprs.with_new_bodies(eqn, bodies) if bodies else eqn)
        same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        return None if same else jaxpr.replace(eqns=eqns)


def _adds_up_rows(eqn: Any) -> bool:
    return (
        eqn.primitive.name == "dot_general"
        and tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"]) == _OVER_ROWS
        and all(v.aval.ndim == 2 and not jaxprs.is_literal(v) for v in eqn.invars)
    )


def _pays(first: Any, second: Any) -> bool:
    if 1 in (first.shape[1], second.shape[1]):  # to XLA a sum of products of numbers: 4 times as slow turned
        return False
    return second.shape[1] >= _LEAST_COLUMNS or jaxprs.bytes_of(first) <= _LARGE_BYTES


def _turned(operand: core.Var) -> tuple[list[core.JaxprEqn], core.Var]:
    """The equations that turn an operand in memory, and the name of what they make."""

    def turn(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x.T)

    made = jaxprs.open_jaxpr(jax.make_jaxpr(turn)(_aval(operand)))
    (given,), (result,) = made.invars, made.outvars
    eqns = [eqn.replace(invars=[operand if v is given else v for v in eqn.invars]) for eqn in made.eqns]
    return eqns, result  # type: ignore[return-value]


def _rows_with_columns(eqn: Any, first: core.Var, second: core.Var, out: core.Var) -> core.JaxprEqn:
    """The product `[M, N]` of `first [M, K]` and `second [K, N]`, called `out`."""

    def product(first: jax.Array, second: jax.Array) -> jax.Array:
        params = {**eqn.params, "dimension_numbers": (((1,), (0,)), ((), ()))}
        return eqn.primitive.bind(first, second, **params)

    (made,) = jaxprs.open_jaxpr(jax.make_jaxpr(product)(_aval(first), _aval(second))).eqns
    return made.replace(invars=[first, second], outvars=[out])


def _aval(v: core.Var) -> jax.ShapeDtypeStruct:
    aval: Any = v.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
