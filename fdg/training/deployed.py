"""Deployed policies: map observations to actions, as NumPy arrays in the format of the environment's library.

`Deployed` is the base of `Acting` (an algorithm with its state) and `exported.Exported` (a file). Both use
only a description of the environment (`envs.native`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algos.rollout import Actor
from envs import MaskedObservation, TimeStep
from envs.environment import EpisodeState
from envs.gymnasium_spaces import encode_texts, exact
from envs.native import Description, Native, leaves, native, rebuilt
from envs.wrappers import WrapperState
from fdg import jaxprs
from fdg.arguments import quoted
from fdg.errors import FdgError
from fdg.running.xla_options import jit

_DTYPE = re.compile(r"bool|(u?int|float)(8|16|32|64)|bfloat16")  # dtypes that a description may name
_MASK = ("action_mask",)  # the path of the action mask in a library's observation


class Deployed:
    """A policy for the environment `env_name`, with a memory between calls."""

    def __init__(self, env_name: str, observation: Description, action: Description):
        self._env_name, self._action = env_name, action
        self._inputs = [_Input(path, leaf) for path, leaf in leaves(observation)]
        self._outputs = [_Output(leaf) for _, leaf in leaves(action)]
        self._has_mask = any(part.path == _MASK for part in self._inputs)
        self.memory: Any = None  # memory of `N` environments; None before the first call
        self._count: int | None = None  # `N` of the last call
        self._calls = 0  # number of calls, part of the seed of sampled actions

    def reset(self) -> None:
        """Clears the memory: the next observation starts an episode."""
        self.memory = self._count = None

    def _empty_memory(self, count: int) -> Any:
        """The initial memory of `count` environments."""
        raise NotImplementedError

    def _act(self, observation: Any, start: Any, call: Callable[..., tuple[Sequence[Any], Any]]) -> Any:
        """An action for an observation, or actions for a batch of observations.

        `start` is as in `Acting.__call__`. `call` maps `(arrays, mask, memory, starts [N])` to the arrays of
        the action and the next memory.
        """
        arrays, mask, single = self._observation_arrays(observation)
        count, starts = len(arrays[0]), np.asarray(False if start is None else start)
        if starts.dtype.kind not in "biuf" or starts.shape not in ((), (count,)):
            raise FdgError(f"start={quoted(start)}: give a bool, or one for each of {count} observations")
        if not count:
            self.reset()
            return rebuilt(self._action, (np.zeros((0, *part.shape), part.dtype) for part in self._outputs))
        if count != self._count:
            self.memory, self._count, starts = self._empty_memory(count), count, np.asarray(True)
        starts = np.broadcast_to(starts.astype(bool), count)
        results, self.memory = call(arrays, mask, self.memory, starts)
        self._calls += 1
        parts = zip(self._outputs, map(np.asarray, results), strict=True)
        return rebuilt(self._action, (part.convert(array, single) for part, array in parts))

    def _observation_arrays(self, observation: Any) -> tuple[list[np.ndarray], Any, bool]:
        """The arrays `[N, ...]` of an observation, its mask, and whether it has no axis `N`."""
        mask: Any = None
        if isinstance(observation, MaskedObservation):
            observation, mask = observation
            if self._has_mask:
                observation, mask = {**observation, _MASK[0]: mask}, None
        arrays: list[np.ndarray] = []
        sizes: list[str] = []  # the batch size of each part, as text
        for part in self._inputs:
            try:
                array, is_single = part.extract_array(observation, self._env_name)
            except FdgError as error:
                fix = _result_fix(observation, part.path)
                raise (FdgError(fix) if fix else error) from None
            sizes.append("no batch axis" if is_single else f"{len(array)} rows")
            if sizes[-1] != sizes[0]:
                given = f"parts of an observation of {self._env_name} have {sizes[0]} and {sizes[-1]}"
                raise FdgError(f"{given}: give all parts the same batch size, or none")
            arrays.append(array)
        single = sizes[:1] == ["no batch axis"]
        if mask is not None:
            mask = np.asarray(mask, bool)[None] if single else np.asarray(mask, bool)
        return arrays, mask, single


def _result_fix(value: Any, path: tuple[Any, ...]) -> str:
    """The fix if the whole result of `reset` or `step` was given as an observation; else ""."""
    if isinstance(value, EpisodeState | WrapperState):
        return "this is the state: reset gives (state, observation), in that order: give the observation"
    if isinstance(value, TimeStep):
        return "this is what step gives: give its observation, step.observation"
    if not isinstance(value, tuple) or not value:
        return ""
    if isinstance(value[-1], Mapping) and len(value) in (2, 4, 5):
        call = "pair (observation, info) that reset" if len(value) == 2 else "tuple that step"
        return f"this is the {call} of Gymnasium gives: give the observation, its first element"
    if len(value) != 2:
        return ""
    if isinstance(value[1], TimeStep):
        return "this is the pair (state, step) that step gives: give step.observation, of its second element"
    if path and isinstance(path[0], int):  # the space is a tuple, so the observation may be a pair
        return ""
    if isinstance(value[1], int | float | np.generic):
        return ""
    return "this is the pair (state, observation) that reset gives: give the observation, its second element"


class _Input:
    """One array of an observation, at `path` in the observation."""

    def __init__(self, path: tuple[Any, ...], leaf: Description):
        self.path, self.shape = path, tuple(leaf["shape"][1:])
        self.dtype = _checked_dtype(leaf["dtype"])  # the library's dtype
        self.program_dtype = _checked_dtype(leaf.get("jax_dtype", leaf["dtype"]))
        self.lowest, self.count = _read_categories(leaf)
        self.low, self.high = _read_bounds(leaf)
        self.text_bytes: int | None = leaf["length"] if leaf.get("kind") == "Text" else None

    def extract_array(self, observation: Any, env_name: str) -> tuple[np.ndarray, bool]:
        """The array `[N, *shape]` in an observation, in `program_dtype`; True if the observation lacks `N`.

        Raises:
          FdgError: a part is missing, the array is traced, or its shape or a value is not of the space.
        """
        value = observation
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise FdgError(
                    f"an observation of {env_name} has no part {key!r}: give all parts of its space"
                ) from None
        if isinstance(value, jax.core.Tracer):
            raise FdgError(
                "run.policy takes arrays, and this one is being traced: inside jit, use run.actor(), whose"
                " act(memory, observation, start, keys, greedy) is a pure function"
            )
        label = f"{env_name}{''.join(f'[{key!r}]' for key in self.path)}"
        array, original = self._convert(value, label)
        single = array.shape == self.shape
        if not single and (not array.ndim or array.shape[1:] != self.shape):
            raise FdgError(
                f"an observation of shape {list(array.shape)}: {label} has shape {list(self.shape)}, and"
                f" batches have {['N', *self.shape]}".replace("'N'", "N")
            )
        with np.errstate(over="ignore"):
            array = array.astype(self.program_dtype, copy=False)
        self._check_finite(array, original, label)
        return (array[None] if single else array), single

    def _check_finite(self, array: np.ndarray, original: np.ndarray, label: str) -> None:
        """Raises `FdgError` for NaN, for numbers beyond the dtype, and for infinities beyond a bound."""
        if not jnp.issubdtype(array.dtype, jnp.floating) or (finite := np.isfinite(array)).all():
            return
        unbounded = ((array > 0) & np.isnan(self.high)) | ((array < 0) & np.isnan(self.low))
        is_invalid = ~finite & ~(unbounded & np.isinf(original))
        if is_invalid.any():
            raise FdgError(
                f"an observation of {label} has {original[is_invalid].flat[0]}, which is no finite"
                f" {array.dtype}: give only numbers that are in its space"
            )

    def _convert(self, value: Any, label: str) -> tuple[np.ndarray, np.ndarray]:
        """The value as an array in the library's dtype, and in its own dtype; `FdgError` if impossible."""
        try:
            if self.text_bytes is not None and np.asarray(value).dtype.kind not in "ui":
                value = encode_texts(value, self.text_bytes)
            original = np.asarray(value)
            if original.dtype == object:
                original = np.asarray(original.tolist())
            if original.dtype.kind not in "biufV":  # "V": bfloat16
                raise TypeError(f"{original.dtype} is no dtype of real numbers")
            with np.errstate(over="ignore", invalid="ignore"):
                array = original.astype(self.dtype, copy=False)
        except (TypeError, ValueError) as error:
            raise FdgError(
                f"an observation of {label} is an array {list(self.shape)}, not {quoted(value)}: give an"
                " array of numbers"
            ) from error
        if array is not original and array.dtype.kind in "iub" and not np.array_equal(array, original):
            raise FdgError(
                f"an observation of {label} has {original[array != original].flat[0]}, which its space's"
                f" dtype {self.dtype} cannot hold"
            )
        if self.lowest is not None:
            outside = (array < self.lowest) | (array >= self.lowest + self.count)
            if outside.any():
                raise FdgError(
                    f"an observation of {label} has {array[outside].flat[0]}, which is not one of its"
                    " categories"
                )
        return array, original


class _Output:
    """One array of an action."""

    def __init__(self, leaf: Description):
        self.shape, self.dtype = tuple(leaf["shape"][1:]), _checked_dtype(leaf["dtype"])
        (self.lowest, _), (self.low, self.high) = _read_categories(leaf), _read_bounds(leaf)
        self.is_scalar = leaf.get("kind") == "Discrete"

    def convert(self, array: np.ndarray, single: bool) -> Any:
        """An array `[N, ...]` in the library's dtype and categories; only its first element if `single`."""
        if array.dtype == self.dtype:
            pass
        elif self.lowest is not None:  # undoes the overflow of 32 bits in the program
            array = (self.lowest + ((array.astype(np.int64) - self.lowest) & 0xFFFFFFFF)).astype(self.dtype)
        else:
            array = exact(array, self.dtype, self.low, self.high)
        if not single:
            return array
        return array[0] if self.is_scalar else array[0, ...]  # `[...]` keeps an array without axes


def _read_bounds(leaf: Description) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of a space, float64; NaN where there is none."""
    return np.array(leaf.get("low"), np.float64), np.array(leaf.get("high"), np.float64)


def _read_categories(leaf: Description) -> tuple[Any, Any]:
    """The lowest category and the number of categories; (None, None) if values are not categories."""
    if "start" not in leaf:
        return None, None
    start, count = np.asarray(leaf["start"]), np.asarray(leaf["n"] if "n" in leaf else leaf["nvec"])
    if start.dtype.kind != "i" or count.dtype.kind != "i" or start.shape != count.shape:
        raise ValueError(f"invalid categories {count.tolist()} from {start.tolist()} on")
    return start.astype(np.int64), count.astype(np.int64)


def _checked_dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"invalid dtype {name!r}")
    return np.dtype(name)


def act_natively(
    native: Native,
    actor: Actor,
    arrays: Sequence[Any],
    mask: Any,
    memory: Any,
    start: Any,
    keys: Any,
    greedy: bool,
) -> tuple[Sequence[Any], Any]:
    """The arrays of actions and the next memory, for observations in the format of the library.

    `arrays` are the observation's, `[N, ...]` each; `mask` is its action mask or None; `start` is `[N]` bool,
    and `keys` are `[N]` random keys. `memory` is a pair: the memory of the environment's wrappers, and the
    memory of the actor.
    """
    wrapper_memory, memory = memory
    wrapper_memory, observation = native.apply_wrappers(wrapper_memory, start, native.encode(arrays, mask))
    action, memory = actor.act(memory, observation, start, keys, greedy)
    return native.decode(action), (wrapper_memory, memory)


_MAX_EMBEDDED_BYTES = 1 << 20  # parameters of at most this size become constants of the compiled program


class Acting(Deployed):
    """A trained agent that maps observations to actions, both NumPy arrays.

    Observations have the format that `reset` and `step` of the environment's library return, and actions the
    format that its `step` takes (`envs.native`). The first call compiles. The agent keeps its memory between
    calls, for as many environments as the last call had; `reset()` or `start` clears it at a new episode.

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
        self._key, self._key_implementation = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)

    def __call__(self, observation: Any, greedy: bool | None = None, start: Any = None) -> Any:
        """An action for an observation, or actions for a batch of observations.

        Args:
          observation: as the environment returns it: `[*obs]` for one environment, `[N, *obs]` for N; for
            several agents `[A, *obs]` or `[N, A, *obs]`. If it is a dictionary or tuple, its arrays have the
            leading axis `N`; privileged parts (for critics) may be missing. An action mask is its part
            `action_mask`, or, for environments in JAX, an `envs.MaskedObservation`; without a mask, all
            actions are allowed.
          greedy: replaces the `greedy` of this object in this call; None: not replaced.
          start: bool, or `[N]` bools: whether an episode begins with this observation, which clears the
            memory. None: only in the first call, and when the number of environments changes.

        Returns:
          The action as the environment takes it: `[*action]` or `[N, *action]`; with several agents
          `[A, *action]` or `[N, A, *action]`.

        Raises:
          FdgError: the observation does not match the environment, is not finite where its space is, or is
            traced.
        """
        is_greedy = self.greedy if greedy is None else bool(greedy)

        def call(*arguments: Any) -> Any:
            variant = is_greedy, arguments[1] is None  # the second argument is the mask
            if variant not in self._programs:
                self._programs[variant] = self._jit_act(is_greedy, arguments)
            return self._programs[variant](*arguments, self._key, np.uint32(self._calls))

        return self._act(observation, start, call)

    def _empty_memory(self, count: int) -> Any:
        return self._native.initial_memory(count), self._algorithm.actor(self._state).memory(count)

    def _jit_act(self, greedy: bool, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Jits `act`. The program gets only the leaves of the state that `act` reads.

        Up to `_MAX_EMBEDDED_BYTES`, these leaves are constants of the program, since each argument costs time
        in every call. Larger constants would take seconds to compile, so larger leaves are arguments.
        """
        leaves, structure = jax.tree.flatten(self._state)

        def act(read_leaves, arrays, mask, memory, start, key, calls):
            state = jax.tree.unflatten(structure, [read_leaves.get(i, x) for i, x in enumerate(leaves)])
            keys = jax.random.fold_in(jax.random.wrap_key_data(key, impl=self._key_implementation), calls)
            keys = jax.random.split(keys, start.shape[0])
            actor = self._algorithm.actor(state)
            return act_natively(self._native, actor, arrays, mask, memory, start, keys, greedy)

        all_leaves = dict(enumerate(leaves))
        is_read = jaxprs.inputs_read(jax.make_jaxpr(act)(all_leaves, *arguments, self._key, np.uint32(0)))
        read_leaves = {i: x for i, x in all_leaves.items() if is_read[i]}
        if sum(x.nbytes for x in read_leaves.values()) <= _MAX_EMBEDDED_BYTES:
            read_leaves = {}
        program = jit(act)
        return lambda *arguments: program(read_leaves, *arguments)
