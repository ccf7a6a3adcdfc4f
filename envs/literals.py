"""Keeps the arrays of other packages' environments on the host: they become literals of programs.

Environments written for JAX keep arrays in their modules and instances. A JAX array in a closure stays
allocated on the first device as long as the process lives, and every program copies it from there. Besides,
`fdg.trace` must allocate nothing. So when an adapter imports a package or makes an environment (under
`jax.ensure_compile_time_eval`), it moves these arrays to the host, in an array type that behaves like JAX's.
"""

import contextlib
import dataclasses
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Literal(np.ndarray):
    """A host constant that becomes a literal of a program, also when traced values index it."""

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(np.asarray(self))[index] if _is_traced(index) else super().__getitem__(index)

    @property
    def at(self) -> Any:
        """JAX's functional updates: `x.at[i].set(y)`."""
        return jnp.asarray(np.asarray(self)).at


def _jax_or_numpy_method(name: str) -> Callable[..., Any]:
    """An array method that is JAX's for traced arguments, and NumPy's otherwise."""

    def call(self: Literal, *args: Any, **kwargs: Any) -> Any:
        if _is_traced((args, kwargs)):
            return getattr(jnp.asarray(np.asarray(self)), name)(*args, **kwargs)
        return getattr(np.ndarray, name)(self, *args, **kwargs)

    return call


for _name in ("take", "dot", "repeat", "searchsorted"):
    setattr(Literal, _name, _jax_or_numpy_method(_name))


def _is_traced(index: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(index))


def literals(value: Any) -> Any:
    """Replaces the JAX arrays in a pytree by literals.

    >>> type(literals({"a": jnp.arange(3)})["a"]).__name__
    'Literal'
    """
    return jax.tree.map(lambda x: _literal(x) if _is_array(x) else x, value)


def replace_arrays(value: Any, *packages: str) -> None:
    """Replaces the arrays in an object, dictionary or list by literals, in place, recursively.

    Also searches objects whose classes these packages define.
    """
    replacer = _Replacer(packages)
    if isinstance(value, dict | list):
        replacer.replacement(value)
    else:
        replacer.replace_attributes(value)


def replace_pytree_arrays(value: Any) -> None:
    """Replaces the arrays in an object's attributes by literals, in place; attributes may be pytrees."""
    for attribute, item in list(vars(value).items()):
        if any(_is_array(leaf) for leaf in jax.tree.leaves(item)):
            vars(value)[attribute] = literals(item)


@contextlib.contextmanager
def as_arrays(value: Any) -> Iterator[None]:
    """A context in which the attributes of an object hold JAX arrays in place of literals.

    It is for tracing code that treats NumPy arrays as static. It undoes `replace_pytree_arrays`; at its end,
    the literals are back. Other threads that enter this context wait meanwhile.
    """
    with _TRACING_LOCK:
        attributes = dict(vars(value))
        for attribute, item in attributes.items():
            if any(isinstance(leaf, Literal) for leaf in jax.tree.leaves(item)):
                vars(value)[attribute] = jax.tree.map(
                    lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, Literal) else x, item
                )
        try:
            yield
        finally:
            vars(value).update(attributes)


_TRACING_LOCK = threading.RLock()  # held in `as_arrays`


def replace_module_arrays(*packages: str) -> None:
    """Replaces the arrays in the modules of packages by literals, in every module that imported them."""
    replacer = _Replacer(packages)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    vars(module)[attribute] = replacer.replacement(value)
                    replacer.replace_defaults(value)


class _Replacer:
    """Replaces arrays by literals; visits each value once, so that shared values stay shared."""

    def __init__(self, packages: tuple[str, ...]):
        self._packages = packages
        # (object, result) by the object's id, which stays unique as long as the object lives
        self._results: dict[int, tuple[Any, Any]] = {}

    def replacement(self, value: Any) -> Any:
        """The value with literals in place of arrays; dictionaries and lists are changed in place."""
        if id(value) in self._results:
            return self._results[id(value)][1]
        if isinstance(value, (type, types.ModuleType, types.FunctionType)):
            return value
        result = value
        if _is_array(value):
            result = _literal(value)
        elif isinstance(value, dict):
            self._results[id(value)] = value, value
            for key, item in list(value.items()):
                value[key] = self.replacement(item)
        elif isinstance(value, list):
            self._results[id(value)] = value, value
            value[:] = [self.replacement(item) for item in value]
        elif isinstance(value, tuple):
            items = [self.replacement(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif self._is_of_packages(value):
            result = self._replace_in_object(value)
        self._results[id(value)] = value, result
        return result

    def replace_attributes(self, value: Any) -> None:
        """Replaces the attributes of an object."""
        for attribute, item in list(getattr(value, "__dict__", {}).items()):
            new = self.replacement(item)
            if new is not item:
                vars(value)[attribute] = new

    def replace_defaults(self, value: Any) -> None:
        """Replaces the argument defaults of a class's methods."""
        if isinstance(value, type) and value.__module__.partition(".")[0] in self._packages:
            for method in vars(value).values():
                if isinstance(method, types.FunctionType) and method.__defaults__:
                    method.__defaults__ = self.replacement(method.__defaults__)

    def _replace_in_object(self, value: Any) -> Any:
        """The object with its fields replaced: a new value of a dataclass, else the same object, changed."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            old = {name: getattr(value, name) for name in fields}
            new = {name: self.replacement(item) for name, item in old.items()}
            if any(new[name] is not old[name] for name in fields):
                return dataclasses.replace(value, **new)
            return value
        self._results[id(value)] = value, value
        self.replace_attributes(value)
        return value

    def _is_of_packages(self, value: Any) -> bool:
        return (getattr(type(value), "__module__", None) or "").partition(".")[0] in self._packages


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def _literal(value: jax.Array) -> Any:
    """The array on the host; random keys are unchanged."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return np.array(value).view(Literal)  # a copy: a view would keep the array alive
