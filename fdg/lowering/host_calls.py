"""Wraps the Python callbacks of programs, so that their errors name the fragment.

If a callback raises, JAX prints 70 lines of traceback; if it calls `os._exit`, nothing is printed. So each
callback is wrapped in a function that knows its fragment:

    io_callback[callback=step]  in fragment 'simulate' (environment)
    -> io_callback[callback=Guarded(step, "fragment 'simulate' (environment)")]
    -> HostError: fragment 'simulate' (environment): step raised ValueError: the wheels fell off

Operands, results and effects of equations are unchanged. Guarded functions are equal if the functions and
their fragments are equal, so compiled programs are reused.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fdg import jaxprs
from fdg.errors import HostError, raised
from fdg.fragment import FragmentMark

_os: Any = os  # `_exit` is replaced while a guarded function runs
CALLBACKS_WITH_RESULTS = ("io_callback", "pure_callback")
_ALL_CALLBACKS = (*CALLBACKS_WITH_RESULTS, "debug_callback")
BETWEEN = "code between fragments"  # in place of a fragment's name in errors

LastWords = Callable[[str, int], object]  # called with (error line, status) before `os._exit(status)`


def guard(jaxpr: Any, where: str = BETWEEN, last_words: LastWords | None = None) -> Any:
    """Wraps each host callback of a jaxpr in `Guarded`; returns the same jaxpr if there is none.

    `where` is the name of code outside of fragments in errors. If a callback calls `os._exit`, `last_words`
    is called with the line that is also printed to standard error, and the exit status.
    """

    def guard_equations(block: core.Jaxpr, where: str, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        for eqn in block.eqns:
            mark = FragmentMark.of(eqn)
            eqn = inside(eqn, where if mark is None else f"fragment '{mark.name}' ({mark.role})")
            if eqn.primitive.name in _ALL_CALLBACKS and not isinstance(eqn.params["callback"], Guarded):
                avals = eqn.params.get("result_avals")
                expected = avals and tuple((tuple(aval.shape), str(aval.dtype)) for aval in avals)
                callback = Guarded(eqn.params["callback"], where, expected, last_words)
                eqn = eqn.replace(params={**eqn.params, "callback": callback})
            yield eqn

    return jaxprs.rewrite_blocks(jaxpr, guard_equations, where, traces=False)


def calls_host(equations: Sequence[core.JaxprEqn]) -> bool:
    """Whether equations, at any depth, call host functions that return results."""
    return any(eqn.primitive.name in CALLBACKS_WITH_RESULTS for eqn in jaxprs.walk(equations))


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A host function whose errors name its fragment."""

    callback: Callable[..., Any]  # JAX's callback, which takes and returns flat lists of arrays
    where: str  # the fragment, or other place, that errors name
    # shape and dtype of each result; None if the function returns nothing
    expected: tuple[tuple[tuple[int, ...], str], ...] | None
    last_words: LastWords | None  # see `guard`

    @property
    def callback_func(self) -> Any:
        """The function that was given to JAX."""
        return getattr(self.callback, "callback_func", self.callback)

    @property
    def label(self) -> str:
        """The place and the function's name, for errors."""
        function = self.callback_func
        if self.expected is None:  # JAX keeps the function's name in a closure
            return f"{self.where}: a function of jax.debug.callback"
        return f"{self.where}: {getattr(function, '__name__', type(function).__name__)}"

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function.

        Raises:
          HostError: the function raised, or returned shapes or dtypes other than declared.
        """
        with _exits.watch(self):
            try:
                results = self.callback(*arguments)
                arrays = None if self.expected is None else [np.asarray(result) for result in results]
            except HostError:
                raise  # the error already names its source
            except BaseException as error:  # otherwise JAX prints a long traceback, for SystemExit too
                raise HostError(f"{self.label} raised {raised(error)}") from error
        if arrays is not None:
            self._check(arrays)
        return results

    def _check(self, results: Sequence[np.ndarray]) -> None:
        """Raises `HostError` if the results' shapes or dtypes differ from the declared ones."""
        assert self.expected is not None
        if len(results) != len(self.expected):
            raise HostError(f"{self.label} returned {len(results)} arrays, expected {len(self.expected)}")
        for i, (result, (shape, dtype)) in enumerate(zip(results, self.expected, strict=True)):
            if result.shape == shape and result.dtype == _parse_dtype(dtype):
                continue  # fast path: `canonicalize_dtype` takes longer than a step of a small environment
            actual = result.dtype
            with contextlib.suppress(TypeError):  # JAX has no such dtype, for example for text and objects
                actual = jax.dtypes.canonicalize_dtype(actual)  # 64 bits become 32 unless JAX has x64 enabled
            if result.shape != shape or actual != dtype:
                position = "" if len(results) == 1 else f" as result {i}"
                raise HostError(
                    f"{self.label} returned {actual}{list(result.shape)}{position}, expected"
                    f" {dtype}{list(shape)}"
                )


@functools.cache
def _parse_dtype(name: str) -> np.dtype:
    return jnp.dtype(name)  # jnp's, because NumPy does not know bfloat16


class _Exits:
    """Replaces `os._exit`, while guarded functions run, by a function that first prints an error line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # the running calls and their start times (`time.monotonic`)
        self.running: dict[object, tuple[Guarded, float]] = {}
        self._exit: Callable[[int], NoReturn] = os._exit
        self._thread_local = threading.local()

    @contextlib.contextmanager
    def watch(self, call: Guarded) -> Iterator[None]:
        """A context for one call; while any call runs, `os._exit` is `_print_and_exit`."""
        token = object()
        with self._lock:
            self.running[token] = call, time.monotonic()
            if len(self.running) == 1:
                self._exit, _os._exit = os._exit, self._print_and_exit
        outer_call, self._thread_local.call = getattr(self._thread_local, "call", None), call
        try:
            yield
        finally:
            self._thread_local.call = outer_call
            with self._lock:
                del self.running[token]
                if not self.running:
                    _os._exit = self._exit

    def slowest(self) -> tuple[str, float] | None:
        """The name and seconds of the call that has been running for longest; None if no call runs."""
        with self._lock:
            oldest = next(iter(self.running.values()), None)
        return None if oldest is None else (oldest[0].label, time.monotonic() - oldest[1])

    def _print_and_exit(self, status: int) -> NoReturn:
        """Reports the call that runs in this thread, if there is one; then exits."""
        call, self._thread_local.call = getattr(self._thread_local, "call", None), None
        if call is not None:
            line = f"{call.label} called os._exit({status})"
            with contextlib.suppress(Exception):
                if call.last_words is not None:
                    call.last_words(line, status)
            with contextlib.suppress(OSError, ValueError):
                print(f"error: {line}", file=sys.stderr, flush=True)
        self._exit(status)


_exits = _Exits()
slowest = _exits.slowest  # the guarded call that has been running for longest, in this process
