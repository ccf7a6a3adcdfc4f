"""The leaves of a state that come and go: whose memory they are in, and further groups' copies of them."""

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


class Remembered:
    """Arrays that were handed out; does not keep them."""

    def __init__(self, arrays: Sequence[jax.Array] = ()):
        self._arrays = [weakref.ref(array) for array in arrays]

    def matches(self, arrays: Sequence[jax.Array]) -> bool:
        """True if these are the arrays that were handed out: the same objects."""
        return len(arrays) == len(self._arrays) and all(
            known() is array for known, array in zip(self._arrays, arrays, strict=True)
        )


def difference(given: Any, expected: Any) -> str:
    """How a state differs from the shapes of another: the first leaf of each kind by its name.

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
    """The same arrays, which no other code has yet, weakly typed where their shapes are.

    What XLA makes has no such type, and plain JAX takes it from what was traced.
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
    """The leaves, but a copy of each that lies, in part at least, in an earlier one's memory.

    All are about to be donated, and memory cannot be given up twice: JAX refuses that on one device, and
    crashes on several. An array is often there twice, such as a target network's first parameters.
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
    """Copies of leaves on further groups than the one of record.

    They are made anew for a state that comes from elsewhere, and kept for the one that was returned last.
    """

    def __init__(self, leaves: Sequence[Sequence[Value]], interpreter: Interpreter):
        """For executions.

        Args:
          leaves: where each leaf lives, the place of record first.
        """
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
        self._returned = Remembered()
        self._kept: list[tuple[int, Any]] = []

    def fill(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Puts leaves where each is of record, and copies of them in their other places."""
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
        """The leaves of record, None for one that is in other processes."""
        return [memory.arrays[slots[0]] for slots in self._slots]

    def keep(self, memory: Memory, leaves: Sequence[jax.Array]) -> None:
        """Keeps the copies in case these leaves, which are about to be returned, come back."""
        self._returned = Remembered(leaves)
        others = [slot for slots in self._slots for slot in slots[1:]]
        self._kept = [(slot, array) for slot in others if (array := memory.arrays[slot]) is not None]


def unique_names(names: Iterable[str]) -> list[str]:
    """Names with a number behind those that were there before: {"a/b": 1, "a": {"b": 2}} is a legal state.

    >>> unique_names(["a/b", "c", "a/b"])
    ['a/b', 'c', 'a/b#2']
    """
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
