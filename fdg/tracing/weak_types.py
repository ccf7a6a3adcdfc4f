"""Weakly typed leaves of a state: Python numbers, and what is made of them alone.

JAX computes `x * n` in the dtype of `x` where `n` is weakly typed. Plain calls of `iterate` hand weak types
on from call to call, and so does an engine. One program serves all iterations: where a leaf is weakly typed
before some of them and not before others, that must make no difference to what they compute.
"""

import itertools
import re
from typing import Any

import jax
import numpy as np

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
    """Whether two closed jaxprs do the same operations, but for conversions between a dtype and itself."""
    return _plain(one) == _plain(other)


def _plain(jaxpr: Any) -> Any:
    """What a jaxpr computes, as values that compare."""
    opened = jaxprs.open_jaxpr(jaxpr)
    names: dict[Any, Any] = {}
    numbers = itertools.count()

    def name(atom: Any) -> Any:
        if jaxprs.is_literal(atom):
            return str(atom.aval.dtype), np.asarray(atom.val).tobytes()
        if atom not in names:
            names[atom] = next(numbers)
        return names[atom]

    constants = zip(opened.constvars, jaxprs.constants_of(jaxpr), strict=False)
    found: list[Any] = [[(name(v), _value(value)) for v, value in constants], list(map(name, opened.invars))]
    eqn: Any
    for eqn in opened.eqns:
        operands = list(map(name, eqn.invars))
        converts = eqn.primitive.name == "convert_element_type"
        if converts and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
            names[eqn.outvars[0]] = operands[0]
            continue
        params = {key: _value(value) for key, value in eqn.params.items() if key != "weak_type"}
        types = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars if hasattr(v.aval, "dtype")]
        found.append((eqn.primitive.name, operands, params, types, list(map(name, eqn.outvars))))
    return [*found, list(map(name, opened.outvars))]


def _value(value: Any) -> Any:
    """A parameter or a constant, as a value that compares; without functions, which differ."""
    if jaxprs.is_jaxpr(value):
        return _plain(value)
    if isinstance(value, tuple | list):
        return [_value(item) for item in value]
    if isinstance(value, np.ndarray | jax.Array):
        data = (
            jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) else value
        )
        return str(value.dtype), value.shape, np.asarray(data).tobytes()
    return None if callable(value) else re.sub("0x[0-9a-f]+", "", repr(value))
