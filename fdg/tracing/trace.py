"""`trace`: an algorithm's dataflow graph, read from the jaxpr of one training iteration."""

import collections
import dataclasses
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.batch import follow as batch_flow
from fdg.errors import GraphError
from fdg.fragment import FragmentMark, boundary_p
from fdg.tracing.graph import FDG, Array, Edge, Fragment, check


def trace(algorithm: Any) -> FDG:
    """Traces one training iteration of an algorithm to its dataflow graph.

    No array is allocated and nothing is compiled, whatever the algorithm's size.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`.

    Raises:
      GraphError: `iterate` changes the structure, a shape or a dtype of the state, its metrics are
        not a flat dict of scalars, or a fragment declares a batch axis that its arrays do not have.
    """
    name = type(algorithm).__name__
    for method in ("init", "iterate"):
        if not callable(getattr(algorithm, method, None)):
            raise GraphError(
                f"{name} has no method {method}: an algorithm has init(key) -> state and "
                f"iterate(state) -> (state, metrics)"
            )
    state = abstract_state(algorithm)
    leaves, structure = jax.tree.flatten(state)
    output: list[Any] = []

    def iterate(*leaves):
        result = algorithm.iterate(jax.tree.unflatten(structure, leaves))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise GraphError(f"{name}.iterate returned {type(result).__name__}: return (state, metrics)")
        _check_metrics(name, result[1])
        new_state, metrics = jax.tree.map(jax.numpy.asarray, result)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (new_state, metrics))
        _check_fixed_point(name, state, shapes[0])
        output.append(shapes)
        # A leaf may come back weakly typed (x * 2.0); the state's own type is the one that stays.
        strong = [jax.lax.convert_element_type(n, o.dtype) if not keys.is_key(o.dtype) else n
                  for n, o in zip(jax.tree.leaves(new_state), leaves, strict=True)]  # fmt: skip
        return *strong, *jax.tree.leaves(metrics)

    jaxpr = jax.make_jaxpr(iterate)(*leaves)
    core.check_jaxpr(jaxprs.open_jaxpr(jaxpr))
    graph = read_graph(name, jaxpr, state, output[0][1])
    return dataclasses.replace(graph, parameter_rules=_declared_rules(algorithm))


def _declared_rules(algorithm: Any) -> Any:
    """The rules for sharded parameters that stand beside an algorithm or its network."""
    own = getattr(algorithm, "parameter_rules", None)
    return own or getattr(getattr(algorithm, "network", None), "parameter_rules", None)


def read_graph(name: str, jaxpr: Any, state: Any, metrics: Any) -> FDG:
    """The graph of a closed jaxpr that takes the state's leaves, and returns them and the metrics' leaves."""
    num_leaves = len(jax.tree.leaves(state))
    fragments, edges, axes = _Reader(jaxprs.open_jaxpr(jaxpr), num_leaves).read()
    graph = FDG(name, fragments, edges, _carried_axes(jaxpr, axes), jaxpr, state, metrics)
    check(graph)
    return graph


def _carried_axes(jaxpr: Any, axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Batch axes of the state's leaves; one that no fragment reads has the axis that it comes back with."""
    for _ in range(len(axes) + 1):
        ends = batch_flow.axes(jaxpr, axes)
        later = tuple(end if axis is None else axis for axis, end in zip(axes, ends, strict=False))
        if later == axes:
            break
        axes = later
    return axes


def abstract_state(algorithm: Any) -> Any:
    """The state's pytree as strongly typed `jax.ShapeDtypeStruct`."""
    shapes = jax.eval_shape(lambda: algorithm.init(jax.random.key(0)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def _check_fixed_point(name: str, before: Any, after: Any) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):  # type: ignore[operator]
        raise GraphError(
            f"{name}.iterate returns a state of another structure than init: "
            f"{jax.tree.structure(after)}, not {jax.tree.structure(before)}: keep every field"
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise GraphError(
                f"{name}.iterate changes state{jax.tree_util.keystr(path)} from {old.dtype}{list(old.shape)} "
                f"to {new.dtype}{list(new.shape)}: return the shape and dtype that init gives"
            )


def _check_metrics(name: str, metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise GraphError(
            f"{name}.iterate returns metrics of type {type(metrics).__name__}: return a flat dict"
        )
    for key, value in metrics.items():
        if isinstance(value, dict | list | tuple) or jax.numpy.ndim(value) != 0:
            found = f"shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise GraphError(
                f"{name}.iterate returns metric '{key}' as {found}: metrics are scalars in a flat dict, "
                f"so reduce it (say, with jnp.mean)"
            )


@dataclasses.dataclass
class _Scope:
    """A jaxpr at one place of the program.

    `calls` is how often it runs in an iteration; `node` the fragment whose body it is (or is inside of).
    """

    jaxpr: core.Jaxpr
    calls: int
    exact: bool = True
    node: int | None = None
    parent: "_Scope | None" = None
    eqn: Any = None  # core.JaxprEqn; None at the top
    body: Any = None  # jaxprs.Body

    def __post_init__(self):
        self.producer = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self.position = {v: i for i, v in enumerate(self.jaxpr.invars)}
        self.inner: dict[int, list[_Scope]] = {}  # by id of the equation
        self.nodes: dict[int, int] = {}  # fragment called by an equation, by the equation's id


class _Reader:
    """Reads fragments and the flow between them; the jaxpr's first outputs are its inputs' next values."""

    def __init__(self, jaxpr: core.Jaxpr, num_state: int):
        self.top = _Scope(jaxpr, 1)
        self.num_state = num_state
        self.sites: list[tuple[FragmentMark, core.JaxprEqn, _Scope, _Scope]] = []
        self.value_numbers: dict[tuple[int, core.Var], int] = {}
        self._find(self.top)

    def read(self) -> tuple[tuple[Fragment, ...], tuple[Edge, ...], tuple[int | None, ...]]:
        used: collections.Counter[str] = collections.Counter()
        names = []
        for mark, *_ in self.sites:
            used[mark.name] += 1
            names.append(mark.name if used[mark.name] == 1 else f"{mark.name}.{used[mark.name]}")
        fragments = tuple(self._fragment(i, names) for i in range(len(self.sites)))
        edges = tuple(self._edges(names))
        axes = tuple(self._axis_of(self.top, v) for v in self.top.jaxpr.invars[: self.num_state])
        return fragments, edges, axes

    def _find(self, scope: _Scope) -> None:
        for eqn in scope.jaxpr.eqns:
            mark = FragmentMark.of(eqn)
            node = scope.node
            if mark is not None:
                node = scope.nodes[id(eqn)] = len(self.sites)
                self.sites.append((mark, eqn, scope, scope))  # the second scope is replaced just below
            for body in jaxprs.bodies(eqn):
                exact = scope.exact and body.exact
                inner = _Scope(body.jaxpr, scope.calls * body.trips, exact, node, scope, eqn, body)
                scope.inner.setdefault(id(eqn), []).append(inner)
                if mark is not None and node is not None:
                    self.sites[node] = (mark, eqn, scope, inner)
                self._find(inner)

    # --- nodes ---

    def _number(self, scope: _Scope, var: core.Var) -> int:
        return self.value_numbers.setdefault((id(scope), var), len(self.value_numbers))

    def _fragment(self, index: int, names: list[str]) -> Fragment:
        mark, eqn, outside, inside = self.sites[index]
        marks_in = {e.invars[0]: e.params["axis"] for e in inside.jaxpr.eqns if e.primitive is boundary_p}
        marks_out = {e.outvars[0]: e.params["axis"] for e in inside.jaxpr.eqns if e.primitive is boundary_p}

        def array(outer, inner, marks):
            aval = inner.aval
            axis = None if isinstance(inner, core.Literal) else marks.get(inner)
            number = -1 if isinstance(outer, core.Literal) else self._number(outside, outer)
            return Array(number, tuple(aval.shape), str(aval.dtype), jaxprs.bytes_of(aval), axis)

        inputs = [array(o, i, marks_in) for o, i in zip(eqn.invars, inside.jaxpr.invars, strict=True)]
        outputs = [array(o, i, marks_out) for o, i in zip(eqn.outvars, inside.jaxpr.outvars, strict=True)]
        parent = outside.node
        return Fragment(
            name=names[index],
            role=mark.role,
            parent=None if parent is None else names[parent],
            calls_per_iteration=outside.calls,
            calls_exact=outside.exact,
            flops_per_call=jaxprs.flops_of(inside.jaxpr),
            bytes_per_call=sum(a.bytes for a in (*inputs, *outputs)),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )

    # --- edges ---

    def _edges(self, names: list[str]):
        grouped: dict[tuple, list[tuple[int, int]]] = {}
        for target, (_, eqn, scope, _) in enumerate(self.sites):
            arrivals: dict[tuple[int, int], tuple[int, str, int]] = {}
            for var in {v for v in eqn.invars if not isinstance(v, core.Literal)}:
                for source, value, size, crossings, delay in self._sources(scope, var):
                    key, way = (source, value), (crossings, delay, size)
                    # One value may come in several ways (each step, and from the last iteration to the
                    # first step): the most frequent one counts, then the least delayed.
                    if key not in arrivals or _urgency(way) > _urgency(arrivals[key]):
                        arrivals[key] = way
            for (source, value), (crossings, delay, size) in arrivals.items():
                grouped.setdefault((source, target, crossings, delay), []).append((value, size))
        for (source, target, crossings, delay), values in sorted(grouped.items()):
            numbers, sizes = zip(*sorted(values), strict=True)
            yield Edge(names[source], names[target], numbers, sum(sizes), crossings, delay)

    def _sources(self, scope: _Scope, var: core.Var):
        """Fragments whose outputs reach `var` of `scope` through code between fragments.

        Yields (source, value number, bytes, crossings, delay). What crosses is the source's own output,
        since code between fragments lives with its consumer; it crosses once each time the outermost
        jaxpr on its way runs, the trips of a finished loop stacked together.
        """
        around = {id(s) for s in _ancestors(scope)}  # in these, a carry comes from an earlier trip
        work: list[tuple[_Scope, Any, int, tuple[int, ...], str]] = [(scope, var, scope.calls, (1,), "")]
        seen = set()
        while work:
            here, v, crossings, copies, delay = item = work.pop()
            if isinstance(v, core.Literal) or (id(here), *item[1:]) in seen:
                continue
            seen.add((id(here), *item[1:]))
            if v in here.producer:
                eqn = here.producer[v]
                index = eqn.outvars.index(v)
                if id(eqn) in here.nodes:
                    size = jaxprs.bytes_of(v.aval) * copies[-1]
                    yield here.nodes[id(eqn)], self._number(here, v), size, crossings, delay
                elif id(eqn) in here.inner:
                    for inner in here.inner[id(eqn)]:
                        if inner.body.results:
                            result = inner.jaxpr.outvars[inner.body.results[index]]
                            times = inner.body.trips if index in inner.body.stacked else 1
                            work.append((inner, result, crossings, (*copies, copies[-1] * times), delay))
                else:
                    work += [(here, operand, crossings, copies, delay) for operand in eqn.invars]
            elif v in here.position:
                position = here.position[v]
                if here.parent is None:
                    if position < self.num_state:
                        work.append((here, here.jaxpr.outvars[position], crossings, copies, "iteration"))
                    continue
                if here.node != here.parent.node:
                    continue  # an input of the surrounding fragment: its own edges tell where it comes from
                for carried, previous in here.body.carry:
                    if carried == position:
                        late = delay or ("step" if id(here) in around else "")
                        work.append((here, here.jaxpr.outvars[previous], crossings, copies, late))
                outer = here.eqn.invars[here.body.operands[position]]
                outside = copies[:-1] if len(copies) > 1 else copies
                work.append((here.parent, outer, min(crossings, here.parent.calls), outside, delay))

    # --- batch axes of the state ---

    def _axis_of(self, scope: _Scope, var: core.Var) -> int | None:
        """The batch axis that the first fragment to read `var` declares; loops and calls are looked into."""
        for eqn in scope.jaxpr.eqns:
            for position, operand in enumerate(eqn.invars):
                if operand is not var:
                    continue
                if eqn.primitive is boundary_p and eqn.params["axis"] is not None:
                    return eqn.params["axis"]
                for inner in scope.inner.get(id(eqn), []):
                    if position not in inner.body.operands:
                        continue
                    at = inner.body.operands.index(position)
                    axis = self._axis_of(inner, inner.jaxpr.invars[at])
                    if axis is not None:
                        return axis + 1 if at in inner.body.sliced else axis
        return None


def _ancestors(scope: _Scope | None) -> list[_Scope]:
    return [] if scope is None else [scope, *_ancestors(scope.parent)]


def _urgency(way: tuple[int, str, int]) -> tuple[int, int, int]:
    crossings, delay, size = way
    return crossings, -["", "step", "iteration"].index(delay), size
