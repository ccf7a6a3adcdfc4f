"""Digests of a plan. The processes of a run compare them before the run starts.

Processes that run different programs deadlock, or exchange wrong arrays. It is not enough to compare flags
and versions, because other modules and environment variables that user code reads may differ. So the traced
and planned programs are compared:

    process 0 {"fragment 'act'": "5d41...", "fragment 'learn'": "7b52...", ..., "the schedule": "9e10..."}
    process 1 {"fragment 'act'": "5d41...", "fragment 'learn'": "c4ca...", ..., "the schedule": "9e10..."}
    -> process 1 has traced or planned another fragment 'learn' than process 0

Digests leave out everything that may differ between processes that run the same program: memory addresses,
the order of sets, and devices.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fdg import jaxprs, keys
from fdg.fragment import FragmentMark
from fdg.identity_cache import IdentityCache
from fdg.placing.plans import Plan

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # memory addresses in the texts of objects


def digests(plan: Plan) -> dict[str, str]:
    """The SHA-256 of each part of a plan, as hexadecimal text, by the name that error messages give the part.

    If several parts of two plans differ, the first of them in this order says most about the difference.
    """
    writer = _TextWriter()
    iteration = writer.digest_of(plan.graph.jaxpr)
    constants = [writer.text(value, {}) for value in jaxprs.constants_of(plan.graph.jaxpr)]
    return {
        **{f"fragment '{name}'": _sha("".join(parts)) for name, parts in writer.fragments.items()},
        "constants": _sha(repr(constants)),
        "code between fragments": iteration,  # of the whole iteration; fragments are compared first
        "policy": _sha(writer.text(plan.policy, {})),
        "assignment of fragments to groups": _sha(
            writer.text((plan.assignment, plan.groups, plan.graph.agents), {})
        ),
        "schedule": _sha(writer.text(getattr(plan, "schedule", None), {})),
    }


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _TextWriter:
    """Writes equal values as equal text. Variables are numbered by their order in each jaxpr."""

    def __init__(self) -> None:
        self.fragments: dict[str, list[str]] = {}  # by name: the digest of each call
        self._digest_cache: IdentityCache[str] = IdentityCache()

    def digest_of(self, jaxpr: Any) -> str:
        """The digest of a jaxpr with its constants."""
        return self._digest_cache(jaxpr, None, lambda: self._digest(jaxpr))

    def _digest(self, jaxpr: Any) -> str:
        numbers: dict[Any, int] = {}
        body = jaxprs.open_jaxpr(jaxpr)
        constants = [self.text(value, numbers) for value in jaxprs.constants_of(jaxpr)]
        inputs = [self._variable(v, numbers) for v in (*body.constvars, *body.invars)]
        equations = [self._equation(eqn, numbers) for eqn in body.eqns]
        results = [self.text(v, numbers) for v in body.outvars]
        return _sha("\n".join([*constants, *inputs, *equations, *results]))

    def text(self, value: Any, numbers: dict[Any, int]) -> str:
        """The text of any value; adds the value's variables to `numbers`."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | enum.Enum():
                return repr(value)
            case core.Literal():
                return f"{value.aval} {self.text(value.val, numbers)}"
            case core.Var():
                return self._variable(value, numbers)
            case core.JaxprEqn():  # of a schedule; the graph's digest covers its parameters
                atoms = [self.text(v, numbers) for v in (*value.invars, *value.outvars)]
                return f"{value.primitive.name} {' '.join(atoms)}"
            case _ if jaxprs.is_jaxpr(value):
                return self.digest_of(value)
            case np.ndarray() | np.generic() | jax.Array():
                data: Any = value
                array = np.asarray(jax.random.key_data(data) if keys.is_key(value.dtype) else data)
                return f"{value.dtype}{list(value.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
            case Mapping():
                items = [(self.text(k, numbers), self.text(v, numbers)) for k, v in value.items()]
                return f"{{{sorted(items)}}}"
            case set() | frozenset():
                return f"{{{sorted(self.text(item, numbers) for item in value)}}}"
            case tuple() | list():
                return f"({','.join(self.text(item, numbers) for item in value)})"
            case functools.partial():
                return self.text((value.func, value.args, value.keywords), numbers)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [self.text(getattr(value, f.name), numbers) for f in dataclasses.fields(value)]
            return f"{type(value).__qualname__}({','.join(fields)})"
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return _ADDRESS.sub("", str(value))

    def _equation(self, eqn: core.JaxprEqn, numbers: dict[Any, int]) -> str:
        # A fragment comes before the fragments inside it, as in the graph.
        mark = FragmentMark.of(eqn)
        if mark is not None:
            self.fragments.setdefault(mark.name, [])
        operands = [self.text(v, numbers) for v in eqn.invars]
        params = [f"{name}={self.text(value, {})}" for name, value in sorted(eqn.params.items())]
        results = [self._variable(v, numbers) for v in eqn.outvars]
        text = " ".join([eqn.primitive.name, *operands, *params, *results])
        if mark is not None:
            self.fragments[mark.name].append(_sha(" ".join(params)))
        return text

    def _variable(self, variable: Any, numbers: dict[Any, int]) -> str:
        return f"{numbers.setdefault(variable, len(numbers))}:{variable.aval}"
