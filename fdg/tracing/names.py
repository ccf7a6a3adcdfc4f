"""A name of its own for each call of a fragment."""

import collections
from collections.abc import Iterator
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

    def named(inside_of: core.Jaxpr, how: Any, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        for eqn in inside_of.eqns:
            mark = FragmentMark.of(eqn)
            if mark is not None and (name := unused(mark.name)) != mark.name:
                eqn = eqn.replace(params={**eqn.params, "name": str(FragmentMark(mark.role, name))})
            yield inside(eqn, how=object())  # a body that is called twice has fragments of two names

    return jaxprs.rewrite_blocks(jaxpr, named)
