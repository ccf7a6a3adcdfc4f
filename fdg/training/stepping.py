"""Runs iterations one fragment call at a time, and yields the arrays at each border.

    state -> act inputs, act results, step inputs, step results, ..., learn results -> state and metrics

Loops around fragments run in Python. Each fragment is a separate program on the devices of its group, and the
operations between two fragments are further programs. Every array is copied to the host.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from fdg import jaxprs, keys
from fdg.fragment import FragmentMark, fragments_in
from fdg.identity_cache import IdentityCache
from fdg.placing.plans import Plan
from fdg.placing.staleness import DelayedState
from fdg.processes.arrays import put
from fdg.profiling.fragments import on_group
from fdg.profiling.sites import sites
from fdg.running.leaves import unique_names
from fdg.running.xla_options import jit
from fdg.tracing.graph import FDG

Steps = Generator["Border", None, list[Any]]  # evaluates operations: yields borders, returns the results
OLDER = "older"  # prefix of the names of the older parameters in a state with staleness
_CALL_PRIMITIVES = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call",
                    "custom_vjp_call")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Border:
    """The arrays before or after one call of a fragment, or the state before or after an iteration."""

    iteration: int  # the iteration; for a state, the number of completed iterations
    fragment: str  # the fragment; "" for the state
    call: int  # the number of the fragment's call in the iteration, from 1
    parent: str  # the fragment that contains this one; "" at the top level
    side: str  # "input", "result" or "state"
    # arrays by name, random keys as their key data; in a recording, `RecordedArray`s
    arrays: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str, int, str, str]:
        """All fields except the arrays; equal in two programs that run the same calls."""
        return self.iteration, self.fragment, self.call, self.parent, self.side

    def __str__(self) -> str:
        if self.side == "state":
            return "the state" if self.iteration else "the first state"
        return f"{self.side}s of call {self.call} of `{self.fragment}`"


class Stepper:
    """Runs iterations of a graph call by call.

    Without a plan, all fragments run on JAX's first device.
    """

    def __init__(self, graph: FDG, plan: Plan | None = None, devices: Sequence[jax.Device] = ()):
        self._graph, self._plan, self._devices = graph, plan, devices
        self._sites = {} if plan is None else {site.fragment.name: site for site in sites(graph)}
        self._parts: IdentityCache[list[Any]] = IdentityCache()
        self._functions: IdentityCache[Callable[..., list[Any]]] = IdentityCache()
        self._calls: collections.Counter[str] = collections.Counter()
        self._iteration = 0
        self._names = (
            unique_names(_state_names(graph.state)),
            unique_names(f"metrics{path}" for path in _leaf_paths(graph.metrics, "")),
        )
        self.run_iteration = jit(core.jaxpr_as_fun(graph.jaxpr))

    def state(self, iteration: int, leaves: Sequence[Any], metrics: Sequence[Any] = ()) -> Border:
        """The border with the state after `iteration` iterations, and with metrics if they are given."""
        names = [*self._names[0], *self._names[1][: len(metrics)]]
        return Border(iteration, "", 0, "", "state", _arrays_by_name(names, [*leaves, *metrics]))

    def borders(self, start: int, end: int, leaves: Sequence[Any]) -> Iterator[Border]:
        """Yields the state `leaves` of iteration `start`, and all borders of the iterations up to `end`."""
        leaves = [to_host(leaf) for leaf in leaves]
        yield self.state(start, leaves)
        for self._iteration in range(start + 1, end + 1):
            self._calls.clear()
            results = yield from self._run(self._graph.jaxpr, leaves, "")
            leaves = results[: len(leaves)]
            yield self.state(self._iteration, leaves, results[len(leaves) :])

    def _run(self, closed: Any, values: Sequence[Any], parent: str) -> Steps:
        """Evaluates a closed jaxpr inside the fragment `parent` ("" at the top level)."""
        jaxpr = jaxprs.open_jaxpr(closed)
        environment = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*values, *jaxprs.constants_of(closed)),
                         strict=True))  # fmt: skip

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [np.asarray(v.val) if jaxprs.is_literal(v) else environment[v] for v in atoms]

        for eqn, part in self._parts(jaxpr, None, lambda: _split_parts(jaxpr)):
            if eqn is not None:
                results = yield from self._run_equation(eqn, read(eqn.invars), parent)
                environment.update(zip(eqn.outvars, results, strict=True))
            else:
                inputs, outputs, function = part
                environment.update(zip(outputs, map(to_host, function(*read(inputs))), strict=True))
        return read(jaxpr.outvars)

    def _run_equation(self, eqn: core.JaxprEqn, values: list[Any], parent: str) -> Steps:
        """Evaluates an equation that is a call of a fragment or contains such calls."""
        mark = FragmentMark.of(eqn)
        if mark is not None:
            return (yield from self._run_fragment(eqn, mark.name, values, parent))
        bodies = jaxprs.bodies(eqn)

        def run(index: int, operands: Sequence[Any]) -> Steps:
            inputs = [operands[i] for i in bodies[index].operands]
            return self._run(jaxprs.closed_bodies(eqn)[index], inputs, parent)

        match eqn.primitive.name:
            case "cond":
                return (yield from run(min(max(int(values[0]), 0), len(bodies) - 1), values))
            case "while":
                num_constants = len(values) - len(bodies[1].carry)
                constants, carried = values[:num_constants], values[num_constants:]
                while (yield from run(0, [*constants, *carried]))[0]:
                    carried = yield from run(1, [*constants, *carried])
                return carried
            case "scan":
                return (yield from self._run_scan(eqn, bodies[0], values, run))
        return (yield from run(0, values))

    def _run_scan(self, eqn: core.JaxprEqn, body: jaxprs.Body, values: list[Any], run: Callable) -> Steps:
        """Runs the trips of a scan; `run(0, operands)` evaluates its body."""
        trips = range(body.trips)
        operands, rows = list(values), list[list[Any]]()
        results: list[Any] = []
        for trip in reversed(trips) if eqn.params["reverse"] else trips:
            for i in body.sliced:
                operands[i] = to_host(values[i][trip])
            results = yield from run(0, operands)
            for i, k in body.carry:
                operands[i] = results[k]
            rows.append(results)
        if eqn.params["reverse"]:
            rows.reverse()
        carried = {k: i for i, k in body.carry}
        return [
            _stack([results[k] for results in rows], v.aval) if n in body.stacked else operands[carried[k]]
            for n, (k, v) in enumerate(zip(body.results, eqn.outvars, strict=True))
        ]

    def _run_fragment(self, eqn: core.JaxprEqn, name: str, values: list[Any], parent: str) -> Steps:
        (closed,) = jaxprs.closed_bodies(eqn)
        jaxpr = jaxprs.open_jaxpr(closed)
        self._calls[name] += 1
        place = self._iteration, name, self._calls[name], parent
        debug_info = jaxpr.debug_info
        names = _argument_names(debug_info.arg_names, values, "input")
        yield Border(*place, "input", _arrays_by_name(names, values))
        if fragments_in(jaxpr.eqns):
            results = yield from self._run(closed, values, name)
        else:
            function = self._functions(eqn, None, lambda: self._make_program(eqn, name))
            results = [to_host(x) for x in function(*values)]
        names = _argument_names(debug_info.result_paths, results, "result")
        yield Border(*place, "result", _arrays_by_name(names, results))
        return results

    def _make_program(self, eqn: core.JaxprEqn, name: str) -> Callable[..., list[Any]]:
        """The program of a fragment without nested fragments, on the devices of its group."""
        if self._plan is None:
            return jit(lambda *values: jaxprs.bind(eqn, values))
        site = self._sites[name]
        placed, shardings = on_group(self._plan, site, self._plan.group_of(name), self._devices)
        compiled = jit(placed)
        position = {v: i for i, v in enumerate(eqn.invars) if not jaxprs.is_literal(v)}

        def call(*values: Any) -> list[Any]:
            arguments = [
                put(values[position[v]], jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding))  # type: ignore[attr-defined]
                for v, sharding in zip(site.inputs, shardings, strict=True)
            ]
            results = dict(zip(site.outputs, compiled(*arguments), strict=True))
            return [results.get(v) for v in eqn.outvars]

        return call


def to_host(value: Any) -> Any:
    """Copies an array to the host; random keys remain JAX arrays."""
    if value is None:
        return None
    if keys.is_key(value.dtype):
        key_data: Any = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(value))
    return np.asarray(value)


def _split_parts(jaxpr: core.Jaxpr) -> list[Any]:
    """Splits a jaxpr into parts, in order: a pair (equation with fragments, None) for each such equation; for
    the operations between them, (None, (inputs, outputs, jitted function of inputs)).
    """
    parts: list[Any] = []
    last_reader: dict[Any, int] = {v: len(jaxpr.eqns) for v in jaxprs.variables(jaxpr.outvars)}
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        for v in jaxprs.variables(eqn.invars):
            last_reader.setdefault(v, index)  # the last equation that reads it
    indexed_equations = enumerate(jaxpr.eqns)
    for has_fragments, group in itertools.groupby(indexed_equations, lambda pair: _has_fragments(pair[1])):
        pairs = list(group)
        if has_fragments:
            parts += [(eqn, None) for _, eqn in pairs]
            continue
        equations, last_index = [eqn for _, eqn in pairs], pairs[-1][0]
        produced = [v for eqn in equations for v in eqn.outvars]
        outputs = [v for v in produced if last_reader.get(v, -1) > last_index]
        inputs = list(dict.fromkeys(v for eqn in equations for v in jaxprs.variables(eqn.invars)))
        inputs = [v for v in inputs if v not in set(produced)]
        function = core.jaxpr_as_fun(jaxprs.build(inputs, outputs, equations, checked=False))
        parts.append((None, (inputs, outputs, jit(function))))
    return parts


def _has_fragments(eqn: core.JaxprEqn) -> bool:
    """Whether an equation contains fragments and can be run call by call."""
    name = eqn.primitive.name
    return (name in ("scan", "while", "cond") or name in _CALL_PRIMITIVES) and bool(fragments_in([eqn]))


def _stack(rows: Sequence[Any], aval: Any) -> Any:
    if not rows:
        return np.zeros(aval.shape, aval.dtype)
    return jax.numpy.stack(rows) if keys.is_key(aval.dtype) else np.stack(rows)


def _arrays_by_name(names: Sequence[str], values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Arrays by name, without None (unused results); random keys as their key data."""
    pairs = zip(names, values, strict=True)
    return {name: np.asarray(keys.to_data(value)) for name, value in pairs if value is not None}


def _argument_names(names: Any, values: Sequence[Any], prefix: str) -> list[str]:
    """The argument names that JAX recorded while tracing; numbers if a name is missing."""
    names = list(names or ()) if not callable(names) else []
    if len(names) != len(values) or not all(isinstance(name, str) and name for name in names):
        names = [f"{prefix} {i}" for i in range(len(values))]
    return unique_names(names)


def _state_names(state: Any) -> list[str]:
    """Names of a state's arrays; staleness does not change the names of the algorithm's arrays."""
    names = _leaf_paths(state)
    if not isinstance(state, DelayedState):
        return names
    prefix = "state.state"
    return [
        f"state{name.removeprefix(prefix)}"
        if name.startswith(prefix)
        else name.replace("state.history", OLDER)
        for name in names
    ]


def _leaf_paths(tree: Any, prefix: str = "state") -> list[str]:
    return [prefix + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
