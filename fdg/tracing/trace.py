"""`trace`: reads an algorithm's dataflow graph from the jaxpr of one training iteration."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs, keys
from fdg.agents import Agents, checked_name, iterate_all
from fdg.arguments import checked_names
from fdg.batch.state_axes import state_axes
from fdg.errors import GraphError, kind_of
from fdg.fragment import FragmentMark, forget_traces, fragment
from fdg.identity_cache import IdentityCache
from fdg.jax_internals import ClosedJaxpr, check_jax_settings
from fdg.tracing.graph import FDG
from fdg.tracing.mistakes import check_arrays, explained, is_array
from fdg.tracing.reader import Reader
from fdg.tracing.same_draws import warn_of_same_draws
from fdg.tracing.unchanged import check_unchanged


def weak_types(tree: Any) -> list[bool]:
    """Whether each leaf is weakly typed."""
    return [bool(getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(tree)]


def with_weakness(tree: Any, weak: list[bool]) -> Any:
    """Shapes and dtypes of a pytree, with the weak types `weak`."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, weak, strict=True)
    typed = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak) for leaf, is_weak in pairs]
    return jax.tree.unflatten(structure, typed)


def computes_alike(a: Any, b: Any) -> bool:
    """Whether two traces of a function compute in the same dtypes, apart from no-op conversions.

    JAX computes `x * n` in the dtype of `x` if `n` is weakly typed. One program serves all iterations, so if
    a leaf of the state is weakly typed only in some iterations, both traces must compute in the same dtypes.
    Weak types matter only in dtype promotion, so it is enough to compare operations and dtypes.
    """
    return collections.Counter(_operations(a)) == collections.Counter(_operations(b))


def _operations(jaxpr: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each operation at any depth, with the dtypes of its operands and results."""
    eqn: Any
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        dtypes = tuple(str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars, *eqn.outvars))
        if eqn.primitive.name != "convert_element_type" or len(set(dtypes)) > 1:
            yield eqn.primitive.name, dtypes
        for body in jaxprs.bodies(eqn):
            yield from _operations(body.jaxpr)


def name_fragments(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Numbers fragments of the same name: `act`, `act.2`, `act.3`, in program order.

    The mark of a fragment then identifies it (`FragmentMark.of(eqn).name`). A jaxpr with unique names is
    returned unchanged.
    """
    counts: collections.Counter[str] = collections.Counter()

    def unique_name(name: str) -> str:
        counts[name] += 1
        return name if counts[name] == 1 else unique_name(f"{name}.{counts[name]}")

    def name_block(block: core.Jaxpr, context: Any, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        for eqn in block.eqns:
            mark = FragmentMark.of(eqn)
            if mark is not None and (name := unique_name(mark.name)) != mark.name:
                eqn = eqn.replace(params={**eqn.params, "name": str(FragmentMark(mark.role, name))})
            yield inside(eqn, context=object())  # each call of a body has its own fragment names

    return jaxprs.rewrite_blocks(jaxpr, name_block)


WHOLE_ITERATION = "iteration"  # the role of an iteration without fragments


@checked_names
def trace(algorithm: Any) -> FDG:
    """Traces one training iteration of an algorithm to its dataflow graph.

    Allocates no array and compiles nothing. An iteration without fragments is one fragment, of the role
    `iteration`.

    Args:
      algorithm: any object with `init(key) -> state` and `iterate(state) -> (state, metrics)`. Its optional
        `check_when_traced(state)` is called with the state's shapes and may raise. For several agents
        (`fdg.agents`), the graph describes one agent.

    Raises:
      GraphError: `iterate` changes the structure, a shape or a dtype of the state; a leaf of state or metrics
        is not an array; metrics are not a flat dict of scalars; Python code needs the number of a traced
        value; a fragment declares a batch axis that its arrays lack; or JAX_SCAN3 or JAX_DISABLE_JIT is set.
    """
    check_jax_settings()
    if isinstance(algorithm, Agents):
        return side_by_side(trace(algorithm.algorithm), algorithm.count)
    forget_traces()
    name = checked_name(algorithm)
    state = abstract_state(algorithm)
    if hasattr(algorithm, "check_when_traced"):
        with explained(name), check_unchanged(algorithm, name, warns=False):
            algorithm.check_when_traced(state)
    leaves, structure = jax.tree.flatten(state)
    output_shapes: list[Any] = []  # of each trace
    returned_weak: list[bool] = []  # for each leaf, whether the last trace returned it weakly typed

    def iterate(*leaves):
        result = algorithm.iterate(jax.tree.unflatten(structure, leaves))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise GraphError(f"{name}.iterate returned {kind_of(result)}: return (state, metrics)")
        _check_metrics(name, result[1])
        check_arrays(f"{name}.iterate", result[0])
        new_state, metrics = jax.tree.map(jax.numpy.asarray, result)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (new_state, metrics))
        _check_fixed_point(name, state, shapes[0])
        output_shapes.append(shapes)
        returned_weak[:] = weak_types(new_state)
        # Outputs are strongly typed; the next iteration gets weak types from `returned_weak`.
        typed = [jax.lax.convert_element_type(new, old.dtype) if not keys.is_key(old.dtype) else new
                  for new, old in zip(jax.tree.leaves(new_state), leaves, strict=True)]  # fmt: skip
        return *typed, *jax.tree.leaves(metrics)

    def jaxpr_of(function: Any, weak: list[bool]) -> Any:
        function_name, is_first = f"{name}.iterate", not output_shapes
        with explained(function_name), check_unchanged(algorithm, function_name, "iteration", warns=is_first):
            return jaxprs.lowered(jax.make_jaxpr(function)(*with_weakness(leaves, weak)))

    def trace_graph(function: Any) -> FDG:
        nonlocal state
        weak = weak_types(leaves)
        jaxpr, tried = jaxpr_of(function, weak), [weak]  # `tried`: the weak types of all traces so far
        while (weak_results := list(returned_weak)) not in tried:
            if not computes_alike(jaxpr, jaxpr_of(function, weak_results)):
                raise GraphError(_weakness_message(name, state, tried[-1], weak_results))
            tried.append(weak_results)
        state = with_weakness(state, tried[-1])
        try:
            core.check_jaxpr(jaxprs.open_jaxpr(jaxpr))
        except TypeError as error:
            line = str(error).strip().splitlines()[0]
            raise GraphError(f"{name}.iterate has a jaxpr that JAX rejects: {line}") from error
        return read_graph(name, jaxpr, state, output_shapes[-1][1])

    graph = trace_graph(iterate)
    warn_of_same_draws(name, graph.jaxpr, state)
    if not graph.fragments:
        graph = trace_graph(fragment(WHOLE_ITERATION, in_axes=None, out_axes=None, name="iterate")(iterate))
    network = getattr(algorithm, "network", None)
    rules = getattr(algorithm, "parameter_rules", None) or getattr(network, "parameter_rules", None)
    between_agents = getattr(algorithm, "between_agents", None)
    return dataclasses.replace(graph, parameter_rules=rules, between_agents=between_agents)


def side_by_side(graph: FDG, count: int | None) -> FDG:
    """The graph of `count` agents, each with the graph `graph`; `graph` itself if `count` is None."""
    if count is None:
        return graph
    one_graph = graph if graph.agents is None else vmapped_agents(graph, graph.state)
    return dataclasses.replace(one_graph, agents=count)


def vmapped_agents(graph: FDG, state: Any) -> FDG:
    """Turns the graph of several agents into the graph of one algorithm that runs all of them.

    Each operation is vmapped over the agents, so that each agent's batch can be split. `state` is the
    algorithm's state, whose leaves are the first leaves of the graph's state.
    """
    agents = graph.agents
    assert agents is not None

    def map_graph() -> FDG:
        iterate = iterate_all(graph.jaxpr, agents, state, graph.state_axes, graph.between_agents)
        all_states, metrics = graph.of_all((graph.state, graph.metrics))
        jaxpr = jaxprs.lowered(jax.make_jaxpr(iterate)(*jax.tree.leaves(all_states)))
        return read_graph(graph.name, jaxpr, all_states, metrics)

    vmapped = _VMAPPED_GRAPHS(graph.jaxpr, agents, map_graph)
    return dataclasses.replace(vmapped, parameter_rules=graph.parameter_rules)


_VMAPPED_GRAPHS: IdentityCache[FDG] = IdentityCache(max_entries=16)  # results of `vmapped_agents`


def read_graph(name: str, jaxpr: Any, state: Any, metrics: Any) -> FDG:
    """The graph of a closed jaxpr that maps the state's leaves to the next state's leaves and the metrics."""
    jaxpr = name_fragments(jaxpr)
    num_leaves = len(jax.tree.leaves(state))
    fragments, edges = Reader(jaxprs.open_jaxpr(jaxpr), num_leaves).read()
    return FDG(name, fragments, edges, state_axes(jaxpr, num_leaves), jaxpr, state, metrics)


def with_declarations(graph: FDG, source: FDG) -> FDG:
    """The graph with the `parameter_rules`, `between_agents` and `agents` of `source`."""
    return dataclasses.replace(
        graph,
        parameter_rules=source.parameter_rules,
        between_agents=source.between_agents,
        agents=source.agents,
    )


def abstract_state(algorithm: Any) -> Any:
    """The state's pytree of `jax.ShapeDtypeStruct`; Python numbers that `init` returns are weakly typed."""
    name = type(algorithm).__name__

    def init() -> Any:
        state = algorithm.init(jax.random.key(0))
        if state is None:
            raise GraphError(f"{name}.init returned None: return the state")
        check_arrays(f"{name}.init", state)
        return state

    with explained(f"{name}.init"), check_unchanged(algorithm, f"{name}.init", "iteration"):
        shapes = jax.eval_shape(init)
    return with_weakness(shapes, weak_types(shapes))


_MAX_LEAVES = 3  # the maximum number of leaves that a message names


def _describe_structures(before: Any, after: Any) -> str:
    """Describes how the structures of two states differ: new or missing leaves, or a part's type."""
    before_names, after_names = (
        [f"state{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (before, after)
    )
    by_kind = {
        "new": [name for name in after_names if name not in before_names],
        "gone": [name for name in before_names if name not in after_names],
    }
    parts = [
        f"{', '.join(names[:_MAX_LEAVES])}"
        f"{f' and {len(names) - _MAX_LEAVES} more' if names[_MAX_LEAVES:] else ''}: {kind}"
        for kind, names in by_kind.items()
        if names
    ]
    return "; ".join(parts) or _describe_part(before, after, "state")


def _describe_part(before: Any, after: Any, where: str) -> str:
    """Describes the innermost part whose type differs between two trees with the same leaves."""
    parts_before, parts_after = (
        jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda y, x=x: y is not x) for x in (before, after)
    )
    if type(before) is type(after):
        for (path, x), (_, y) in zip(parts_before, parts_after, strict=False):
            if jax.tree.structure(x) != jax.tree.structure(y):  # type: ignore[operator]
                return _describe_part(x, y, where + jax.tree_util.keystr(path))
    kinds = [type(x).__name__ for x in (before, after)]
    if kinds[0] == kinds[1]:  # the containers' static fields differ
        structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
        static = [structure.node_data()[1] for structure in structures]
        kinds = [f"{kind} with static fields {x!r:.100}" for kind, x in zip(kinds, static, strict=True)]
    return f"{where} is {kinds[1]}, and was {kinds[0]}"


def _check_fixed_point(name: str, before: Any, after: Any) -> None:
    """Raises `GraphError` unless an iteration keeps the structure, shapes and dtypes of the state."""
    if jax.tree.structure(before) != jax.tree.structure(after):  # type: ignore[operator]
        raise GraphError(
            f"{name}.iterate returns a state of another structure than init: "
            f"{_describe_structures(before, after)}: keep every field"
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise GraphError(
                f"{name}.iterate changes state{jax.tree_util.keystr(path)} from {old.dtype}{list(old.shape)} "
                f"to {new.dtype}{list(new.shape)}: return the shape and dtype that init gives"
            )


def _weakness_message(name: str, state: Any, before: list[bool], after: list[bool]) -> str:
    """The message about a leaf that is weakly typed before some iterations only."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), before, after, strict=True)
    path, dtype, old = next((path, leaf.dtype, old) for (path, leaf), old, new in leaves if old != new)
    where = f"{name}.iterate takes state{jax.tree_util.keystr(path)} as"
    changes = f"a Python number and returns {dtype}" if old else f"{dtype} and returns a Python number"
    fix = f"make it jnp.{dtype}(...) in init" if old else f"return it with jnp.asarray(..., jnp.{dtype})"
    return f"{where} {changes}, so the iterations after the first would compute in other dtypes: {fix}"


def _check_metrics(name: str, metrics: Any) -> None:
    """Raises `GraphError` unless metrics are a flat dict from strings to scalars."""
    if not isinstance(metrics, dict):
        raise GraphError(f"{name}.iterate returns metrics of type {kind_of(metrics)}: return a flat dict")
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise GraphError(f"{name}.iterate returns a metric named {key!r}: use a string")
        if not isinstance(value, dict | list | tuple) and not is_array(value):
            raise GraphError(
                f"{name}.iterate returns metric '{key}' as {value!r:.40}: metrics are numbers: leave it out,"
                " or return jnp.nan where there is none"
            )
        if isinstance(value, dict | list | tuple) or jax.numpy.ndim(value) != 0:
            actual = f"shape {value.shape}" if hasattr(value, "shape") else f"a {kind_of(value)}"
            raise GraphError(
                f"{name}.iterate returns metric '{key}' as {actual}: metrics are scalars: reduce it, for"
                " example with jnp.mean"
            )
    check_arrays(f"{name}.iterate", metrics, "metrics")
