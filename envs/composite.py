"""Observations with parts: nested dictionaries and tuples of spaces, and functions on them.

A part is an array with its own space (`envs.spaces`). Only critics see the `privileged` parts of a
dictionary, and only in training, so a trained agent acts without them.

Shapes: `[...]` any leading axes, the same for all parts.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from envs.spaces import Box, Discrete, MultiDiscrete, Space
from fdg.arguments import checked_names, explain_frozen, quoted
from fdg.errors import FdgError, FdgWarning, kind_of, listed
from fdg.keys import takes_typed_key


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Dict:
    """Parts by name: an observation is a dictionary with these names.

    >>> Dict({"camera": Box(0.0, 1.0, (8, 8, 3)), "walls": Box(0.0, 1.0, (4,))}, privileged=("walls",))
    Dict({'camera': Box(low=0.0, high=1.0, shape=(8, 8, 3), dtype='float32'), 'walls': Box(low=0.0, high=1.0,
    shape=(4,), dtype='float32')}, privileged=('walls',))
    """

    spaces: tuple[tuple[str, Any], ...]  # (name, space) of each part, sorted
    privileged: tuple[str, ...]

    def __init__(self, spaces: Mapping[str, Any], privileged: Iterable[str] = ()) -> None:
        """Args:
          spaces: the parts by name.
          privileged: names of parts that only critics see.

        Raises:
          FdgError: there are no parts, a name is not a string, a part is not a space, or all parts are
            privileged.
        """
        if not isinstance(spaces, Mapping) or not spaces or not all(isinstance(name, str) for name in spaces):
            raise FdgError(
                f"Dict({quoted(spaces)}): give parts by name, such as"
                " envs.Dict({'position': envs.Box(...)})"
            )
        names = (privileged,) if isinstance(privileged, str) else tuple(privileged)
        object.__setattr__(self, "spaces", tuple(sorted(spaces.items())))
        object.__setattr__(self, "privileged", tuple(sorted(names)))
        for name, part in self.spaces:
            _check_part(f"Dict(...), part '{name}'", part)
        if unknown := [name for name in self.privileged if name not in spaces]:
            raise FdgError(f"Dict(...): privileged part '{unknown[0]}' is none of {listed(spaces, 'and')}")
        if len(set(self.privileged)) == len(self.spaces):
            raise FdgError("Dict(...): all parts are privileged: leave one that the actor sees")

    def __getitem__(self, name: str) -> Any:
        """The space of a part."""
        return dict(self.spaces)[name]

    def __repr__(self) -> str:
        hidden = f", privileged={self.privileged}" if self.privileged else ""
        return f"Dict({dict(self.spaces)}{hidden})"

    @takes_typed_key
    @checked_names
    def sample(self, key: jax.Array) -> dict[str, Any]:
        """Draws one element."""
        return sample(self, key)

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
        return contains(self, x)


@dataclasses.dataclass(frozen=True)
class Tuple:
    """Parts by position: an observation is a tuple with one entry for each.

    >>> Tuple((Discrete(2), Discrete(3))).spaces[1]
    Discrete(n=3)
    """

    spaces: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.spaces, tuple | list) or not self.spaces:
            raise FdgError(
                f"Tuple({quoted(self.spaces)}): give a tuple of spaces, such as envs.Tuple((a, b))"
            )
        object.__setattr__(self, "spaces", tuple(self.spaces))
        for position, part in enumerate(self.spaces):
            _check_part(f"Tuple(...), part {position}", part)

    @takes_typed_key
    @checked_names
    def sample(self, key: jax.Array) -> tuple[Any, ...]:
        """Draws one element."""
        return sample(self, key)

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
        return contains(self, x)


ObservationSpace: TypeAlias = Space | Dict | Tuple

KINDS = (Box, Discrete, MultiDiscrete, Dict, Tuple)  # all classes of spaces
for _kind in KINDS:
    explain_frozen(_kind, "space")


def _check_part(where: str, part: Any) -> None:
    if not isinstance(part, KINDS):
        kind = part if isinstance(part, type) else type(part)
        raise FdgError(
            f"{where} is a {kind.__module__}.{kind.__name__}: give an envs.Box, Discrete, MultiDiscrete,"
            " Dict or Tuple"
        )


def tree(space: ObservationSpace) -> Any:
    """The spaces of the parts as a pytree with the structure of an observation.

    >>> tree(Dict({"b": Discrete(2), "a": Tuple((Discrete(3), Discrete(4)))}))
    {'a': (Discrete(n=3), Discrete(n=4)), 'b': Discrete(n=2)}
    """
    match space:
        case Dict(spaces=spaces):
            return {name: tree(part) for name, part in spaces}
        case Tuple(spaces=parts):
            return tuple(map(tree, parts))
    return space


def map_parts(function: Callable[..., Any], space: ObservationSpace, *trees: Any) -> Any:
    """Applies `function(space, *arrays)` to every part, with its array from each tree; returns a pytree."""
    return jax.tree.map(function, tree(space), *trees)


def parts(space: ObservationSpace) -> list[tuple[str, Space]]:
    """The spaces of the parts with their paths: `[("['camera']", Box(...)), ...]`.

    >>> parts(Dict({"a": Tuple((Discrete(3),))})), parts(Discrete(2))
    ([("['a'][0]", Discrete(n=3))], [('', Discrete(n=2))])
    """
    return [
        (jax.tree_util.keystr(path), part) for path, part in jax.tree_util.tree_leaves_with_path(tree(space))
    ]


def is_composite(space: Any) -> bool:
    """Whether observations of a space have parts."""
    return isinstance(space, Dict | Tuple)


def has_parts_of(space: ObservationSpace, observation: Any) -> bool:
    """Whether an observation has the parts of a space."""
    expected: Any = jax.tree.structure(tree(space))
    return expected == jax.tree.structure(observation)


def zeros(space: ObservationSpace, leading: tuple[int, ...] = ()) -> Any:
    """An observation of zeros; each part is `[*leading, ...]`."""
    return map_parts(lambda part: jnp.zeros((*leading, *part.shape), part.dtype), space)


def types(space: ObservationSpace, leading: tuple[int, ...] = ()) -> Any:
    """Shape and dtype of each part of observations `[*leading, ...]`: `jax.ShapeDtypeStruct`s."""
    return map_parts(lambda part: jax.ShapeDtypeStruct((*leading, *part.shape), part.dtype), space)


def sample(space: ObservationSpace, key: jax.Array) -> Any:
    """Samples an element; each part gets its own key."""
    if not is_composite(space):
        return space.sample(key)
    leaves, structure = jax.tree.flatten(tree(space))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [part.sample(keys[i]) for i, part in enumerate(leaves)])


def contains(space: ObservationSpace, x: Any) -> jax.Array:
    """Whether `x` is one element of the space. Returns `[] bool`; works on traced values."""
    if not has_parts_of(space, x):
        return jnp.asarray(False)
    inside = jax.tree.leaves(map_parts(lambda part, value: part.contains(value), space, x))
    return jnp.all(jnp.stack(inside))


def fit_observation(space: ObservationSpace, observation: Any, leading: tuple[int, ...], subject: str) -> Any:
    """Returns an observation cast to the dtypes of its space; raises if its structure or shapes do not fit.

    Each part is `[*leading, *part.shape]`. Error messages begin with `subject`, such as "environment 'maze':
    reset gives".
    """
    expected = tree(space)
    if not has_parts_of(space, observation):
        if not is_composite(space):
            raise FdgError(
                f"{subject} a {kind_of(observation)} as observation, expected one array (or a"
                " MaskedObservation); join its parts, or set observation_space to an envs.Dict or envs.Tuple"
            )
        raise FdgError(
            f"{subject} an observation of {_structure(observation)}, but its observation_space has"
            f" {_structure(expected)}; make the two agree"
        )

    def fit(path: Any, part: Space, value: Any) -> jax.Array:
        if jnp.shape(value) != (*leading, *part.shape):
            what = f"observation{jax.tree_util.keystr(path)}" if path else "an observation"
            raise FdgError(
                f"{subject} {what} of shape {jnp.shape(value)},"
                f" but its observation_space{f' of {leading[-1]} agents' if leading else ''} has"
                f" {(*leading, *part.shape)}; make the two agree"
            )
        if jnp.issubdtype(jnp.result_type(value), jnp.floating) > jnp.issubdtype(part.dtype, jnp.floating):
            warnings.warn(
                f"{subject} {jnp.result_type(value)} as observation{jax.tree_util.keystr(path)}, and its"
                f" space is of {part.dtype}: fractions are cut off; cast it, or use a space of float32",
                FdgWarning,
                stacklevel=2,
            )
        return jnp.asarray(value, part.dtype)

    return jax.tree_util.tree_map_with_path(fit, expected, observation)


def _structure(value: Any) -> str:
    """The parts of an observation for messages; its type if it has none."""
    if isinstance(value, dict):
        return f"parts {', '.join(map(repr, sorted(value, key=str)))}"
    return f"{len(value)} parts" if isinstance(value, tuple | list) else f"a {kind_of(value)}"


# --- privileged parts ---


def public(space: ObservationSpace) -> ObservationSpace:
    """The space without privileged parts: the actors' input.

    >>> public(Dict({"a": Discrete(2), "b": Discrete(3)}, privileged=("b",)))
    Dict({'a': Discrete(n=2)})
    """
    match space:
        case Dict(spaces=spaces, privileged=privileged):
            return Dict({name: public(part) for name, part in spaces if name not in privileged})
        case Tuple(spaces=inner):
            return Tuple(tuple(map(public, inner)))
    return space


def public_part(space: ObservationSpace, observation: Any) -> Any:
    """Removes the privileged parts of an observation of `space`, with any leading axes."""
    match space:
        case Dict(spaces=spaces, privileged=privileged):
            return {
                name: public_part(part, observation[name]) for name, part in spaces if name not in privileged
            }
        case Tuple(spaces=inner):
            return tuple(public_part(part, value) for part, value in zip(inner, observation, strict=True))
    return observation


def with_privileged_zeros(space: ObservationSpace, observation: Any, leading: tuple[int, ...]) -> Any:
    """Fills the privileged parts of an observation with zeros.

    Takes an observation of `public(space)` or of `space`, and returns one of `space`. Parts are
    `[*leading, ...]`.

    >>> with_privileged_zeros(Dict({"a": Discrete(2), "b": Discrete(3)}, privileged=("b",)), {"a": 1}, ())
    {'a': 1, 'b': Array(0, dtype=int32)}
    """
    match space:
        case Dict(spaces=spaces, privileged=privileged):
            return {
                name: zeros(part, leading)
                if name in privileged
                else with_privileged_zeros(part, observation[name], leading)
                for name, part in spaces
            }
        case Tuple(spaces=inner):
            return tuple(
                with_privileged_zeros(part, value, leading)
                for part, value in zip(inner, observation, strict=True)
            )
    return observation
