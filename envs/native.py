"""Descriptions of a library's own observations and actions, and conversion from and to fdg's.

Compiled programs use observations and actions of `envs.spaces`. `run.policy` and exported files use the
library's: `Discrete` with `start`, parts, `MultiBinary`, texts and raw `action_mask`s. For JAX environments
both are the same.

A *description* is plain data that a file can store: `{"parts": {name: description}}` (with `keys`, if some of
the library's keys are not texts), `{"parts": [...]}`, or for one array

- `name`: unique among the arrays of the observation or the action;
- `shape`: `["N", ...]` for N environments;
- `dtype`: the library's dtype; `jax_dtype`: the dtype in the compiled program;
- `kind`: the type of its space, and the space's parameters: `low`, `high` (None: unbounded); `n`, `start`;
  `nvec`, `start`; `length` of a text in bytes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from envs import composite
from envs.environment import num_agents
from envs.gymnasium_codec import jax_dtype, kind, text_length
from envs.joined import Joined
from envs.observations import MaskedObservation

Description = dict[str, Any]  # plain data, as above

# Names of other arguments and results, which no array may have.
_RESERVED = re.compile(r"action|(next_)?memory_\d+|seed|start|mask")


class Native(NamedTuple):
    """Observations and actions of an environment's library, and their conversion in a program."""

    observation: Description
    action: Description
    # (arrays `[N, ...]` in the order of the description, mask `[N, ...]` or None) -> `envs.Observation`
    encode: Callable[[Sequence[jax.Array], Any], Any]
    # actions `[N, ...]` -> arrays in the order of the action's description
    decode: Callable[[jax.Array], Sequence[jax.Array]]
    # N -> the memory of `apply_wrappers` before the first observation
    initial_memory: Callable[[int], Any] = lambda count: ()
    # (memory, start `[N]` bool, observation) -> (memory, observation as the wrappers change it)
    apply_wrappers: Callable[[Any, jax.Array, Any], tuple[Any, Any]] = lambda memory, _, seen: (memory, seen)


def native(env: Any) -> Native:
    """The `Native` of an environment: its own (`env.native`), or one derived from its spaces.

    >>> import envs
    >>> native(envs.make("CartPole-v1")).action["n"]
    2
    """
    of_library: Native | None = getattr(env, "native", None)
    return of_spaces(env) if of_library is None else of_library


def of_spaces(env: Any) -> Native:
    """The `Native` of an environment in JAX: the spaces without the parts that only critics see."""
    count = num_agents(env)
    agents = () if count is None else (count,)
    space = composite.public(env.observation_space)
    structure = jax.tree.structure(composite.tree(space))

    def encode(arrays: Sequence[jax.Array], mask: Any) -> Any:
        leading = (arrays[0].shape[0], *agents)
        public_part = jax.tree.unflatten(structure, arrays)
        observation = composite.with_privileged_zeros(env.observation_space, public_part, leading)
        return observation if mask is None else MaskedObservation(observation, mask)

    single = getattr(env, "single", None)
    joined = single if isinstance(single, Joined) and single.action_space == env.action_space else None
    actions = env.action_space if joined is None else joined.parts_of_action
    return Native(
        describe("observation", space, agents),
        describe("action", actions, agents),
        encode,
        lambda action: [action] if joined is None else jax.tree.leaves(joined.split(action)),
    )


def describe(root: str, space: Any, agents: tuple[int, ...] = ()) -> Description:
    """The description of a space, fdg's or Gymnasium's.

    A single array is named `root`. An observation's parts have their own names; `root.` comes before a name
    that is taken or reserved, and before the names of all parts of an action.

    >>> describe("observation", composite.Dict({"a": composite.Discrete(2)}))["parts"]["a"]["name"]
    'a'
    """
    tree = _describe_space(space, agents)
    names: set[str] = set()
    for path, leaf in leaves(tree):
        name = ".".join(map(str, path))
        if not path:
            name = root
        elif root == "action" or name in names or _RESERVED.fullmatch(name):
            name = f"{root}.{name}"
        while name in names:
            name += "_"
        names.add(name)
        leaf["name"] = name
    return tree


def leaves(
    description: Description, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Description]]:
    """The arrays of a description in order, with their paths."""
    if "parts" not in description:
        yield path, description
        return
    for key, part in _parts(description):
        yield from leaves(part, (*path, key))


def _parts(description: Description) -> Iterator[tuple[Any, Description]]:
    """The parts with their keys or positions."""
    parts = description["parts"]
    if not isinstance(parts, dict):
        return iter(enumerate(parts))
    return zip(description.get("keys", parts), parts.values(), strict=True)


def rebuilt(description: Description, arrays: Iterator[Any]) -> Any:
    """The dictionaries and tuples of a description, filled with arrays; the inverse of `leaves`."""
    if "parts" not in description:
        return next(arrays)
    values = {key: rebuilt(part, arrays) for key, part in _parts(description)}
    return values if isinstance(description["parts"], dict) else tuple(values.values())


def _describe_space(space: Any, agents: tuple[int, ...]) -> Description:
    """As `describe`, without names."""
    name = kind(space)
    if name == "Dict":
        keys = list(dict(space.spaces))
        parts = {str(key): _describe_space(part, agents) for key, part in dict(space.spaces).items()}
        return {"parts": parts} if keys == [*parts] else {"parts": parts, "keys": keys}
    if name == "Tuple":
        return {"parts": [_describe_space(part, agents) for part in space.spaces]}
    if space.dtype is None or np.issubdtype(np.dtype(space.dtype), np.str_):
        length = text_length(space)
        return _describe_array("Text", (length,), np.dtype(np.uint8), length=length)
    dtype, shape = np.dtype(space.dtype), (*agents, *space.shape)
    match name:
        case "Discrete":
            return _describe_array(name, shape, dtype, n=int(space.n), start=int(getattr(space, "start", 0)))
        case "MultiDiscrete":
            nvec = np.asarray(space.nvec)
            start = np.broadcast_to(getattr(space, "start", 0), nvec.shape)
            return _describe_array(name, shape, dtype, nvec=nvec.tolist(), start=start.tolist())
        case "MultiBinary":
            return _describe_array(name, shape, dtype)
    low, high = (np.asarray(getattr(space, f"{end}_array", getattr(space, end))) for end in ("low", "high"))
    entry = _describe_array("Box", shape, dtype, low=_json_bounds(low), high=_json_bounds(high))
    limits = np.iinfo(np.int32)
    if dtype.kind in "iu" and dtype.itemsize > 4 and (low.min() < limits.min or high.max() > limits.max):
        entry["jax_dtype"] = "float32"  # int32 is too small, and programs convert `Box`es to float32
    return entry


def _describe_array(kind: str, shape: tuple[int, ...], dtype: np.dtype, **parameters: Any) -> Description:
    """The description of one array; `describe` fills in its name."""
    return {
        "name": "",
        "shape": ["N", *map(int, shape)],
        "dtype": dtype.name,
        "jax_dtype": jax_dtype(dtype),
        "kind": kind,
        **parameters,
    }


def _json_bounds(values: np.ndarray) -> Any:
    """Bounds for JSON: one number if all are equal, else nested lists; None in place of infinity."""
    if values.dtype == np.uint64:  # JSON readers may not take integers of 64 bits
        values = values.astype(np.float64)
    finite = values.astype(object)
    finite[~np.isfinite(values)] = None
    if values.size and (values == values.flat[0]).all():
        return finite.flat[0]
    return finite.tolist()
