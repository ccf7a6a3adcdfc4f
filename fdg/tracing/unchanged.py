"""Detects side effects of traced code, which happen once, in tracing, and not in each iteration."""

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
from fdg.tracing.mistakes import is_array

_MOST = 1000  # maximum number of visited objects, and of items of a container
_COPIED = 1 << 20  # arrays up to these bytes are compared by value
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_GLOBAL = {
    "random": getattr(random.getstate, "__self__", None),
    "numpy.random": getattr(np.random.get_state, "__self__", None),
}

_PART = re.compile(r"self(\.\w+){2,}")  # an attribute of an object within

Seen = dict[str, tuple[Any, Any]]
"""By path, such as `self.env.single.t`: a number, array or random generator, and its value."""


@contextlib.contextmanager
def check_unchanged(root: Any, what: str, every: str = "call", warns: bool = True) -> Iterator[None]:
    """A context that raises if traced code changes attributes, objects or globals that a method reaches.

    `root` is `self` of the traced method `what`; attributes of libraries' objects are not checked. `every`
    says when the change was meant to happen. `warns` is for Python's and NumPy's random numbers, and numbers
    in globals (possibly counters).
    """
    before, _alive = _reachable(root)
    yield
    after, _ = _reachable(root)
    changed = [path for path in after if after[path][1] != before.get(path, (None, None))[1]]
    once = f"it is traced once, so that happens once and not at every {every}"
    for path in changed:
        now, was = after[path][0], before.get(path, (None,))[0]
        traced = isinstance(now, jax.core.Tracer)
        if isinstance(now, _GENERATORS):
            if warns and path in before:
                package = "Python" if isinstance(now, random.Random) else "NumPy"
                said = "drawn once, while tracing, they are constants of the program: use jax.random with a"
                _warn(f"{what} draws random numbers of {package}: {said} key from the state")
        elif traced and _PART.fullmatch(path):
            continue  # it may be set again at each trace before it is read
        elif traced or (path in before and path.startswith("self")):
            value = ", a traced value without a number" if traced else f" = {quoted(now)}"
            old = f", which was {quoted(was)}" if path in before and was is not now else ""
            fix = "carry it in the state" + (", or return it as a metric" if traced else "")
            raise GraphError(f"{what} assigns {path}{value}{old}: {once}: {fix}")
        elif path in before and warns:
            _warn(f"{what} changes {path} to {quoted(now)}: {once}: carry it in the state")


def _warn(message: str) -> None:
    warnings.warn(message, FdgWarning, stacklevel=5)


def _reachable(root: Any) -> tuple[Seen, list[Any]]:
    """The reachable values, nearest first, and visited objects, kept so that ids stay unique."""
    found: Seen = {}
    gone_through: dict[int, Any] = {}
    todo = deque([("self", root), *_GLOBAL.items()])
    while todo and len(gone_through) < _MOST:
        path, value = todo.popleft()
        if is_array(value):
            found.setdefault(path, (value, _snapshot(value)))
        elif id(value) not in gone_through:
            gone_through[id(value)] = value
            if isinstance(value, _GENERATORS):
                found[path] = (value, _snapshot(value))
            else:
                todo.extend(_parts(path, value))
    return found, list(gone_through.values())


def _snapshot(value: Any) -> Any:
    """An object that compares equal if the value's numbers do; its identity if it is large or on a device."""
    match value:
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            state: Any = value.get_state()
            return state[1].tobytes(), state[2]
        case np.ndarray() if value.nbytes <= _COPIED:
            return value.dtype, value.shape, value.tobytes()
        case bool() | int() | float() | complex() | np.generic():
            return repr(value)
    return id(value)


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    match value:
        case dict():
            return [(f"{path}[{key!r:.40}]", one) for key, one in _few(value.items())]
        case tuple() if hasattr(value, "_fields"):
            return [(f"{path}.{name}", getattr(value, name)) for name in value._fields]
        case list() | tuple() | deque():
            return [(f"{path}[{i}]", one) for i, one in enumerate(_few(value))]
        case functools.partial():
            return [(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
        case types.MethodType():
            return [(path, value.__self__), (path, value.__func__)]
        case types.FunctionType():
            return _named_in(value) if _whose(value.__module__) == "user" else []
        case type():
            return [(f"{path}.{name}", one) for name, one in _of_class(value).items()]
    if callable(inner := getattr(value, "__wrapped__", None)):  # of a decorated function
        return [(path, inner)]
    return _attributes(path, value) if _whose(type(value).__module__) != "library" else []


def _few(values: Any) -> list[Any]:
    return list(values) if len(values) <= _MOST else []


def _attributes(path: str, value: Any) -> list[tuple[str, Any]]:
    """An object's attributes and those of its class; a cached property may be computed."""
    kind = type(value)
    own = _of_class(kind)
    state: Any = object.__getstate__(value)
    for each in state if isinstance(state, tuple) else (state,):  # of __dict__, and of __slots__
        own |= each or {}
    cached = {
        n for cls in kind.__mro__ for n, x in vars(cls).items() if isinstance(x, functools.cached_property)
    }
    found = [(f"{path}.{name}", one) for name, one in own.items() if name not in cached]
    return [*found, (f"{path}.__class__", kind)]


def _of_class(kind: type) -> dict[str, Any]:
    """The attributes of a class and of its user-defined bases."""
    classes = [cls for cls in reversed(kind.__mro__) if _whose(cls.__module__) == "user"]
    return {name: one for cls in classes for name, one in vars(cls).items() if not name.startswith("__")}


def _named_in(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Objects that a function's code refers to: globals, closure variables, defaults."""
    place = "" if function.__module__ == "__main__" else f"{function.__module__}."
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    there = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    found = [(place + name, one) for name, one in there.items()]
    for module in there.values():
        if isinstance(module, types.ModuleType) and _whose(module.__name__) == "user":
            inside = names & vars(module).keys()
            found += [(f"{module.__name__}.{name}", vars(module)[name]) for name in inside]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":  # from super()
            continue
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((f"{name} of {function.__qualname__}", cell.cell_contents))
    return [*found, (f"the defaults of {function.__qualname__}", function.__defaults__)]


@functools.cache
def _whose(module: str | None) -> str:
    """The owner of a module, as by `whose_file`."""
    top = str(module).partition(".")[0]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in (str(module), top)]
    return "library" if top in sys.stdlib_module_names else whose_file(files[0] or files[1])
