"""`fragment`: marks a pure function as a node of the dataflow graph.

A marked function is traced as a *named jit* (the node), and each array at its border passes through
`boundary`, an identity primitive that carries the array's batch axis. Both survive tracing, `grad`, `vmap`,
`scan` and `jit`, so the graph can be read from the jaxpr of any program that calls the function or its
derivative. Without an engine, both have no cost.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from fdg import jaxprs
from fdg.aliases import METHOD_FIXES
from fdg.arguments import checked, quoted
from fdg.errors import FdgError, GraphError, one_line, structure_of

# The boundary primitive is the identity of an array; `axis` is its batch axis (None: the batch shares it).

boundary_p = core.Primitive("fragment_boundary")
boundary_p.def_abstract_eval(lambda x, *, axis: x)
boundary_p.def_impl(lambda x, *, axis: x)
mlir.register_lowering(boundary_p, lambda ctx, x, *, axis: [x])


def _batch_boundary(args, dims, *, axis):
    (x,), (dim,) = args, dims
    if axis is not None and dim is not None and dim <= axis:
        axis += 1  # vmap inserted an axis in front of the batch axis
    return boundary_p.bind(x, axis=axis), dim


batching.primitive_batchers[boundary_p] = _batch_boundary
ad.deflinear2(
    boundary_p,  # a cotangent has the shape of its primal, and so the same batch axis
    lambda ct, _, *, axis: [ct if type(ct) is ad.Zero else boundary_p.bind(ct, axis=axis)],
)


def split_rows(x: jax.Array) -> jax.Array:
    """Declares axis 0 of an array as a batch: of several devices, each computes what follows for its rows."""
    return boundary_p.bind(x, axis=0)


# --- The node's name. Only a jit's name survives every JAX transformation. ---

_PREFIX = "fdg"  # the beginning of the name of a fragment's jit
_MAX_ROWS = 2**40  # the largest batch; planning tries all of its divisors up to the square root

ROLES = ("environment", "actor", "buffer", "learner", "gradient", "update", "reward", "reference", "critic")
"""Roles that fdg's policies place; any other word is allowed too."""


class FragmentMark(NamedTuple):
    """Role and name of a fragment, as encoded in the name of its jit."""

    role: str
    name: str

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.role}:{self.name}"

    @staticmethod
    def of(eqn: core.JaxprEqn) -> "FragmentMark | None":
        """The mark of an equation that calls a fragment, or None."""
        if eqn.primitive.name != "jit":
            return None
        parts = str(eqn.params["name"]).split(":")
        return FragmentMark(parts[1], parts[2]) if len(parts) == 3 and parts[0] == _PREFIX else None


def fragments_in(equations: Iterable[core.JaxprEqn], outermost: bool = False) -> tuple[str, ...]:
    """The names of the fragments that equations call, in program order; `outermost` omits nested ones."""
    names: list[str] = []
    for eqn in equations:
        mark = FragmentMark.of(eqn)
        if mark is not None:
            names.append(mark.name)
        if mark is None or not outermost:
            for body in jaxprs.bodies(eqn):
                names += fragments_in(body.jaxpr.eqns, outermost)
    return tuple(names)


_SHARED_AXIS = object()  # stands for the axis None in a pytree, where None would be an empty subtree


def _bind_boundaries(mark: FragmentMark, side: str, axes: Any, values: Any) -> tuple[Any, dict[str, int]]:
    """Binds the boundary primitive to every array of `values`, with its batch axis.

    Returns the values, and the size of each batch axis by the path of its array.
    """
    values = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.numpy.asarray(x), values)
    axis_of = leaf_axes(f"fragment '{mark.name}' ({mark.role})", side, axes, values)
    leaves, structure = jax.tree.flatten(values)
    pairs = list(zip(leaves, axis_of.items(), strict=True))
    sizes = {where: x.shape[axis] for x, (where, axis) in pairs if axis is not None}
    return jax.tree.unflatten(structure, [boundary_p.bind(x, axis=axis) for x, (_, axis) in pairs]), sizes


def leaf_axes(what: str, side: str, axes: Any, arrays: Any) -> dict[str, int | None]:
    """Expands `axes`, a pytree prefix, to the batch axis of each array, at least 0, by the array's path.

    `side` is "in" for the arguments of the function `what`, and "out" for its results.

    Raises:
      GraphError: the axes do not match the arrays.
    """
    prefix = jax.tree.map(
        lambda axis: _SHARED_AXIS if axis is None else axis, axes, is_leaf=lambda axis: axis is None
    )
    try:
        axis_per_leaf = jax.tree.leaves(jax.tree.broadcast(prefix, arrays))
    except ValueError:
        raise GraphError(
            f"{what}: {side}_axes={axes} is not a pytree prefix of its "
            f"{'arguments' if side == 'in' else 'results'} {structure_of(arrays):.200}: give one axis "
            f"(or None) for each, or one axis for all"
        ) from None
    axis_of: dict[str, int | None] = {}
    for (path, array), axis in zip(jax.tree_util.tree_leaves_with_path(arrays), axis_per_leaf, strict=True):
        where = f"{side}{jax.tree_util.keystr(path)}"
        axis_of[where] = None
        if axis is _SHARED_AXIS:
            continue
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise GraphError(
                f"{what}: {where} has axis {axis!r}: use an integer, or None for what the batch shares"
            )
        if not -array.ndim <= axis < array.ndim:
            hint = f"an axis below {array.ndim}, or " if array.ndim else ""
            raise GraphError(
                f"{what}: {where} has batch axis {axis} but shape {array.shape}: use {hint}None in"
                f" {side}_axes if the batch shares it"
            )
        axis_of[where] = axis % array.ndim
    return axis_of


def _check_batch(mark: FragmentMark, sizes: dict[str, int]) -> None:
    """Raises a `GraphError` if batch axes differ in size or are too long; `sizes` is by the array's path."""
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{where}: {size}" for where, size in sizes.items())
        raise GraphError(
            f"fragment '{mark.name}' ({mark.role}): its batch axes differ in size ({listed}): "
            f"set in_axes/out_axes to the axis that all share, or to None"
        )
    if max(sizes.values(), default=0) > _MAX_ROWS:
        raise GraphError(
            f"fragment '{mark.name}' ({mark.role}): its batch has {max(sizes.values())} rows, but at most"
            f" {_MAX_ROWS} are supported: use a smaller batch"
        )


class FragmentFunction:
    """A pure function whose calls are nodes of the graph; made by `fragment`. A call runs the function.

    (`fdg.tracing.graph.Fragment` is the node.)

    Attributes:
      mark: role and name.
      in_axes, out_axes: as given to `fragment`.
    """

    def __init__(self, function: Callable, role: str, in_axes: Any, out_axes: Any, name: str | None):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # not a function, or a C function without a signature
            raise GraphError(
                f"fragment({quoted(role)}) of {quoted(function)}: it has no signature: give a function"
                " written with def"
            ) from None
        functools.update_wrapper(self, function)
        self.mark = FragmentMark(role, name or getattr(function, "__name__", role).strip("<>"))
        self.in_axes, self.out_axes = in_axes, out_axes
        for part in self.mark:
            if not part or ":" in part or not part.isprintable():
                raise GraphError(
                    f"fragment {self.mark.name!r}: {part!r} is not a role or name: give printable words"
                    " without ':'"
                )

        # `receiver` is (), or (instance,) for a method; `scalars` are the instance's fields that are arrays.
        # `unseen` (`unseen_by_cache`) is only part of the key in JAX's cache.
        def body(receiver, unseen, scalars, args, kwargs):
            axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
            if isinstance(axes, tuple) and len(axes) != len(args):
                problem = f"in_axes={in_axes} names {len(axes)} arguments but it was called with {len(args)}"
                raise self._call_error(problem, args, "give one axis (or None) for each")
            try:
                signature.bind(*receiver, *args, **kwargs)
            except TypeError as error:
                raise self._call_error(str(error), args, f"it takes {signature}") from None
            args, sizes = _bind_boundaries(self.mark, "in", axes, args)
            kwargs, keyword_sizes = _bind_boundaries(self.mark, "in", 0, kwargs)  # as in jax.vmap
            scalars, _ = _bind_boundaries(self.mark, "in", None, scalars)
            if scalars:
                receiver = tuple(with_numbers(instance, scalars) for instance in receiver)
            results, out_sizes = _bind_boundaries(
                self.mark, "out", out_axes, function(*receiver, *args, **kwargs)
            )
            _check_batch(self.mark, {**sizes, **keyword_sizes, **out_sizes})
            return results

        body.__name__ = body.__qualname__ = str(self.mark)
        self._jitted = jax.jit(body, static_argnums=(0, 1))

    def _call(self, receiver: tuple, *arguments: Any) -> Any:
        """Calls `body`; the second argument is what JAX's cache would not see."""
        return self._jitted(receiver, unseen_by_cache(receiver), *arguments)

    def __call__(self, *args, **kwargs):
        """Runs the function."""
        return self._call((), {}, args, kwargs)

    def __get__(self, instance, owner=None):
        """Binds a method: `self` is static, and in_axes apply to the arguments after it."""
        if instance is None:
            return self
        return functools.partial(self._call_on, instance)

    def _call_on(self, instance, *args, **kwargs):
        """Calls the function as a method of `instance`, whose float scalar arrays become arguments."""
        scalars = _array_fields(instance)
        if scalars:  # these are arguments that the whole batch shares; other fields are static
            instance = _copy(instance, dict.fromkeys(scalars, _PLACEHOLDER))
        try:
            hash(instance)
        except TypeError:
            raise GraphError(
                f"fragment '{self.mark.name}' ({self.mark.role}) is a method of {type(instance).__name__}, "
                f"which cannot be hashed: {_why_unhashable(instance)}"
            ) from None
        return self._call((instance,), scalars, args, kwargs)

    def _call_error(self, problem: str, args: Sequence[Any], fix: str) -> GraphError:
        """The error for a wrong call, with a hint if another library has a method of this name."""
        hint = METHOD_FIXES.get(self.mark.name) if len(args) < 2 else None
        if hint is not None:
            fix = f"{fix}; {hint}" if args else hint
        return GraphError(f"fragment '{self.mark.name}' ({self.mark.role}): {problem}: {fix}")

    def __repr__(self) -> str:
        return f"<fragment {self.mark.role}: {self.mark.name}{inspect.signature(self)}>"


_num_forgotten = 0  # calls of `forget_traces`; part of the key of each fragment's cached trace


def forget_traces() -> None:
    """Makes later calls of fragments trace their functions again, with changed attributes and globals."""
    global _num_forgotten
    _num_forgotten += 1


def unseen_by_cache(value: Any) -> tuple[int, ...]:
    """What a cache of traced programs needs in its key besides `value`, which it compares by `==`.

    It changes at every `forget_traces`, and if `value` has other objects in uncompared fields.
    """
    return _num_forgotten, *_uncompared(value)


def _uncompared(value: Any) -> tuple[int, ...]:
    """The ids of the fields in which equal dataclasses may differ (`compare=False`), at any depth."""
    if isinstance(value, tuple):
        return tuple(i for x in value for i in _uncompared(x))
    if not getattr(getattr(value, "__dataclass_params__", None), "eq", False):
        return ()
    fields = [(field.compare, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return tuple(i for is_compared, x in fields for i in (_uncompared(x) if is_compared else (id(x),)))


def _array_fields(instance: Any) -> dict[str, jax.Array]:
    """The fields of a dataclass whose values are float scalar arrays, possibly traced."""
    if not dataclasses.is_dataclass(instance):
        return {}
    values = {field.name: getattr(instance, field.name, None) for field in dataclasses.fields(instance)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, jax.Array)
        and value.ndim == 0
        and jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
    }


class _ArgumentPlaceholder:
    """The placeholder of a field whose value a fragment gets as an argument."""

    def __repr__(self) -> str:
        return "given as an argument"


_PLACEHOLDER = _ArgumentPlaceholder()


def with_numbers(instance: Any, numbers: Mapping[str, Any]) -> Any:
    """A copy of an object with changed fields, whose values may be traced.

    What the instance computed from its fields, in `__post_init__` or cached properties, is computed again.
    `__post_init__` runs only if it computes something, because its checks may not take traced values.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Mine:
    ...     rate: float = 0.1
    >>> with_numbers(Mine(), {"rate": 0.5})
    Mine(rate=0.5)
    """
    copied = _copy(instance, numbers)
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        return copied
    given = {field.name for field in dataclasses.fields(instance) if field.init}
    if computed := getattr(copied, "__dict__", {}).keys() - given - numbers.keys():
        remade = _remade(instance, {name: numbers[name] for name in given & numbers.keys()})
        for name in computed & vars(remade).keys():
            object.__setattr__(copied, name, vars(remade)[name])
    return copied


def _remade(instance: Any, numbers: Mapping[str, Any]) -> Any:
    """The dataclass made again with changed fields, so that `__post_init__` runs."""
    try:
        return dataclasses.replace(instance, **numbers)
    except jax.errors.JAXTypeError:
        raise
    except Exception as error:
        raise FdgError(
            f"{type(instance).__name__}.__post_init__ does not take traced numbers ({', '.join(numbers)}):"
            f" {one_line(error)}: compute its values in properties instead"
        ) from error


def _copy(instance: Any, changes: Mapping[str, Any]) -> Any:
    """A copy with changed attributes and without the values of cached properties."""
    copied: Any = copy.copy(instance)
    kind: Any = type(instance)
    for name in cached_properties(kind) & getattr(copied, "__dict__", {}).keys():
        del vars(copied)[name]
    for name, value in changes.items():
        object.__setattr__(copied, name, value)
    return copied


@functools.cache
def cached_properties(kind: Any) -> frozenset[str]:
    """The names of a class's cached properties."""
    members = [member for cls in kind.__mro__ for member in vars(cls).items()]
    return frozenset(name for name, value in members if isinstance(value, functools.cached_property))


def _why_unhashable(instance: Any) -> str:
    """The fix for an object that is not hashable because of a field or its class.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Mine:
    ...     widths: tuple
    >>> _why_unhashable(Mine([64, 64]))
    'its field widths is a list: make it a tuple'
    """
    cls: Any = type(instance)
    if not dataclasses.is_dataclass(cls) or cls.__hash__ is None:
        return "make it a dataclass(frozen=True), or make the fragment a function"
    for field in dataclasses.fields(cls):
        value = getattr(instance, field.name, None)
        try:
            hash(value)
        except TypeError:
            fix = _HASHABLE_FIXES.get(type(value), "a value that hashes, or keep it in the state")
            return f"its field {field.name} is a {type(value).__name__}: make it {fix}"
    return "give it a __hash__"


# Unhashable type -> what to write instead.
_HASHABLE_FIXES: dict[type, str] = {list: "a tuple", set: "a frozenset", dict: "a tuple of pairs"}


@checked
def fragment(
    role: str, in_axes: Any = 0, out_axes: Any = 0, *, name: str | None = None
) -> Callable[[Callable], FragmentFunction]:
    """Marks a pure function as a fragment of the dataflow graph.

    The function is not vmapped: it receives and returns whole arrays, with or without an engine. Use one
    random key per batch element in a fragment whose batch may be split.

    Args:
      role: the fragment's role, which policies place: `environment`, `actor`, `buffer`, `learner`, and
        inside a learner `gradient` and `update`; any other word is allowed too.
      in_axes: the batch axis of each positional argument, as in `jax.vmap`: an integer, None (shared by the
        whole batch), or a tuple of pytree prefixes. Keyword arguments: axis 0.
      out_axes: the batch axis of each result.
      name: the node's name; None for the function's name.

    Raises:
      GraphError: (at a call) axes do not match the arguments, or batch axes differ in size.

    >>> @fragment("actor", in_axes=(None, 0))
    ... def act(weight, observation):  # [], [B] -> [B]
    ...     return weight * observation
    >>> act(2.0, jax.numpy.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    return lambda function: FragmentFunction(function, role, in_axes, out_axes, name)
