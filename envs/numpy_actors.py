"""Actors for workers that act without JAX: an actor's jaxpr, cut in two.

What depends on the observation becomes a program for NumPy (`numpy_program`), which workers run. The training
program evaluates everything else for all steps of a segment, and sends what the workers' part reads: arrays
that depend on keys (noise), for each step and row; and arrays that do not (parameters), once.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from envs.numpy_operations import UnsupportedError
from envs.numpy_program import Equation, NumpyProgram, Runner
from envs.pools import ActorInputs
from envs.satellites import Act, Program, TracedActor, unequal_constants
from fdg import jaxprs
from fdg.errors import FdgError
from fdg.keys import draws_depend_on_batch


def trace(
    name: str, act: Act, argument_shapes: Callable[[int], Any], rows_per_worker: Sequence[int]
) -> tuple[TracedActor, list[jax.Array]]:
    """`satellites.trace` for workers that act with NumPy.

    Raises:
      FdgError: NumPy cannot run the part that depends on the observation, or that part reads an array that
        depends on keys and does not have the rows as its first axis.
    """
    size = sum(rows_per_worker)
    closed, extras = jax.make_jaxpr(act, return_shape=True)(*argument_shapes(size))
    flat, operands = _flat(closed)
    flats = {size: flat}
    for rows in {size + 1, *rows_per_worker} - {size}:
        flats[rows], _ = _flat(jax.make_jaxpr(act)(*argument_shapes(rows)))
    cut = _Cut(name, flats[size], flats[size + 1])
    programs = {rows: cut.program(flats[rows]) for rows in set(rows_per_worker)}
    try:
        for program in programs.values():
            Runner(program)
    except UnsupportedError as error:
        raise _refusal(name, f"run the operation {error}") from None
    serialized = {rows: program.serialized() for rows, program in programs.items()}
    return TracedActor(Program.of(serialized), extras[1], cut.inputs), operands


def _flat(closed: Any) -> tuple[core.Jaxpr, list[jax.Array]]:
    """The open jaxpr with all calls inlined, and without dead code and identities; and its constants."""
    constants = dict(zip(jaxprs.open_jaxpr(closed).constvars, jaxprs.constants_of(closed), strict=True))

    def body_of(eqn: core.JaxprEqn) -> core.Jaxpr | None:
        inner = jaxprs.closed_bodies(eqn)
        if not inner or eqn.primitive.name in ("scan", "while", "cond", "custom_linear_solve"):
            return None
        body = jaxprs.open_jaxpr(inner[0])
        constants.update(zip(body.constvars, jaxprs.constants_of(inner[0]), strict=True))
        return body

    inlined: Any = jaxprs.inline(jaxprs.open_jaxpr(closed), body_of)
    live = jaxprs.open_jaxpr(jaxprs.without_dead_code(inlined))
    names: dict[Any, Any] = {}
    equations = []
    for eqn in live.eqns:
        operands = jaxprs.renamed(eqn.invars, names)
        if jaxprs.is_identity(eqn):
            names.update(zip(eqn.outvars, operands, strict=True))
        else:
            equations.append(eqn.replace(invars=operands))
    outputs = jaxprs.renamed(live.outvars, names)
    values = list(constants.values())
    flat = jaxprs.build(live.invars, outputs, equations, list(constants), values, checked=False)
    return jaxprs.open_jaxpr(flat), values


class _Cut:
    """The cut of an actor's jaxpr, found by comparing the jaxprs for B and for B + 1 rows.

    Other jaxprs of this actor, for other numbers of rows, are cut at the same equations.
    """

    def __init__(self, name: str, jaxpr: Any, larger: Any):
        self._name, self._jaxpr = name, jaxpr
        self._require_same_operations(larger)
        rows, keys = jaxpr.invars
        from_rows, from_keys = _dependent(jaxpr, rows), _dependent(jaxpr, keys)
        with_rows = {
            v: w.aval.shape
            for v, w in zip(_variables(jaxpr), _variables(larger), strict=True)
            if v.aval.shape != w.aval.shape
        }
        producers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._from_rows = from_rows
        self._equations = {  # of the workers' part
            i for i, eqn in enumerate(jaxpr.eqns) if not from_rows.isdisjoint(jaxprs.variables(eqn.invars))
        }
        crossing: set[Any] = set()
        pending = [*jaxpr.outvars, *(v for i in self._equations for v in jaxpr.eqns[i].invars)]
        for v in pending:  # grows
            if jaxprs.is_literal(v) or v in from_rows or v in crossing:
                continue
            if v in producers and v in with_rows and _repeats(jaxpr.eqns[producers[v]], with_rows):
                self._equations.add(producers[v])
                pending += jaxpr.eqns[producers[v]].invars
            else:
                crossing.add(v)
        in_order = [v for v in _variables(jaxpr) if v in crossing]
        self._per_step = [v for v in in_order if v in from_keys or v in with_rows]
        self._fixed = [v for v in in_order if v not in self._per_step]
        for v in self._per_step:
            shape, other = v.aval.shape, with_rows.get(v, ())
            if not shape or other != (shape[0] + 1, *shape[1:]):
                raise _refusal(
                    name,
                    f"use an array of shape {shape} that depends on random keys or on the number of"
                    " environments, which is not its first axis",
                )

    def program(self, jaxpr: Any) -> NumpyProgram:
        """The workers' part of this actor's jaxpr for some number of rows."""
        self._require_same_operations(jaxpr)
        counterpart = dict(zip(_variables(self._jaxpr), _variables(jaxpr), strict=True))
        inputs = [jaxpr.invars[0], *(counterpart[v] for v in (*self._per_step, *self._fixed))]
        equations = [jaxpr.eqns[i] for i in sorted(self._equations)]
        atoms_read = [*jaxpr.outvars, *(atom for eqn in equations for atom in eqn.invars)]
        literals = {id(v): np.asarray(v.val, v.aval.dtype) for v in atoms_read if jaxprs.is_literal(v)}
        results = [v for eqn in equations for v in eqn.outvars]
        number_of: dict[Any, int] = {v: i for i, v in enumerate([*inputs, *literals, *results])}

        def numbers(atoms: Sequence[Any]) -> tuple[int, ...]:
            return tuple(number_of[id(atom) if jaxprs.is_literal(atom) else atom] for atom in atoms)

        return NumpyProgram(
            len(self._per_step),
            len(self._fixed),
            list(literals.values()),
            [
                Equation(self._operation(eqn), _plain(eqn.params), numbers(eqn.invars), numbers(eqn.outvars))
                for eqn in equations
            ],
            numbers(jaxpr.outvars),
        )

    def inputs(self, operands: list[jax.Array], key_data: jax.Array) -> ActorInputs[jax.Array]:
        """What the workers' part reads, for key data `[T, B, k]`; evaluated in the training program."""
        draws_whole_batch = any(map(draws_depend_on_batch, jaxprs.walk(self._jaxpr.eqns)))
        over_time = jax.lax.map if draws_whole_batch else lambda f, x: jax.vmap(f)(x)
        of_step = self._evaluate(self._per_step)
        fixed = self._evaluate(self._fixed)(*operands, key_data[0])  # does not read the keys
        return ActorInputs(fixed, over_time(lambda keys: of_step(*operands, keys), key_data))

    def _evaluate(self, results: list[Any]) -> Callable[..., list[jax.Array]]:
        """A function of the actor's constants and keys that computes `results`, which read no observation."""
        equations = [
            eqn for eqn in self._jaxpr.eqns if self._from_rows.isdisjoint(jaxprs.variables(eqn.invars))
        ]
        inputs = [*self._jaxpr.constvars, self._jaxpr.invars[1]]
        return core.jaxpr_as_fun(jaxprs.without_dead_code(jaxprs.build(inputs, results, equations)))

    def _require_same_operations(self, other: core.Jaxpr) -> None:
        """Raises unless another number of rows gives the same equations, constants and dtypes."""
        both = self._jaxpr, other
        if [v.aval for v in self._jaxpr.constvars] != [v.aval for v in other.constvars]:
            raise unequal_constants(self._name)
        names, others = ([eqn.primitive.name for eqn in jaxpr.eqns] for jaxpr in both)
        if names != others:
            raise _refusal(self._name, "run an actor whose operations depend on the number of environments")

    def _operation(self, eqn: Any) -> str:
        """The name of an operation; raises if NumPy lacks one of its dtypes."""
        for v in (*eqn.invars, *eqn.outvars):
            if getattr(v.aval.dtype, "kind", "V") == "V":  # bfloat16, or a random key
                raise _refusal(self._name, f"run {eqn.primitive.name} in {v.aval.dtype}")
        return eqn.primitive.name


def _refusal(name: str, what: str) -> FdgError:
    return FdgError(
        f"environment '{name}': acts=True: workers with NumPy cannot {what}: leave out acts=True, or write"
        f" ray:{name}?acts=True, whose workers have JAX"
    )


def _variables(jaxpr: core.Jaxpr) -> list[Any]:
    """All variables, in an order that is the same for jaxprs with the same operations."""
    return [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _dependent(jaxpr: core.Jaxpr, source: Any) -> set[Any]:
    """The variables that depend on `source`, and itself."""
    dependent = {source}
    for eqn in jaxpr.eqns:
        if not dependent.isdisjoint(jaxprs.variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent


def _repeats(eqn: core.JaxprEqn, with_rows: Collection[Any]) -> bool:
    """Whether an equation repeats one row, which is then all that workers need."""
    operands = jaxprs.variables(eqn.invars)
    return eqn.primitive.name == "broadcast_in_dim" and all(v not in with_rows for v in operands)


def _plain(value: Any) -> Any:
    """A parameter of an operation as plain data; other objects, such as shardings, become None."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):  # dimension numbers
        return _plain(value._asdict())
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, bool | int | float | str) else None
