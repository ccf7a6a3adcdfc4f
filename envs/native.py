"""Observations and actions as an environment's own library gives and takes them, described and converted.

Programs see observations and give actions as `envs.spaces` has them. A policy at work, and a file of one,
take and give what the environment does that was named: categories that begin where its space says, parts,
bits, texts and a raw `action_mask`. For an environment of JAX's that is the same.

A *description* is plain data, which a file can hold: `{"parts": {name: description}}` or `{"parts": [...]}`
for what has parts, else of one array

- `name`: of the array, among all of the observation or the action;
- `shape`: `["N", ...]`, N environments;
- `dtype`: the library's; `jax_dtype`: of the array that a program takes or gives;
- `kind`: of its space, and that space's numbers: `low`, `high` (None: no bound); `n`, `start`; `nvec`,
  `start`; `length`, in bytes, of a text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from envs import composite
from envs.environment import num_agents
from envs.gymnasium_spaces import jax_dtype, text_length
from envs.joined import Joined
from envs.observations import MaskedObservation

Description = dict[str, Any]

_TAKEN = re.compile(r"action|(next_)?memory_\d+|seed|start|mask")  # names of other arguments and results


class Native(NamedTuple):
    """What an environment's library gives and takes, and how a program converts it."""

    observation: Description
    action: Description
    encode: Callable[[Sequence[jax.Array], Any], Any]  # arrays of the observation's description, in its
    # order, `[N, ...]` each, and a mask `[N, ...]` or None, to an `envs.Observation`
    decode: Callable[[jax.Array], Sequence[jax.Array]]  # actions `[N, ...]` to arrays of the description
    kept: Callable[[int], Any] = lambda count: ()  # what `see` remembers of N environments, at first
    see: Callable[[Any, jax.Array, Any], tuple[Any, Any]] = lambda kept, start, seen: (kept, seen)
    # what it remembers, and what wrappers show, where `start [N]` says that an episode begins


def native(env: Any) -> Native:
    """The borders of an environment.

    >>> from envs.spaces import Discrete
    >>> described("action", Discrete(2))["n"]
    2
    """
    own = getattr(env, "native", None)
    return of_spaces(env) if own is None else own


def of_spaces(env: Any) -> Native:
    """Those of an environment whose library is JAX: of its own spaces, without what only critics see."""
    count = num_agents(env)
    agents = () if count is None else (count,)
    space = composite.public(env.observation_space)
    structure = jax.tree.structure(composite.tree(space))

    def encode(arrays: Sequence[jax.Array], mask: Any) -> Any:
        leading = (arrays[0].shape[0], *agents)
        seen = jax.tree.unflatten(structure, arrays)
        observation = composite.with_zeros(env.observation_space, seen, leading)
        return observation if mask is None else MaskedObservation(observation, mask)

    single = getattr(env, "single", None)
    joined = single if isinstance(single, Joined) and single.action_space == env.action_space else None
    acting = env.action_space if joined is None else joined.parts_of_action
    return Native(
        described("observation", space, agents),
        described("action", acting, agents),
        encode,
        lambda action: [action] if joined is None else jax.tree.leaves(joined.apart(action)),
    )


def described(root: str, space: Any, agents: tuple[int, ...] = ()) -> Description:
    """The description of a space, ours or Gymnasium's; `root` names it, or is in front of names taken.

    >>> described("observation", composite.Dict({"a": composite.Discrete(2)}))["parts"]["a"]["name"]
    'a'
    """
    found = _described(space, agents)
    taken: set[str] = set()
    for path, leaf in leaves(found):
        name = ".".join(map(str, path))
        if not path:
            name = root
        elif root == "action" or name in taken or _TAKEN.fullmatch(name):
            name = f"{root}.{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        leaf["name"] = name
    return found


def leaves(
    description: Description, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Description]]:
    """The arrays of a description, in order, and where each is: names and positions of parts."""
    parts = description.get("parts")
    if parts is None:
        yield path, description
        return
    for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
        yield from leaves(part, (*path, key))


def rebuilt(description: Description, arrays: Iterator[Any]) -> Any:
    """Dictionaries and tuples of a description, with arrays in their places."""
    parts = description.get("parts")
    if parts is None:
        return next(arrays)
    if isinstance(parts, dict):
        return {key: rebuilt(part, arrays) for key, part in parts.items()}
    return tuple(rebuilt(part, arrays) for part in parts)


def _described(space: Any, agents: tuple[int, ...]) -> Description:
    kind = type(space).__name__
    if kind == "Dict":
        return {"parts": {key: _described(part, agents) for key, part in dict(space.spaces).items()}}
    if kind == "Tuple":
        return {"parts": [_described(part, agents) for part in space.spaces]}
    if space.dtype is None or np.issubdtype(np.dtype(space.dtype), np.str_):
        length = text_length(space)
        return _array("Text", (length,), np.dtype(np.uint8), length=length)
    dtype, shape = np.dtype(space.dtype), (*agents, *space.shape)
    match kind:
        case "Discrete":
            return _array(kind, shape, dtype, n=int(space.n), start=int(getattr(space, "start", 0)))
        case "MultiDiscrete":
            nvec = np.asarray(space.nvec)
            start = np.broadcast_to(getattr(space, "start", 0), nvec.shape)
            return _array(kind, shape, dtype, nvec=nvec.tolist(), start=start.tolist())
        case "MultiBinary":
            return _array(kind, shape, dtype)
    low, high = (np.asarray(getattr(space, f"{end}_array", getattr(space, end))) for end in ("low", "high"))
    found = _array("Box", shape, dtype, low=_bound(low), high=_bound(high))
    limits = np.iinfo(np.int32)
    if dtype.kind in "iu" and dtype.itemsize > 4 and (low.min() < limits.min or high.max() > limits.max):
        found["jax_dtype"] = "float32"  # amounts, of which a program would make that anyway
    return found


def _array(kind: str, shape: tuple[int, ...], dtype: np.dtype, **numbers: Any) -> Description:
    return {
        "name": "",
        "shape": ["N", *map(int, shape)],
        "dtype": dtype.name,
        "jax_dtype": jax_dtype(dtype),
        "kind": kind,
        **numbers,
    }


def _bound(values: np.ndarray) -> Any:
    """One number where all are alike, else nested lists; None for none."""
    if values.dtype == np.uint64:  # whose largest files do not hold
        values = values.astype(np.float64)
    finite = values.astype(object)
    finite[~np.isfinite(values)] = None
    if values.size and (values == values.flat[0]).all():
        return finite.flat[0]
    return finite.tolist()
