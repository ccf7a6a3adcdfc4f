"""Recognises networks of Flax (Linen, NNX) and Equinox by their classes, without importing these libraries.

An algorithm's `network=` takes a pair of functions, or one of these: a Linen module; an NNX or Equinox
module, whose parameters are the initial ones; a module class or a `functools.partial` of one, which is
called with random keys of the run; or the name of any of these, `"my.module:name"`.
"""

import dataclasses
import functools
from typing import Any, Literal

Library = Literal["linen", "nnx", "equinox"]

# Package and name of each library's base class -> library.
_BASES: dict[tuple[str, str], Library] = {
    ("flax.linen", "Module"): "linen",
    ("flax.nnx", "Module"): "nnx",
    ("equinox", "Module"): "equinox",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A module with its parameters. It hashes and compares by identity."""

    module: Any


def library_of(value: Any) -> Library | None:
    """The library of a module, of a module class, or of a `functools.partial` of one; None for other values.

    >>> import flax.linen as nn
    >>> library_of(nn.Dense(3)), library_of(functools.partial(nn.Dense, 3)), library_of(len)
    ('linen', 'linen', None)
    """
    value = value.module if isinstance(value, Held) else value
    value = value.func if isinstance(value, functools.partial) else value
    cls = value if isinstance(value, type) else type(value)
    for base in cls.__mro__:
        for (package, name), library in _BASES.items():
            if base.__name__ == name and (base.__module__ + ".").startswith(package + "."):
                return library
    return None


def is_instance(value: Any) -> bool:
    """Whether a value is a module instance, rather than a class or a `functools.partial`."""
    return not isinstance(value, type | functools.partial)


def hashable(value: Any) -> Any:
    """Makes a field's value hashable: wraps module instances that hold arrays in `Held`."""
    holds_arrays = library_of(value) in ("nnx", "equinox") and is_instance(value)
    return Held(value) if holds_arrays and not isinstance(value, Held) else value


def is_network(value: Any) -> bool:
    """Whether a value is a network of these libraries, or a name `module:name`."""
    return (isinstance(value, str) and ":" in value) or library_of(value) is not None
