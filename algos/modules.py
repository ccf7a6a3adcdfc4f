"""Networks that a user gives, as pairs of functions: modules of Linen, NNX and Equinox, and names of them.

What they take and give is what `algos.networks` says of the network in whose place they stand. Modules of
Linen and NNX see batches `[N, ...]`; those of Equinox see one sample, and are mapped. Parameters are
dictionaries. The libraries are recognised by their classes, and imported only for their own modules.

An algorithm's `network=` takes a pair of functions, or one of these: a Linen module; an NNX or Equinox
module, whose parameters are the initial ones; a module class or a `functools.partial` of one, which is
called with random keys of the run; or the name of any of these, `"my.module:name"`.
"""

import dataclasses
import functools
import inspect
from typing import Any, Literal

import jax

from algos import outputs
from algos.networks import Network
from envs import composite, own
from envs.composite import ObservationSpace
from envs.spaces import Space
from fdg.arguments import check_takes
from fdg.errors import FdgError

Library = Literal["linen", "nnx", "equinox"]

# Package and name of each library's base class -> library.
_BASES: dict[tuple[str, str], Library] = {
    ("flax.linen", "Module"): "linen",
    ("flax.nnx", "Module"): "nnx",
    ("equinox", "Module"): "equinox",
}
Sees = Literal["both", "actor", "critic"]


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


def resolved(
    network: Any,
    observation_space: ObservationSpace,
    action_space: Space,
    field: str = "network",
    sees: Sees = "both",
) -> Any:
    """What a field of an algorithm holds, as a `Network`; a network with a memory, and None, as they are.

    Where parts of observations are privileged, an actor gets zeros in their place: of an actor-critic
    ("both") the policy is worked out without them, the value with them. A network with a memory has to see to
    that itself.

    Args:
      network: see above.
      observation_space, action_space: what a function that a name names is called with.
      field: for messages.
      sees: what it is.

    Raises:
      FdgError: a name that names nothing, or no network.
    """
    if isinstance(network, str):
        network = _named(network, observation_space, action_space, field)
    seen = ("observation", "action") if sees == "critic" else ("observation",)
    if hasattr(network, "unroll"):
        check_takes(network.init, ("key", *seen), f"init of {field}")
        check_takes(network.unroll, ("parameters", "memory", "observation", "start"), f"unroll of {field}")
        return network
    if network is None:
        return network
    match library_of(network):
        case None:
            check_takes(network.init, ("key", *seen), f"init of {field}")
            check_takes(network.apply, ("parameters", *seen), f"apply of {field}")
            made = Network(network.init, network.apply)
        case "linen":
            module = network if is_instance(network) else _called(network)
            made = Network(_LinenInit(module, field), _LinenApply(module))
        case "nnx":
            made = Network(_NnxInit(network, field), _NnxApply(network))
        case "equinox":
            made = Network(_EquinoxInit(network, field), _EquinoxApply(network))
    if sees == "critic" or composite.public(observation_space) == observation_space:
        return made
    return Network(made.init, _Blindfolded(made.apply, observation_space, sees == "both"))


@functools.lru_cache(maxsize=64)
def _named(name: str, observation_space: ObservationSpace, action_space: Space, field: str) -> Any:
    """What `module:name` names; what a function of the two spaces returns."""
    value = own.found(f"--{field.replace('_', '-')}", name)
    if inspect.isfunction(value):
        try:
            value = value(observation_space, action_space)
        except FdgError:
            raise
        except Exception as error:  # whatever the code of somebody's own raises
            raise FdgError(
                f"{field} '{name}' fails for {observation_space!r:.100} and {action_space!r:.60}:"
                f" {type(error).__name__}: {error}"
            ) from error
    pair = all(callable(getattr(value, part, None)) for part in ("init", "apply"))
    if not pair and not hasattr(value, "unroll") and library_of(value) is None:
        raise FdgError(
            f"{field} '{name}' is a {type(value).__name__}: name a module of Linen, NNX or Equinox, an"
            " algos.Network, or a function of (observation_space, action_space) that returns one"
        )
    return value


@dataclasses.dataclass(frozen=True)
class _Blindfolded:
    """`apply` of a network whose actor does not see what is privileged."""

    apply: Any
    space: ObservationSpace
    has_critic: bool  # whose value does

    def __call__(self, parameters: Any, observation: Any, *more: Any) -> Any:
        leading = jax.tree.leaves(observation)[0].shape[:1]
        public = composite.public_part(self.space, observation)
        output = self.apply(parameters, composite.with_zeros(self.space, public, leading), *more)
        if not self.has_critic:
            return output
        policy, _ = outputs.pair(output, leading)
        return policy, outputs.pair(self.apply(parameters, observation, *more), leading)[1]


def _called(network: Any, **random: Any) -> Any:
    """The module that a class, or a `functools.partial` of one, makes."""
    try:
        inspect.signature(network).bind(**random)
    except TypeError as error:
        name = getattr(network, "func", network).__name__
        fix = f"functools.partial({name}, ...)" if random else f"{name}(...)"
        raise FdgError(
            f"network {name} is a class with arguments of its own ({error}): write {fix}"
        ) from None
    except ValueError:  # it does not say what it takes
        pass
    return network(**random)


# Values and not closures, so that equal modules make equal networks.
@dataclasses.dataclass(frozen=True)
class _LinenInit:
    module: Any
    field: str

    def __call__(self, key: jax.Array, *inputs: Any) -> Any:
        variables = dict(self.module.init(key, *inputs))
        parameters = variables.pop("params", {})
        _refuse_state(self.field, sorted(variables))
        return parameters


@dataclasses.dataclass(frozen=True)
class _LinenApply:
    module: Any

    def __call__(self, parameters: Any, *inputs: Any) -> Any:
        return self.module.apply({"params": parameters}, *inputs)


def _make_nnx(network: Any, key: jax.Array) -> Any:
    from flax import nnx

    return network.module if isinstance(network, Held) else _called(network, rngs=nnx.Rngs(key))


@dataclasses.dataclass(frozen=True)
class _NnxInit:
    network: Any
    field: str

    def __call__(self, key: jax.Array, *inputs: Any) -> Any:
        from flax import nnx

        _, parameters, rest = nnx.split(_make_nnx(self.network, key), nnx.Param, ...)
        _refuse_state(self.field, ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)])
        return nnx.to_pure_dict(parameters)


@dataclasses.dataclass(frozen=True)
class _NnxApply:
    network: Any

    def __call__(self, parameters: Any, *inputs: Any) -> Any:
        from flax import nnx

        # Of the module no more than its structure counts here: nothing is computed.
        abstract = nnx.eval_shape(lambda: _make_nnx(self.network, jax.random.key(0)))
        structure, state, _ = nnx.split(abstract, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(structure, state)(*inputs)


def _make_equinox(network: Any, key: jax.Array) -> Any:
    return network.module if isinstance(network, Held) else _called(network, key=key)


@dataclasses.dataclass(frozen=True)
class _EquinoxInit:
    network: Any
    field: str

    def __call__(self, key: jax.Array, *inputs: Any) -> Any:
        import equinox

        leaves = jax.tree_util.tree_leaves_with_path(_make_equinox(self.network, key))
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if equinox.is_array(leaf)}
        floats = {path: leaf for path, leaf in arrays.items() if equinox.is_inexact_array(leaf)}
        _refuse_state(self.field, sorted(arrays.keys() - floats.keys()))
        return floats


@dataclasses.dataclass(frozen=True)
class _EquinoxApply:
    network: Any

    def __call__(self, parameters: Any, *inputs: Any) -> Any:
        import equinox

        skeleton = equinox.filter_eval_shape(_make_equinox, self.network, jax.random.key(0))
        leaves, structure = jax.tree_util.tree_flatten_with_path(skeleton)
        filled = [parameters.get(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
        return jax.vmap(jax.tree.unflatten(structure, filled))(*inputs)


def _refuse_state(field: str, names: list[str]) -> None:
    """Refuses a module with more than parameters: an iteration would not carry it on."""
    if names:
        raise FdgError(
            f"{field}: the module keeps {', '.join(names[:3])} beside its parameters, which nothing would"
            " carry from step to step: leave out batch statistics, dropout and counters"
        )
