"""Networks of other libraries, told by their classes: Flax's Linen and NNX, and Equinox; imports none.

An algorithm's `network=` takes, beside a pair of functions: a Linen module; an NNX or Equinox module, which
starts from the parameters that it holds; a class of theirs or a `functools.partial` of one, which is called
with random numbers of the run's own; or the name of any of these, `"my.module:name"`.
"""

import dataclasses
import functools
from typing import Any, Literal

Library = Literal["linen", "nnx", "equinox"]

# By where each library defines the base of its modules.
_BASES: dict[tuple[str, str], Library] = {
    ("flax.linen", "Module"): "linen",
    ("flax.nnx", "Module"): "nnx",
    ("equinox", "Module"): "equinox",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A module with its parameters, made hashable by identity: it equals only itself."""

    module: Any


def library_of(value: Any) -> Library | None:
    """Whose module a value is: a module, a class of such, or a `functools.partial` of one; None for others.

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


def is_made(value: Any) -> bool:
    """Whether a value is a module, and not what makes one."""
    return not isinstance(value, type | functools.partial)


def hashable(value: Any) -> Any:
    """A field's value as one that hashes: modules that hold arrays are `Held`."""
    holds_arrays = library_of(value) in ("nnx", "equinox") and is_made(value)
    return Held(value) if holds_arrays and not isinstance(value, Held) else value


def is_network(value: Any) -> bool:
    """Whether a value is such a module, or the name of one."""
    return (isinstance(value, str) and ":" in value) or library_of(value) is not None
