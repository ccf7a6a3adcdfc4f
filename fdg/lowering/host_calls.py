"""Guards Python callbacks of programs, so that their failures name the fragment.

A callback that raises ends in 70 lines of JAX's traceback, and one that calls `os._exit` ends silently. Each
is wrapped in a function that knows its place:

    io_callback[callback=step]  in fragment 'simulate' (environment)
    -> io_callback[callback=Guarded(step, "fragment 'simulate' (environment)")]
    -> HostError: fragment 'simulate' (environment): step raised ValueError: the wheels fell off

Operands, results and effects of equations are unchanged. Guarded functions are equal if the functions and
their places are, so compiled programs are reused.
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
GIVES_BACK = ("io_callback", "pure_callback")
_CALLS = (*GIVES_BACK, "debug_callback")
BETWEEN = "code between fragments"

LastWords = Callable[[str, int], object]  # (line, status), before `os._exit(status)`


def guard(jaxpr: Any, where: str = BETWEEN, last_words: LastWords | None = None) -> Any:
    """Guards all host callbacks of a jaxpr.

    Returns it unchanged if it has none. `where` is the place of code outside of fragments; `last_words` is
    called if a callback calls `os._exit`, instead of printing the line to standard error.
    """

    def guarded(inside_of: core.Jaxpr, where: str, inside: jaxprs.Inside) -> Iterator[core.JaxprEqn]:
        for eqn in inside_of.eqns:
            mark = FragmentMark.of(eqn)
            eqn = inside(eqn, where if mark is None else f"fragment '{mark.name}' ({mark.role})")
            if eqn.primitive.name in _CALLS and not isinstance(eqn.params["callback"], Guarded):
                avals = eqn.params.get("result_avals")
                expected = avals and tuple((tuple(aval.shape), str(aval.dtype)) for aval in avals)
                callback = Guarded(eqn.params["callback"], where, expected, last_words)
                eqn = eqn.replace(params={**eqn.params, "callback": callback})
            yield eqn

    return jaxprs.rewrite_blocks(jaxpr, guarded, where, traces=False)


def calls_host(equations: Sequence[core.JaxprEqn]) -> bool:
    """Whether equations, at any depth, call host functions that return results."""
    return any(eqn.primitive.name in GIVES_BACK for eqn in jaxprs.walk(equations))


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A guarded host function."""

    callback: Callable[..., Any]  # JAX's flat callback
    where: str  # its place in errors
    # shape and dtype of each result; None if it returns nothing
    expected: tuple[tuple[tuple[int, ...], str], ...] | None
    last_words: LastWords | None  # see `guard`

    @property
    def callback_func(self) -> Any:
        """The function that was given to JAX."""
        return getattr(self.callback, "callback_func", self.callback)

    @property
    def who(self) -> str:
        """The place and the function's name."""
        function = self.callback_func
        if self.expected is None:  # its name is in a closure of JAX
            return f"{self.where}: a function of jax.debug.callback"
        return f"{self.where}: {getattr(function, '__name__', type(function).__name__)}"

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function.

        Raises:
          HostError: it raised, or returned other shapes or dtypes than declared.
        """
        with _exits.watched(self):
            try:
                results = self.callback(*arguments)
                arrays = None if self.expected is None else [np.asarray(result) for result in results]
            except HostError:
                raise  # it already names its source
            except BaseException as error:  # JAX would make a long error of SystemExit and others, too
                raise HostError(f"{self.who} raised {raised(error)}") from error
        if arrays is not None:
            self._check(arrays)
        return results

    def _check(self, results: Sequence[np.ndarray]) -> None:
        assert self.expected is not None
        if len(results) != len(self.expected):
            raise HostError(f"{self.who} gave {len(results)} arrays, expected {len(self.expected)}")
        for i, (result, (shape, dtype)) in enumerate(zip(results, self.expected, strict=True)):
            if result.shape == shape and result.dtype == _dtype(dtype):
                continue  # fast path: asking JAX takes longer than a step of a small environment
            found = result.dtype
            with contextlib.suppress(TypeError):  # of text and objects, for example
                found = jax.dtypes.canonicalize_dtype(found)  # as JAX does, with or without 64 bits
            if result.shape != shape or found != dtype:
                which = "" if len(results) == 1 else f" as result {i}"
                raise HostError(
                    f"{self.who} gave {found}{list(result.shape)}{which}, expected {dtype}{list(shape)}"
                )


@functools.cache
def _dtype(name: str) -> np.dtype:
    return jnp.dtype(name)  # bfloat16 too; a dtype's `name` property is slow


class _Exits:
    """While guarded functions run, makes `os._exit` print a line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # running calls with their start (`time.monotonic`)
        self.begun: dict[object, tuple[Guarded, float]] = {}
        self._exit: Callable[[int], NoReturn] = os._exit
        self._here = threading.local()

    @contextlib.contextmanager
    def watched(self, call: Guarded) -> Iterator[None]:
        running = object()
        with self._lock:
            self.begun[running] = call, time.monotonic()
            if len(self.begun) == 1:
                self._exit, _os._exit = os._exit, self._say_and_exit
        before, self._here.call = getattr(self._here, "call", None), call
        try:
            yield
        finally:
            self._here.call = before
            with self._lock:
                del self.begun[running]
                if not self.begun:
                    _os._exit = self._exit

    def slowest(self) -> tuple[str, float] | None:
        """The call that has been running for longest: its name and seconds; None if none runs."""
        with self._lock:
            first = next(iter(self.begun.values()), None)
        return None if first is None else (first[0].who, time.monotonic() - first[1])

    def _say_and_exit(self, status: int) -> NoReturn:
        call, self._here.call = getattr(self._here, "call", None), None
        if call is not None:
            line = f"{call.who} called os._exit({status})"
            with contextlib.suppress(Exception):
                if call.last_words is not None:
                    call.last_words(line, status)
            with contextlib.suppress(OSError, ValueError):
                print(f"error: {line}", file=sys.stderr, flush=True)
        self._exit(status)


_exits = _Exits()
slowest = _exits.slowest
