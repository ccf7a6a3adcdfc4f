"""Detects side effects of traced code, which happen once during tracing, not in each iteration."""

import contextlib
import functools
import random
import re
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fdg.arguments import quoted
from fdg.errors import FdgWarning, GraphError, whose_file
from fdg.fragment import cached_properties
from fdg.tracing.mistakes import is_array

_MAX_VISITED = 1000  # maximum number of visited objects, and of items of a container
_MAX_COPIED_BYTES = 1 << 20  # arrays up to this size are compared by value
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_GLOBAL_GENERATORS = {  # the global random generator of each package
    "random": getattr(random.getstate, "__self__", None),
    "numpy.random": getattr(np.random.get_state, "__self__", None),
}

_NESTED_ATTRIBUTE = re.compile(r"self(\.\w+){2,}")  # an attribute of an object that `self` holds

_Snapshots = dict[str, tuple[Any, Any]]
"""Maps a path, such as `self.env.single.t`, to a number, array or random generator, and its snapshot."""


@contextlib.contextmanager
def check_unchanged(root: Any, what: str, every: str = "call", warns: bool = True) -> Iterator[None]:
    """A context that raises if traced code changes attributes, objects or globals that a method reaches.

    `root` is `self` of the traced method `what`; attributes of libraries' objects are not checked. In
    messages, `every` is what the user expected to repeat the change: "call" or "iteration". With `warns`, it
    also warns about Python's and NumPy's random numbers, and about numbers in globals (possibly counters).
    """
    before, _alive = _reachable(root)
    yield
    after, _ = _reachable(root)
    changed = [path for path in after if after[path][1] != before.get(path, (None, None))[1]]
    consequence = f"it is traced once, so that happens once and not at every {every}"
    for path in changed:
        new_value, old_value = after[path][0], before.get(path, (None,))[0]
        is_traced = isinstance(new_value, jax.core.Tracer)
        if isinstance(new_value, _GENERATORS):
            if warns and path in before:
                package = "Python" if isinstance(new_value, random.Random) else "NumPy"
                advice = "drawn once, while tracing, they are constants of the program: use jax.random with a"
                _warn(f"{what} draws random numbers of {package}: {advice} key from the state")
        elif is_traced and _NESTED_ATTRIBUTE.fullmatch(path):
            continue  # each trace may set the attribute before reading it
        elif is_traced or (path in before and path.startswith("self")):
            value = ", a traced value without a number" if is_traced else f" = {quoted(new_value)}"
            old_text = (
                f", which was {quoted(old_value)}" if path in before and old_value is not new_value else ""
            )
            fix = "carry it in the state" + (", or return it as a metric" if is_traced else "")
            raise GraphError(f"{what} assigns {path}{value}{old_text}: {consequence}: {fix}")
        elif path in before and warns:
            _warn(f"{what} changes {path} to {quoted(new_value)}: {consequence}: carry it in the state")


def _warn(message: str) -> None:
    warnings.warn(message, FdgWarning, stacklevel=5)


def _reachable(root: Any) -> tuple[_Snapshots, list[Any]]:
    """The reachable values, nearest first, and visited objects, which stay alive to keep ids unique."""
    snapshots: _Snapshots = {}
    visited: dict[int, Any] = {}
    pending = deque([("self", root), *_GLOBAL_GENERATORS.items()])
    while pending and len(visited) < _MAX_VISITED:
        path, value = pending.popleft()
        if is_array(value):
            snapshots.setdefault(path, (value, _snapshot(value)))
        elif id(value) not in visited:
            visited[id(value)] = value
            if isinstance(value, _GENERATORS):
                snapshots[path] = (value, _snapshot(value))
            else:
                pending.extend(_parts(path, value))
    return snapshots, list(visited.values())


def _snapshot(value: Any) -> Any:
    """An object to compare with a later snapshot: the value's numbers, or the id of a large or JAX array."""
    match value:
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            state: Any = value.get_state()
            return state[1].tobytes(), state[2]
        case np.ndarray() if value.nbytes <= _MAX_COPIED_BYTES:
            return value.dtype, value.shape, value.tobytes()
        case bool() | int() | float() | complex() | np.generic():
            return repr(value)
    return id(value)


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """The objects that a value refers to, each with its path."""
    match value:
        case dict():
            return [(f"{path}[{key!r:.40}]", item) for key, item in _bounded_list(value.items())]
        case tuple() if hasattr(value, "_fields"):
            return [(f"{path}.{name}", getattr(value, name)) for name in value._fields]
        case list() | tuple() | deque():
            return [(f"{path}[{i}]", item) for i, item in enumerate(_bounded_list(value))]
        case functools.partial():
            return [(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
        case types.MethodType():
            return [(path, value.__self__), (path, value.__func__)]
        case types.FunctionType():
            return _referenced_objects(value) if _module_owner(value.__module__) == "user" else []
        case type():
            return [(f"{path}.{name}", item) for name, item in _class_attributes(value).items()]
    if callable(inner := getattr(value, "__wrapped__", None)):  # of a decorated function
        return [(path, inner)]
    return _attributes(path, value) if _module_owner(type(value).__module__) != "library" else []


def _bounded_list(values: Any) -> list[Any]:
    """The values as a list; empty if there are more than `_MAX_VISITED`."""
    return list(values) if len(values) <= _MAX_VISITED else []


def _attributes(path: str, value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object and of its class, without cached properties, which may change once."""
    kind: Any = type(value)
    attributes = _class_attributes(kind)
    state: Any = object.__getstate__(value)
    for part in state if isinstance(state, tuple) else (state,):  # from __dict__, and from __slots__
        attributes |= part or {}
    cached = cached_properties(kind)
    paths = [(f"{path}.{name}", item) for name, item in attributes.items() if name not in cached]
    return [*paths, (f"{path}.__class__", kind)]


def _class_attributes(kind: type) -> dict[str, Any]:
    """The attributes of a class and of its user-defined bases."""
    classes = [cls for cls in reversed(kind.__mro__) if _module_owner(cls.__module__) == "user"]
    return {name: item for cls in classes for name, item in vars(cls).items() if not name.startswith("__")}


def _referenced_objects(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Objects that a function's code refers to: globals, closure variables, defaults."""
    prefix = "" if function.__module__ == "__main__" else f"{function.__module__}."
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    globals_used = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    objects = [(prefix + name, item) for name, item in globals_used.items()]
    for module in globals_used.values():
        if isinstance(module, types.ModuleType) and _module_owner(module.__name__) == "user":
            attributes = names & vars(module).keys()
            objects += [(f"{module.__name__}.{name}", vars(module)[name]) for name in attributes]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":  # from super()
            continue
        with contextlib.suppress(ValueError):  # not assigned yet
            objects.append((f"{name} of {function.__qualname__}", cell.cell_contents))
    return [*objects, (f"the defaults of {function.__qualname__}", function.__defaults__)]


@functools.cache
def _module_owner(module: str | None) -> str:
    """The owner of a module: "library", or the result of `whose_file`."""
    top = str(module).partition(".")[0]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in (str(module), top)]
    return "library" if top in sys.stdlib_module_names else whose_file(files[0] or files[1])
