"""Weakly typed leaves of a state: Python numbers, and what is made of them alone.

JAX computes `x * n` in the dtype of `x` where `n` is weakly typed. Plain calls of `iterate` hand weak types
on from call to call, and so does an engine. One program serves all iterations: where a leaf is weakly typed
before some of them and not before others, that must make no difference to what they compute.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax

from fdg import jaxprs


def weakness(tree: Any) -> list[bool]:
    """Whether each leaf is weakly typed."""
    return [bool(getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]


def with_weakness(tree: Any, weak: list[bool]) -> Any:
    """Shapes, weakly typed as `weak` says."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [_typed(*each) for each in zip(leaves, weak, strict=True)])


def _typed(leaf: Any, weak: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def computes_alike(one: Any, other: Any) -> bool:
    """Whether two traces of a function compute in the same dtypes, but for conversions of one to itself.

    They differ in nothing else: weakness is read where dtypes are promoted, and there alone.
    """
    return collections.Counter(_operations(one)) == collections.Counter(_operations(other))


def _operations(jaxpr: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each operation at any depth, with the dtypes of its operands and results."""
    eqn: Any
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        dtypes = tuple(str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars, *eqn.outvars))
        if eqn.primitive.name != "convert_element_type" or len(set(dtypes)) > 1:
            yield eqn.primitive.name, dtypes
        for body in jaxprs.bodies(eqn):
            yield from _operations(body.jaxpr)
