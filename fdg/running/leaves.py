"""The leaves of a state between calls: aliased buffers, weak types, and copies on several groups."""

import collections
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg.arguments import quoted
from fdg.jax_internals import internal
from fdg.keys import words
from fdg.placing.scheduling.schedule import Value
from fdg.running.steps import Interpreter, Memory
from fdg.running.transfers import Transfer


class ReturnedArrays:
    """Weak references to the arrays that a call returned."""

    def __init__(self, arrays: Sequence[jax.Array] = ()):
        self._arrays = [weakref.ref(array) for array in arrays]

    def matches(self, arrays: Sequence[jax.Array]) -> bool:
        """True if these are the arrays that the call returned (the same objects)."""
        return len(arrays) == len(self._arrays) and all(
            known() is array for known, array in zip(self._arrays, arrays, strict=True)
        )


def difference(given: Any, expected: Any) -> str:
    """Describes how a state differs from the expected shapes, by the first leaf of each kind of difference.

    >>> shapes = jax.eval_shape(lambda: {"w": jnp.zeros(3), "n": 0})
    >>> difference({"w": jnp.zeros(4), "n": 0}, shapes)
    "state['w'] is float32[4], not float32[3]"
    >>> difference({"v": 0, "u": 0, "n": 0}, shapes)
    "it has state['u'] (and 1 more), and lacks state['w']"
    """
    here, there = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (given, expected)
    )
    if not here or "" in here:  # no pytree of arrays by names
        return f"it is {quoted(given)}"
    apart = [
        f"{verb} state{names[0]}{f' (and {len(names) - 1} more)' if names[1:] else ''}"
        for verb, names in (
            ("has", [name for name in here if name not in there]),
            ("lacks", [name for name in there if name not in here]),
        )
        if names
    ]
    if apart:
        return f"it {', and '.join(apart)}"
    for name, leaf in here.items():
        found, wanted = (
            f"{jnp.asarray(x).dtype if not hasattr(x, 'dtype') else x.dtype}{list(jnp.shape(x))}"
            for x in (leaf, there[name])
        )
        if found != wanted:
            return f"state{name} is {found}, not {wanted}"
    return f"it is a {type(given).__name__}, not a {type(expected).__name__}"


def typed_like(shapes: Sequence[Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Gives arrays the weak types of `shapes`, in place: no other code may hold these arrays.

    Compiled programs return strong types; `jax.jit` sets weak types from the traced jaxpr.
    """
    return [
        array
        if shape.weak_type == getattr(array, "weak_type", False)  # keys have none
        else _with_weakness(array, shape.weak_type)
        for shape, array in zip(shapes, arrays, strict=True)
    ]


def _with_weakness(array: Any, weak: bool) -> jax.Array:
    try:
        array.aval = array.aval.update(weak_type=weak)
    except AttributeError:  # JAX 0.11 on: the type cannot be set, but converted to
        convert = internal("lax.lax", "_convert_element_type", "keep the weak types of a state")
        return convert(array, array.dtype, weak_type=weak)
    return array


def without_aliases(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies each leaf that shares a buffer with an earlier one, so that all leaves can be donated.

    JAX refuses to donate a buffer twice on one device, and crashes on several. States often hold an array
    twice, such as the first parameters of a target network.
    """
    taken: set[tuple[int, int]] = set()
    apart = []
    for leaf in leaves:
        shards = [shard.data for shard in words(leaf).addressable_shards]
        memory = {(shard.device.id, shard.unsafe_buffer_pointer()) for shard in shards}
        apart.append(leaf if taken.isdisjoint(memory) else jnp.copy(leaf))
        taken |= memory
    return apart


class LeafCopies:
    """Copies of leaves that several groups hold, each on its own devices.

    The copies of the last returned state are kept; for any other state they are made from its leaves.
    `leaves` are the places of each leaf; the first is the primary copy, which is returned.
    """

    def __init__(self, leaves: Sequence[Sequence[Value]], interpreter: Interpreter):
        self._slots = [[interpreter.slot(value) for value in places] for places in leaves]
        together: dict[tuple[str, str], list[tuple[int, Value, Value]]] = collections.defaultdict(list)
        for i, (first, *others) in enumerate(leaves):
            for value in others:
                together[first.group, value.group].append((i, first, value))
        self._copiers: list[tuple[list[int], list[int], Transfer]] = []
        for rows in together.values():
            transfer = interpreter.transfer([(a, b) for _, a, b in rows], 0)
            if transfer is not None:
                slots = [interpreter.slot(b) for *_, b in rows]
                self._copiers.append(([i for i, *_ in rows], slots, transfer))
        self._returned = ReturnedArrays()
        self._kept: list[tuple[int, Any]] = []

    def fill(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Puts the leaves into their primary slots and copies into their other slots."""
        for leaf, slots in zip(leaves, self._slots, strict=True):
            memory.arrays[slots[0]] = leaf
        kept, self._kept = self._kept, []
        if self._returned.matches(leaves):
            for slot, array in kept:
                memory.arrays[slot] = array
            return
        for positions, targets, copy in self._copiers:
            for slot, array in zip(targets, copy([leaves[i] for i in positions]), strict=True):
                memory.arrays[slot] = array

    def take(self, memory: Memory) -> list[jax.Array | None]:
        """The primary copies; None for a leaf of other processes."""
        return [memory.arrays[slots[0]] for slots in self._slots]

    def keep(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Keeps the copies for the case that the next call gets these leaves."""
        self._returned = ReturnedArrays(leaves)
        others = [slot for slots in self._slots for slot in slots[1:]]
        self._kept = [(slot, array) for slot in others if (array := memory.arrays[slot]) is not None]


def unique_names(names: Iterable[str]) -> list[str]:
    """Appends a number to repeated names: {"a/b": 1, "a": {"b": 2}} is a legal state.

    >>> unique_names(["a/b", "c", "a/b"])
    ['a/b', 'c', 'a/b#2']
    """
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
