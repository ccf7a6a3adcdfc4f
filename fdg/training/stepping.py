"""Runs iterations one fragment call at a time, with access to the arrays at each border.

    state -> act inputs, act results, step inputs, step results, ..., learn results -> state and metrics

Loops around fragments run in Python. Each fragment is a separate program on the devices of its group, and so
are the operations between two fragments. Every array is copied to the host.
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
from fdg.processes.arrays import put
from fdg.profiling.fragments import on_group
from fdg.profiling.sites import sites
from fdg.running.leaves import unique_names
from fdg.running.xla_options import xla_options
from fdg.tracing.graph import FDG

Steps = Generator["Border", None, list[Any]]
_CALLS = frozenset("jit pjit closed_call core_call checkpoint remat2 custom_jvp_call custom_vjp_call".split())


@dataclasses.dataclass(frozen=True)
class Border:
    """The arrays before or after one call of a fragment, or the state around an iteration."""

    iteration: int  # the iteration; for a state, the completed iterations
    fragment: str  # the fragment; "" for the state
    call: int  # the call of the fragment in the iteration, from 1
    inside: str  # the fragment that contains this one; "" at the top level
    side: str  # "input", "result" or "state"
    # arrays by name, random keys as their words; in a recording, their descriptions
    arrays: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str, int, str, str]:
        """All fields but the arrays: equal if two programs run the same calls."""
        return self.iteration, self.fragment, self.call, self.inside, self.side


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
            unique_names(_paths(graph.state)),
            unique_names(f"metrics{path}" for path in _paths(graph.metrics, "")),
        )
        self.whole = _compiled(core.jaxpr_as_fun(graph.jaxpr))

    def state(self, iteration: int, leaves: Sequence[Any], metrics: Sequence[Any] = ()) -> Border:
        """The border of a state after `iteration` iterations."""
        names = [*self._names[0], *self._names[1][: len(metrics)]]
        return Border(iteration, "", 0, "", "state", _described(names, [*leaves, *metrics]))

    def borders(self, iteration: int, leaves: Sequence[Any]) -> Iterator[Border]:
        """An endless iterator over the borders from a state on; the state itself is first."""
        leaves = [host(leaf) for leaf in leaves]
        yield self.state(iteration, leaves)
        for self._iteration in itertools.count(iteration + 1):
            self._calls.clear()
            results = yield from self._run(self._graph.jaxpr, leaves, "")
            leaves = results[: len(leaves)]
            yield self.state(self._iteration, leaves, results[len(leaves) :])

    def _run(self, closed: Any, values: Sequence[Any], inside: str) -> Steps:
        jaxpr = jaxprs.open_jaxpr(closed)
        known = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*values, *jaxprs.constants_of(closed)),
                         strict=True))  # fmt: skip

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [np.asarray(v.val) if jaxprs.is_literal(v) else known[v] for v in atoms]

        for eqn, part in self._parts(jaxpr, None, lambda: _parts(jaxpr)):
            if eqn is not None:
                results = yield from self._equation(eqn, read(eqn.invars), inside)
                known.update(zip(eqn.outvars, results, strict=True))
            else:
                inputs, outputs, function = part
                known.update(zip(outputs, map(host, function(*read(inputs))), strict=True))
        return read(jaxpr.outvars)

    def _equation(self, eqn: core.JaxprEqn, values: list[Any], inside: str) -> Steps:
        """Evaluates an equation that is a fragment call or contains some."""
        mark = FragmentMark.of(eqn)
        if mark is not None:
            return (yield from self._fragment(eqn, mark.name, values, inside))
        inner = jaxprs.bodies(eqn)

        def run(which: int, operands: Sequence[Any]) -> Steps:
            given = [operands[i] for i in inner[which].operands]
            return self._run(jaxprs.closed_bodies(eqn)[which], given, inside)

        match eqn.primitive.name:
            case "cond":
                return (yield from run(min(max(int(values[0]), 0), len(inner) - 1), values))
            case "while":
                first = len(values) - len(inner[1].carry)
                constants, carried = values[:first], values[first:]
                while (yield from run(0, [*constants, *carried]))[0]:
                    carried = yield from run(1, [*constants, *carried])
                return carried
            case "scan":
                return (yield from self._scan(eqn, inner[0], values, run))
        return (yield from run(0, values))

    def _scan(self, eqn: core.JaxprEqn, body: jaxprs.Body, values: list[Any], run: Callable) -> Steps:
        trips = range(body.trips)
        given, made = list(values), list[list[Any]]()
        results: list[Any] = []
        for trip in reversed(trips) if eqn.params["reverse"] else trips:
            for i in body.sliced:
                given[i] = host(values[i][trip])
            results = yield from run(0, given)
            for i, k in body.carry:
                given[i] = results[k]
            made.append(results)
        if eqn.params["reverse"]:
            made.reverse()
        carried = {k: i for i, k in body.carry}
        return [
            _stacked([results[k] for results in made], v.aval) if n in body.stacked else given[carried[k]]
            for n, (k, v) in enumerate(zip(body.results, eqn.outvars, strict=True))
        ]

    def _fragment(self, eqn: core.JaxprEqn, name: str, values: list[Any], inside: str) -> Steps:
        (closed,) = jaxprs.closed_bodies(eqn)
        jaxpr = jaxprs.open_jaxpr(closed)
        self._calls[name] += 1
        place = self._iteration, name, self._calls[name], inside
        origin = jaxpr.debug_info
        yield Border(*place, "input", _described(_argument_names(origin.arg_names, values, "input"), values))
        if fragments_in(jaxpr.eqns):
            results = yield from self._run(closed, values, name)
        else:
            function = self._functions(eqn, None, lambda: self._alone(eqn, name))
            results = [host(x) for x in function(*values)]
        yield Border(
            *place, "result", _described(_argument_names(origin.result_paths, results, "result"), results)
        )
        return results

    def _alone(self, eqn: core.JaxprEqn, name: str) -> Callable[..., list[Any]]:
        """Runs a fragment without nested ones on its group's devices."""
        if self._plan is None:
            return _compiled(lambda *values: jaxprs.bind(eqn, values))
        site = self._sites[name]
        placed, shardings = on_group(self._plan, site, self._plan.group_of(name), self._devices)
        compiled = _compiled(placed)
        position = {v: i for i, v in enumerate(eqn.invars) if not jaxprs.is_literal(v)}

        def call(*values: Any) -> list[Any]:
            given = [
                put(values[position[v]], jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding))  # type: ignore[attr-defined]
                for v, sharding in zip(site.inputs, shardings, strict=True)
            ]
            found = dict(zip(site.outputs, compiled(*given), strict=True))
            return [found.get(v) for v in eqn.outvars]

        return call


def host(value: Any) -> Any:
    """Copies an array to the host; random keys stay JAX arrays."""
    if value is None:
        return None
    if keys.is_key(value.dtype):
        words: Any = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return np.asarray(value)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with the engine's XLA options."""
    return jax.jit(function, compiler_options=xla_options(jax.default_backend()))


def _parts(jaxpr: core.Jaxpr) -> list[Any]:
    """Splits a jaxpr in order: (equation with fragments, None), or (None, operations up to the next one)."""
    parts: list[Any] = []
    read_by: dict[Any, int] = {v: len(jaxpr.eqns) for v in jaxprs.variables(jaxpr.outvars)}
    for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
        for v in jaxprs.variables(eqn.invars):
            read_by.setdefault(v, number)  # the last one that reads it
    numbered = enumerate(jaxpr.eqns)
    for is_apart, group in itertools.groupby(numbered, lambda each: _has_fragments(each[1])):
        found = list(group)
        if is_apart:
            parts += [(eqn, None) for _, eqn in found]
            continue
        equations, last = [eqn for _, eqn in found], found[-1][0]
        made = [v for eqn in equations for v in eqn.outvars]
        outputs = [v for v in made if read_by.get(v, -1) > last]
        inputs = list(dict.fromkeys(v for eqn in equations for v in jaxprs.variables(eqn.invars)))
        inputs = [v for v in inputs if v not in set(made)]
        function = core.jaxpr_as_fun(jaxprs.build(inputs, outputs, equations, checked=False))
        parts.append((None, (inputs, outputs, _compiled(function))))
    return parts


def _has_fragments(eqn: core.JaxprEqn) -> bool:
    """Whether an equation contains fragments and can be stepped into."""
    name = eqn.primitive.name
    return (name in ("scan", "while", "cond") or name in _CALLS) and bool(fragments_in([eqn]))


def _stacked(rows: Sequence[Any], aval: Any) -> Any:
    if not rows:
        return np.zeros(aval.shape, aval.dtype)
    return jax.numpy.stack(rows) if keys.is_key(aval.dtype) else np.stack(rows)


def _described(names: Sequence[str], values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Arrays by name, without unused results."""
    found = zip(names, values, strict=True)
    return {name: np.asarray(keys.words(value)) for name, value in found if value is not None}


def _argument_names(known: Any, values: Sequence[Any], word: str) -> list[str]:
    """The argument names that JAX recorded in tracing, or positions if a name is missing."""
    known = list(known or ()) if not callable(known) else []
    if len(known) != len(values) or not all(isinstance(name, str) and name for name in known):
        known = [f"{word} {i}" for i in range(len(values))]
    return unique_names(known)


def _paths(tree: Any, prefix: str = "state") -> list[str]:
    return [prefix + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
