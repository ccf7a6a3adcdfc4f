"""Converts modules of Linen, NNX and Equinox to pairs of pure functions, `init` and `apply`.

A library is recognised by its base class, and imported only if a module of it is used. Linen and NNX modules
get batches `[N, ...]`; Equinox modules get one sample and are vmapped. `init` returns the parameters as
nested dictionaries; for Equinox, as one dictionary by path.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax

from fdg.errors import FdgError, one_line

Library = Literal["linen", "nnx", "equinox"]

# (package, name) of each library's base class -> library.
_BASES: dict[tuple[str, str], Library] = {
    ("flax.linen", "Module"): "linen",
    ("flax.nnx", "Module"): "nnx",
    ("equinox", "Module"): "equinox",
}


@dataclasses.dataclass(frozen=True, eq=False)
class IdentityHashed:
    """A module with its parameters. It hashes and compares by identity."""

    module: Any


def library_of(value: Any) -> Library | None:
    """The library of a module, a module class or a `functools.partial` of a class; None for other values.

    >>> import flax.linen as nn
    >>> library_of(nn.Dense(3)), library_of(functools.partial(nn.Dense, 3)), library_of(len)
    ('linen', 'linen', None)
    """
    value = value.module if isinstance(value, IdentityHashed) else value
    value = value.func if isinstance(value, functools.partial) else value
    cls = value if isinstance(value, type) else type(value)
    for base in cls.__mro__:
        for (package, name), library in _BASES.items():
            if base.__name__ == name and (base.__module__ + ".").startswith(package + "."):
                return library
    return None


def is_module_instance(value: Any) -> bool:
    """Whether a value is a module instance, rather than a class or a `functools.partial`."""
    return not isinstance(value, type | functools.partial)


def make_hashable(value: Any) -> Any:
    """Makes a field's value hashable: wraps modules that hold arrays or lists in `IdentityHashed`."""
    library = library_of(value)
    if library is None or isinstance(value, IdentityHashed) or not is_module_instance(value):
        return value
    if library == "linen":
        with contextlib.suppress(TypeError):  # a field is a list, a dictionary or an array
            hash(value)
            return value
    return IdentityHashed(value)


def is_network(value: Any) -> bool:
    """Whether a value is a network of these libraries, or a text `module:name` that names one."""
    return (isinstance(value, str) and ":" in value) or library_of(value) is not None


def functions(network: Any, field: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`init` and `apply` of a module, a module class or a `functools.partial` of a class.

    `init` returns the parameters that an NNX or Equinox instance has; a class is instantiated with a key of
    the run. Equal modules give equal functions. Errors about a module's state name the algorithm's `field`.
    """
    init, apply = _FUNCTIONS[library_of(network) or "equinox"]
    return _BoundFunction(init, network, field), _BoundFunction(apply, network)


@dataclasses.dataclass(frozen=True)
class _BoundFunction:
    """A function with its first arguments. Unlike closures, two of these are equal if their modules are."""

    function: Callable[..., Any]
    network: Any
    field: str = ""

    def __call__(self, *arguments: Any) -> Any:
        return self.function(self.network, self.field, *arguments)


def _call(network: Any, module: Any, method: Callable[..., Any], *inputs: Any) -> Any:
    """`method(*inputs)`, after a check that the module's `__call__` needs no further arguments."""
    if problem := _misfit(module.__call__, *inputs):
        raise FdgError(
            f"network {_name(network)}: its __call__ does not take the {len(inputs)} positional arguments"
            f" that fdg passes ({problem}): give further arguments default values"
        )
    return method(*inputs)


def _misfit(function: Any, *arguments: Any, **named: Any) -> str | None:
    """Why a function does not take these arguments; None if it does, or has no signature."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except (TypeError, ValueError) as error:  # ValueError: no signature
        return str(error) if isinstance(error, TypeError) else None
    return None


def _make_module(network: Any, **rng_arguments: Any) -> Any:
    """The module that a class, or a `functools.partial` of a class, makes."""
    if problem := _misfit(network, **rng_arguments):
        name = getattr(network, "func", network).__name__
        fix = f"functools.partial({name}, ...)" if rng_arguments else f"{name}(...)"
        raise FdgError(f"network {name} is a class that needs further arguments ({problem}): write {fix}")
    return network(**rng_arguments)


def _make_linen(network: Any) -> Any:
    network = network.module if isinstance(network, IdentityHashed) else network
    return network if is_module_instance(network) else _make_module(network)


def _linen_init(network: Any, field: str, key: jax.Array, *inputs: Any) -> Any:
    module = _make_linen(network)
    variables = dict(_call(network, module, functools.partial(module.init, key), *inputs))
    parameters = variables.pop("params", {})
    _refuse_state(field, sorted(variables))
    return parameters


def _linen_apply(network: Any, field: str, parameters: Any, *inputs: Any) -> Any:
    from flax.errors import InvalidRngError

    try:
        return _make_linen(network).apply({"params": parameters}, *inputs)
    except InvalidRngError as error:
        raise _no_key(network, error, "deterministic=True") from None


def _make_nnx(network: Any, key: jax.Array) -> Any:
    from flax import nnx

    return (
        network.module if isinstance(network, IdentityHashed) else _make_module(network, rngs=nnx.Rngs(key))
    )


def _nnx_init(network: Any, field: str, key: jax.Array, *inputs: Any) -> Any:
    from flax import nnx

    _, parameters, other_state = nnx.split(_make_nnx(network, key), nnx.Param, ...)
    variables = [path for path, leaf in nnx.to_flat_state(other_state) if isinstance(leaf, nnx.Variable)]
    _refuse_state(field, ["/".join(map(str, path)) for path in variables])
    return nnx.to_pure_dict(parameters)


def _nnx_apply(network: Any, field: str, parameters: Any, *inputs: Any) -> Any:
    from flax import nnx

    with jax.ensure_compile_time_eval():  # traced arrays would count as settings, not as constants
        module = _make_nnx(network, jax.random.key(0))
    structure, state, constants = nnx.split(module, nnx.Param, ...)
    nnx.replace_by_pure_dict(state, parameters)
    module = nnx.merge(structure, state, constants)
    return _call(network, module, module, *inputs)


def _make_equinox(network: Any, key: jax.Array) -> Any:
    return network.module if isinstance(network, IdentityHashed) else _make_module(network, key=key)


def _equinox_init(network: Any, field: str, key: jax.Array, *inputs: Any) -> Any:
    import equinox

    leaves = jax.tree_util.tree_leaves_with_path(_make_equinox(network, key))
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if equinox.is_array(leaf)}
    floats = {path: leaf for path, leaf in arrays.items() if equinox.is_inexact_array(leaf)}
    _refuse_state(field, sorted(arrays.keys() - floats.keys()))
    return floats


def _equinox_apply(network: Any, field: str, parameters: Any, *inputs: Any) -> Any:
    import equinox

    skeleton = equinox.filter_eval_shape(_make_equinox, network, jax.random.key(0))
    leaves, structure = jax.tree_util.tree_flatten_with_path(skeleton)
    filled = [parameters.get(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    module = jax.tree.unflatten(structure, filled)
    try:
        return _call(network, module, jax.vmap(module), *inputs)
    except RuntimeError as error:
        if "requires a key" not in str(error):
            raise
        raise _no_key(network, error, "inference=True") from None


# (network, field, key, *inputs) -> parameters; (network, field, parameters, *inputs) -> results.
_FUNCTIONS: dict[Library, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linen": (_linen_init, _linen_apply),
    "nnx": (_nnx_init, _nnx_apply),
    "equinox": (_equinox_init, _equinox_apply),
}


def _name(network: Any) -> str:
    """The name of a module's class, for errors."""
    network = network.module if isinstance(network, IdentityHashed) else network
    return getattr(getattr(network, "func", network), "__name__", None) or type(network).__name__


def _no_key(network: Any, error: Exception, fix: str) -> FdgError:
    return FdgError(
        f"network {_name(network)}: {one_line(error)}: fdg gives networks no random key: leave out dropout"
        f" and other random layers, or give them {fix}"
    )


def _refuse_state(field: str, names: list[str]) -> None:
    """Raises an error for a module with state other than parameters, which would not be updated."""
    if names:
        raise FdgError(
            f"{field}: the module has state besides its parameters ({', '.join(names[:3])}), which fdg does"
            " not keep between steps: leave out batch statistics, dropout and counters"
        )
