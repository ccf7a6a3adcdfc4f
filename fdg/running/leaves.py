"""Handles the leaves of a state between runs: aliased buffers, weak types, and copies on several groups."""

import collections
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdg.arguments import quoted
from fdg.errors import kind_of
from fdg.jax_internals import internal
from fdg.keys import to_data
from fdg.placing.scheduling.schedule import Value
from fdg.running.steps import Memory, StepBuilder
from fdg.running.transfers import Transfer


class ReturnedArrays:
    """Weak references to the arrays that a call returned."""

    def __init__(self, arrays: Sequence[jax.Array] = ()):
        self._arrays = [weakref.ref(array) for array in arrays]

    def matches(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether these arrays are the objects that the call returned."""
        return len(arrays) == len(self._arrays) and all(
            reference() is array for reference, array in zip(self._arrays, arrays, strict=True)
        )


def difference(state: Any, expected: Any) -> str:
    """Describes how a state differs from the expected shapes, by the first leaf of each kind of difference.

    >>> shapes = jax.eval_shape(lambda: {"w": jnp.zeros(3), "n": 0})
    >>> difference({"w": jnp.zeros(4), "n": 0}, shapes)
    "state['w'] is float32[4], not float32[3]"
    >>> difference({"v": 0, "u": 0, "n": 0}, shapes)
    "it has state['u'] (and 1 more), and lacks state['w']"
    """
    state_leaves, expected_leaves = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (state, expected)
    )
    if not state_leaves or "" in state_leaves:  # not a pytree whose arrays have names
        return f"it is {quoted(state)}"
    unmatched = [
        f"{verb} state{names[0]}{f' (and {len(names) - 1} more)' if names[1:] else ''}"
        for verb, names in (
            ("has", [name for name in state_leaves if name not in expected_leaves]),
            ("lacks", [name for name in expected_leaves if name not in state_leaves]),
        )
        if names
    ]
    if unmatched:
        return f"it {', and '.join(unmatched)}"
    for name, leaf in state_leaves.items():
        array = as_array(leaf)
        actual, required = quoted(leaf) if array is None else kind_of(array), kind_of(expected_leaves[name])
        if actual != required:
            return f"state{name} is {actual}, not {required}"
    return f"it is a {type(state).__name__}, not a {type(expected).__name__}"


def as_array(leaf: Any) -> jax.Array | None:
    """A leaf of a user's state as an array; None if JAX cannot convert it."""
    try:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except (TypeError, ValueError, OverflowError):
        return None


def copied(state: Any) -> Any:
    """A copy of a state, which is ready; what `Engine.run` refuses stays as it is."""

    def copy(leaf: Any) -> Any:
        array = as_array(leaf)
        return leaf if array is None or array.is_deleted() else jnp.copy(array).block_until_ready()

    try:
        leaves, structure = jax.tree.flatten(state)
    except Exception:  # a user's container may raise anything
        return state
    return jax.tree.unflatten(structure, map(copy, leaves))


def typed_like(shapes: Sequence[Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays with the weak types of `shapes`, set in place: the caller must hold the only references.

    Compiled programs return strong types; `jax.jit` sets weak types from the traced jaxpr.
    """
    return [
        array
        if shape.weak_type == getattr(array, "weak_type", False)  # keys lack this attribute
        else _with_weak_type(array, shape.weak_type)
        for shape, array in zip(shapes, arrays, strict=True)
    ]


def _with_weak_type(array: Any, weak: bool) -> jax.Array:
    try:
        array.aval = array.aval.update(weak_type=weak)
    except AttributeError:  # from JAX 0.11 on, the type cannot be set; the array is converted instead
        convert = internal("lax.lax", "_convert_element_type", "keep the weak types of a state")
        return convert(array, array.dtype, weak_type=weak)
    return array


def without_aliases(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies each leaf that shares a buffer with an earlier one, so that all leaves can be donated.

    JAX refuses to donate a buffer twice on one device, and crashes if that happens on several devices. States
    often hold an array twice, such as the initial parameters of a target network.
    """
    seen_buffers: set[tuple[int, int]] = set()
    results = []
    for leaf in leaves:
        shards = [shard.data for shard in to_data(leaf).addressable_shards]
        buffers = {(shard.device.id, shard.unsafe_buffer_pointer()) for shard in shards}
        results.append(leaf if seen_buffers.isdisjoint(buffers) else jnp.copy(leaf))
        seen_buffers |= buffers
    return results


class LeafCopies:
    """Copies of state leaves that several groups hold: one copy for each of these groups, on its devices.

    `leaves` has the values of each leaf, one per group that holds the leaf. The first value is the primary
    copy, which a run returns. The other copies are kept for the state that the last run returned. If a run
    starts from another state, they are made from its leaves.
    """

    def __init__(self, leaves: Sequence[Sequence[Value]], builder: StepBuilder):
        self._slots = [[builder.slot(value) for value in values] for values in leaves]
        # (source group, target group) -> (index of the leaf, primary copy, other copy)
        by_groups: dict[tuple[str, str], list[tuple[int, Value, Value]]] = collections.defaultdict(list)
        for i, (primary, *copies) in enumerate(leaves):
            for value in copies:
                by_groups[primary.group, value.group].append((i, primary, value))
        # (indices of leaves, slots of their copies, the transfer that copies them)
        self._copiers: list[tuple[list[int], list[int], Transfer]] = []
        for triples in by_groups.values():
            transfer = builder.transfer([(a, b) for _, a, b in triples], 0)
            if transfer is not None:
                slots = [builder.slot(b) for *_, b in triples]
                self._copiers.append(([i for i, *_ in triples], slots, transfer))
        # The last returned leaves, and their copies as (slot, array); a run that fails returns none.
        self._kept: tuple[ReturnedArrays, list[tuple[int, Any]]] = ReturnedArrays(), []

    def fill(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Puts each leaf into its primary slot, and its copies into its other slots."""
        for leaf, slots in zip(leaves, self._slots, strict=True):
            memory.arrays[slots[0]] = leaf
        (returned, copies), self._kept = self._kept, (ReturnedArrays(), [])
        if returned.matches(leaves):
            for slot, array in copies:
                memory.arrays[slot] = array
            return
        for positions, target_slots, copy in self._copiers:
            for slot, array in zip(target_slots, copy([leaves[i] for i in positions]), strict=True):
                memory.arrays[slot] = array

    def primary(self, memory: Memory) -> list[jax.Array | None]:
        """The primary copies; None for a leaf that only other processes hold."""
        return [memory.arrays[slots[0]] for slots in self._slots]

    def keep(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Keeps the copies, in case the next call gets these leaves."""
        copies = [(slot, memory.arrays[slot]) for slots in self._slots for slot in slots[1:]]
        self._kept = ReturnedArrays(leaves), [pair for pair in copies if pair[1] is not None]


def unique_names(names: Iterable[str]) -> list[str]:
    """Appends a number to repeated names: in the state {"a/b": 1, "a": {"b": 2}}, two leaves are named a/b.

    >>> unique_names(["a/b", "c", "a/b"])
    ['a/b', 'c', 'a/b#2']
    """
    counts: collections.Counter[str] = collections.Counter()
    unique = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique
