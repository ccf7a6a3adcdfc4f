"""A name of its own for each call of a fragment."""

import collections
from typing import Any

from jax.extend import core

from fdg import jaxprs
from fdg.fragment import FragmentMark
from fdg.jax_internals import ClosedJaxpr


def name_fragments(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with fragments of one name numbered: `act`, `act.2`, `act.3`, in program order.

    Whoever reads the jaxpr then knows a fragment by its mark alone (`FragmentMark.of(eqn).name`), however
    often its function is called. A jaxpr whose calls have names of their own comes back as it is.
    """
    used: collections.Counter[str] = collections.Counter()

    def unused(name: str) -> str:
        used[name] += 1
        return name if used[name] == 1 else unused(f"{name}.{used[name]}")

    def named(closed: Any) -> Any:
        inside = jaxprs.open_jaxpr(closed)
        equations = [of_equation(eqn) for eqn in inside.eqns]
        if all(new is old for new, old in zip(equations, inside.eqns, strict=True)):
            return closed
        constants = jaxprs.constants_of(closed)
        return jaxprs.build(inside.invars, inside.outvars, equations, inside.constvars, constants)

    def of_equation(eqn: core.JaxprEqn) -> core.JaxprEqn:
        mark = FragmentMark.of(eqn)
        if mark is not None and (name := unused(mark.name)) != mark.name:
            eqn = eqn.replace(params={**eqn.params, "name": str(FragmentMark(mark.role, name))})
        old = jaxprs.closed_bodies(eqn)
        new = [named(closed) for closed in old]
        return eqn if all(a is b for a, b in zip(old, new, strict=True)) else jaxprs.with_bodies(eqn, new)

    return named(jaxpr)
