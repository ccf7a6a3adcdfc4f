"""Deployed policies: observations of the environment's own library in, its own actions out, as NumPy arrays.

The base of `Acting` (an algorithm with its state) and `exported.Exported` (a file). Both know the environment
only by its description (`envs.native`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from envs import MaskedObservation, TimeStep
from envs.environment import EpisodeState
from envs.gymnasium_spaces import encode_texts, exact
from envs.native import Description, leaves, native, rebuilt
from envs.wrappers import WrapperState
from fdg import jaxprs
from fdg.arguments import quoted
from fdg.errors import FdgError

_DTYPE = re.compile(r"bool|(u?int|float)(8|16|32|64)|bfloat16")
_MASK = ("action_mask",)  # the mask's path in a library's observation


class Deployed:
    """A policy for one environment, with a memory between calls.

    `action` is None in files of earlier versions, whose actions are a single array.
    """

    def __init__(self, whose: str, observation: Description, action: Description | None):
        self._whose, self._action = whose, action
        self._inputs = [_Input.of(path, leaf) for path, leaf in leaves(observation)]
        self._outputs = [_Output.of(leaf) for _, leaf in leaves(action or {})] if action else None
        self._has_mask = any(one.path == _MASK for one in self._inputs)
        self.memory: Any = None  # of `N` environments; None before the first call
        self._count: int | None = None  # the memory's number of environments
        self._going_on = np.zeros(0, bool)
        self._calls = 0  # seeds sampled actions

    def reset(self) -> None:
        """Clears the memory: the next observation starts an episode."""
        self.memory = self._count = None

    def _empty_memory(self, count: int) -> Any:
        """The memory of `count` environments."""
        raise NotImplementedError

    def _answer(self, observation: Any, start: Any, call: Callable[..., tuple[Sequence[Any], Any]]) -> Any:
        """An action for an observation, or actions for a batch of them.

        `call` maps `(arrays, mask, memory, starts [N])` to the arrays of the action and the memory.
        """
        arrays, mask, single = self._arrays(observation)
        count = len(arrays[0])
        if count != self._count:
            self.memory, self._count = self._empty_memory(count), count
            self._going_on = np.zeros(count, bool)
            begins = np.ones(count, bool)
        elif start is None:
            begins = self._going_on
        else:
            begins = np.array(np.broadcast_to(np.asarray(start, bool), count))
        results, self.memory = call(arrays, mask, self.memory, begins)
        self._calls += 1
        found = [np.asarray(result) for result in results]
        if self._outputs is None or self._action is None:
            return found[0][0] if single else found[0]
        own = [output.own(array) for output, array in zip(self._outputs, found, strict=True)]
        if single:
            own = [output.first(array) for output, array in zip(self._outputs, own, strict=True)]
        return rebuilt(self._action, iter(own))

    def _arrays(self, observation: Any) -> tuple[list[np.ndarray], Any, bool]:
        """The arrays of an observation, its mask, and whether it is of a single environment."""
        mask: Any = None
        if isinstance(observation, MaskedObservation):
            observation, mask = observation
            if self._has_mask:
                observation, mask = {**observation, _MASK[0]: mask}, None
        arrays: list[np.ndarray] = []
        single: bool | None = None
        for one in self._inputs:
            try:
                array, alone = one.array(observation, self._whose)
            except FdgError as error:
                fix = _part_of(observation, one.path)
                raise (FdgError(fix) if fix else error) from None
            if single is not None and (alone is not single or len(array) != len(arrays[0])):
                raise FdgError(
                    f"the parts of an observation of {self._whose} are of different numbers of them"
                )
            arrays.append(array)
            single = alone
        if mask is not None:
            mask = np.asarray(mask, bool)
            mask = mask[None] if single else mask
        return arrays, mask, bool(single)


def _part_of(given: Any, path: tuple[Any, ...]) -> str:
    """Names the part to pass if the whole result of `reset` or `step` was given as an observation."""
    if isinstance(given, EpisodeState | WrapperState):
        return "this is the state: reset gives (state, observation), in that order: give the observation"
    if isinstance(given, TimeStep):
        return "this is what step gives: give its observation, step.observation"
    if not isinstance(given, tuple) or not given:
        return ""
    if isinstance(given[-1], Mapping) and len(given) in (2, 4, 5):
        call = "pair (observation, info) that reset" if len(given) == 2 else "tuple that step"
        return f"this is the {call} of Gymnasium gives: give the observation, its first"
    if len(given) != 2:
        return ""
    if isinstance(given[1], TimeStep):
        return "this is the pair (state, step) that step gives: give step.observation, of its second"
    if path and isinstance(path[0], int):  # its space is a separate pair
        return ""
    if isinstance(given[1], int | float | np.generic):
        return ""
    return "this is the pair (state, observation) that reset gives: give the observation, its second"


@dataclasses.dataclass(frozen=True)
class _Input:
    """An array of an observation: its path, shape and dtype."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    program_dtype: np.dtype
    lowest: Any  # category, where it is one, else None
    count: Any
    text: int | None  # bytes of a text; None for others

    @classmethod
    def of(cls, path: tuple[Any, ...], leaf: Description) -> "_Input":
        lowest, count = _categories(leaf)
        program = _dtype(leaf.get("jax_dtype", leaf["dtype"]))
        text = leaf["length"] if leaf.get("kind") == "Text" else None
        return cls(path, tuple(leaf["shape"][1:]), _dtype(leaf["dtype"]), program, lowest, count, text)

    def array(self, observation: Any, whose: str) -> tuple[np.ndarray, bool]:
        """The array `[N, *shape]` of an observation, and whether it is of a single environment."""
        value = observation
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise FdgError(
                    f"an observation of {whose} has no part {key!r}: give all that its space has"
                ) from None
        if isinstance(value, jax.core.Tracer):
            raise FdgError(
                "run.policy takes arrays, and this one is being traced: inside jit, use run.actor(), whose"
                " act(memory, observation, start, keys, greedy) is a pure function"
            )
        of = f"{whose}{''.join(f'[{key!r}]' for key in self.path)}"
        array = self._checked(value, of)
        single = array.shape == self.shape
        if not single and (not array.ndim or array.shape[1:] != self.shape):
            raise FdgError(
                f"an observation of shape {list(array.shape)}: those of {of} are {list(self.shape)}, and"
                f" batches of them {['N', *self.shape]}".replace("'N'", "N")
            )
        if array.dtype != self.program_dtype:
            array = array.astype(self.program_dtype)
        return (array[None] if single else array), single

    def _checked(self, value: Any, of: str) -> np.ndarray:
        """The value as an array of the library's dtype."""
        try:
            if self.text is not None and np.asarray(value).dtype.kind not in "ui":
                value = encode_texts(value, self.text)
            given = np.asarray(value)
            array = given if given.dtype == self.dtype else given.astype(self.dtype)
        except (TypeError, ValueError) as error:
            raise FdgError(
                f"an observation of {of} is an array {list(self.shape)}, and no {quoted(value)}: give the"
                f" numbers alone"
            ) from error
        if array is not given and array.dtype.kind in "iu" and not np.array_equal(array, given):
            raise FdgError(
                f"an observation of {of} has {given[array != given].flat[0]}, which its space's dtype"
                f" {self.dtype} cannot hold"
            )
        if self.lowest is not None:
            outside = (array < self.lowest) | (array >= self.lowest + self.count)
            if outside.any():
                raise FdgError(
                    f"an observation of {of} has {array[outside].flat[0]}, which is none of its categories"
                )
        return array


@dataclasses.dataclass(frozen=True)
class _Output:
    """An array of an action."""

    dtype: np.dtype
    lowest: Any  # the lowest category; None for no category
    low: Any
    high: Any
    is_category: bool  # a single category, which libraries take as a scalar

    @classmethod
    def of(cls, leaf: Description) -> "_Output":
        low, high = (np.array(leaf.get(end), np.float64) for end in ("low", "high"))  # NaN for none
        return cls(_dtype(leaf["dtype"]), _categories(leaf)[0], low, high, leaf.get("kind") == "Discrete")

    def first(self, array: np.ndarray) -> Any:
        """The first element of an array `[1, ...]`."""
        return array[0] if self.is_category else array[0, ...]

    def own(self, array: np.ndarray) -> np.ndarray:
        """The array in the library's format."""
        if array.dtype == self.dtype:
            return array
        if self.lowest is not None:  # programs use 32 bits, in which a high start overflows
            return (self.lowest + ((array.astype(np.int64) - self.lowest) & 0xFFFFFFFF)).astype(self.dtype)
        return exact(array, self.dtype, self.low, self.high)


def _categories(leaf: Description) -> tuple[Any, Any]:
    """The lowest category and the number of categories; None if there are none."""
    if "start" not in leaf:
        return None, None
    start, count = np.asarray(leaf["start"]), np.asarray(leaf["n"] if "n" in leaf else leaf["nvec"])
    if start.dtype.kind != "i" or count.dtype.kind != "i" or start.shape != count.shape:
        raise ValueError(f"categories {count.tolist()} from {start.tolist()} on")
    return start.astype(np.int64), count.astype(np.int64)


def _dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"a dtype {name!r}")
    return np.dtype(name)


_MAX_EMBEDDED_BYTES = 1 << 20  # parameters up to this size become constants of the compiled program


class Acting(Deployed):
    """A trained agent that maps observations to actions, both NumPy arrays.

    Observations are as `reset` and `step` of the environment's library return them; actions are as its `step`
    takes them (`envs.native`). The first call compiles. The agent keeps its memory between calls, for as many
    environments as the last call had; `reset()` or `start` clears it where an episode begins.

    Args:
      algorithm: defines how to act (`actor`) and the environment (`env`).
      state: the algorithm's state of one agent.
      greedy: whether to take the most probable action, instead of sampling as in training.
      seed: seed for sampled actions.
    """

    def __init__(self, algorithm: Any, state: Any, greedy: bool = True, seed: int = 0):
        self._native = native(algorithm.env)
        super().__init__(algorithm.env.name, self._native.observation, self._native.action)
        self.greedy = greedy
        self._algorithm, self._state = algorithm, state
        self._programs: dict[Any, Callable[..., Any]] = {}
        key = jax.random.key(seed)
        self._key, self._kind = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)

    def __call__(self, observation: Any, greedy: bool | None = None, start: Any = None) -> Any:
        """An action for an observation, or actions for a batch of them.

        Args:
          observation: as the environment returns it: `[*obs]` for one environment, `[N, *obs]` for N; for
            several agents `[A, *obs]` or `[N, A, *obs]`. If it is a dictionary or tuple, its arrays have the
            leading axis `N`; parts that only critics see may be missing. An action mask is its part
            `action_mask`, or, for environments in JAX, an `envs.MaskedObservation`; without a mask, all
            actions are allowed.
          greedy: overrides the `greedy` of this object; None keeps it.
          start: bool, or `[N]` bools: whether an episode begins with this observation, which clears the
            memory. None: only in the first call, and when the number of environments changes.

        Returns:
          The action as the environment takes it: `[*action]` or `[N, *action]`; with several agents
          `[A, *action]` or `[N, A, *action]`.

        Raises:
          FdgError: the observation does not match the environment, or is traced.
        """
        chosen = self.greedy if greedy is None else bool(greedy)

        def call(*given: Any) -> Any:
            program = self._programs.get((chosen, given[1] is None))
            if program is None:
                program = self._programs[chosen, given[1] is None] = self._compiled(chosen, given)
            return program(*given, self._key, np.uint32(self._calls))

        return self._answer(observation, start, call)

    def _empty_memory(self, count: int) -> Any:
        return self._native.kept(count), self._algorithm.actor(self._state).memory(count)

    def _compiled(self, greedy: bool, given: tuple[Any, ...]) -> Callable[..., Any]:
        """Compiles `act`. Each argument costs time at every call, so only leaves that it reads are arguments.

        Up to `_MAX_EMBEDDED_BYTES`, leaves become constants of the program instead; larger constants would
        take seconds to compile.
        """
        leaves, structure = jax.tree.flatten(self._state)

        def act(read, arrays, mask, memory, start, key, calls):
            state = jax.tree.unflatten(structure, [read.get(i, x) for i, x in enumerate(leaves)])
            keys = jax.random.fold_in(jax.random.wrap_key_data(key, impl=self._kind), calls)
            keys = jax.random.split(keys, start.shape[0])
            observation = self._native.encode(arrays, mask)
            kept, observation = self._native.see(memory[0], start, observation)
            action, held = self._algorithm.actor(state).act(memory[1], observation, start, keys, greedy)
            return self._native.decode(action), (kept, held)

        every = dict(enumerate(leaves))
        needed = jaxprs.inputs_read(jax.make_jaxpr(act)(every, *given, self._key, np.uint32(0)))
        read = {i: x for i, x in every.items() if needed[i]}
        if sum(x.nbytes for x in read.values()) <= _MAX_EMBEDDED_BYTES:
            read = {}
        program = jax.jit(act)
        return lambda *given: program(read, *given)
