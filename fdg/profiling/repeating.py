"""Times a function by many calls in one program, which excludes the host's overhead.

The number of calls is an argument. The inputs of each call pass an optimization barrier with the call's
number, so that XLA can neither hoist nor drop it; results that are inputs of the next call are passed on in
place. The time of a run without calls is subtracted.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdg import keys
from fdg.processes import distributed

ROUND_S = 0.015  # minimum seconds of a round
_MOST = 1_000_000  # calls in a round


class Sample(NamedTuple):
    """Seconds of a run with some calls, and of one without."""

    calls: float
    none: float


class Repeated:
    """A function to be timed, with arguments on its devices."""

    def __init__(
        self,
        function: Callable,
        arguments: Sequence[Any],
        handed_on: Mapping[int, int] | None = None,
        goes_on: bool = False,
        times: int = 1,
    ):
        """Compiles nothing: see `compiled`.

        Result k is argument `handed_on[k]` of the next call. With `goes_on`, a run starts from the results of
        the previous one, as host callbacks require. A result of `seconds` stands for `times` calls.
        """
        self._arguments, self._goes_on = list(arguments), goes_on
        self._function = jax.jit(_repeated(function, dict(handed_on or {})))
        self._run: Any = None
        self._times = times
        self._calls = 1
        self.lanes = 1  # concurrent copies of the program
        self._spans = any(not x.is_fully_addressable for x in arguments)
        self.samples: list[Sample] = []  # of each round

    def lower(self) -> Any:
        """Lowers the program."""
        return self._function.lower(np.int32(0), self._arguments)

    def compiled(self, run: Any) -> None:
        """Sets the compiled program and chooses the number of calls in a round."""
        self._run = run
        self._seconds(1)
        self._find_calls()

    def also_in(self, lanes: int) -> None:
        """Runs `lanes` copies concurrently if throughput is higher; a sample is one call of each."""
        if lanes == 1:
            return
        taken = {}
        for self.lanes in (1, lanes):
            taken[self.lanes] = self._per_call([self._sample() for _ in range(3)]) / self.lanes
        self.lanes = min(taken, key=lambda count: taken[count])

    def measure(self) -> None:
        """Runs one round."""
        self.samples.append(self._sample())

    @property
    def seconds(self) -> float:
        """Seconds of `times` calls."""
        return self._times * self._per_call(self.samples) / self.lanes

    def _find_calls(self) -> None:
        while True:
            # Twice: a one-time disturbance must not lead to rounds with too few calls.
            taken = self._per_call([self._sample() for _ in range(2)]) * self._calls
            if self._spans:  # all processes must run the same number of calls
                taken = distributed.exchange(taken)[0]
            if taken >= ROUND_S / 2 or self._calls >= _MOST:
                return
            more = max(2 * self._calls, int(self._calls * ROUND_S / max(taken, ROUND_S / 20)))
            self._calls = min(_MOST, more)

    def _sample(self) -> Sample:
        return Sample(self._seconds(self._calls), self._seconds(0))

    def _per_call(self, samples: Sequence[Sample]) -> float:
        """Seconds of a call, from the shortest run of each kind."""
        calls, none = (min(each) for each in zip(*samples, strict=True))
        return (calls - none if calls > none else calls) / self._calls

    def _seconds(self, calls: int) -> float:
        begun = time.perf_counter()
        running = [self._run(np.int32(calls), self._arguments) for _ in range(self.lanes)]
        jax.block_until_ready(running)
        taken = time.perf_counter() - begun
        if self._goes_on:
            for j, value in running[-1][0].items():
                self._arguments[j] = value
        return taken


def compile_all(repeated: Iterable[Repeated]) -> None:
    """Compiles programs in parallel and prepares each for timing."""
    todo = list(repeated)
    lowered = [one.lower() for one in todo]
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda one: one.compile(), lowered))
    for one, run in zip(todo, runs, strict=True):
        one.compiled(run)


def rounds(programs: Mapping[Any, Repeated], count: int, lanes: int = 1) -> dict[Any, list[float]]:
    """Seconds of a call of each program in each of `count` rounds, with `lanes` concurrent copies."""
    found: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(count):
        for name, one in programs.items():
            one.lanes = lanes
            one.samples.clear()
            one.measure()
            found[name].append(max(one.seconds * lanes, 1e-10))
    return found


def _repeated(function: Callable, handed_on: dict[int, int]) -> Callable:
    def run(calls: jax.Array, arguments: list[Any]) -> Any:
        moving = {j: arguments[j] for j in handed_on.values()}
        fixed = {j: x for j, x in enumerate(arguments) if j not in moving}

        def once(carry: Any) -> Any:
            i, moving, _ = carry
            i, moving, still = jax.lax.optimization_barrier((i, moving, fixed))
            now = {**moving, **still}
            results = [_strong(x) for x in function(*(now[j] for j in range(len(arguments))))]
            moving = {j: results[k] for k, j in handed_on.items()}
            return i + 1, moving, [x for k, x in enumerate(results) if k not in handed_on]

        shapes = jax.eval_shape(function, *arguments)
        empty = [jnp.zeros(x.shape, x.dtype) for k, x in enumerate(shapes) if k not in handed_on]
        start = jnp.int32(0), jax.tree.map(_strong, moving), empty
        return jax.lax.while_loop(lambda carry: carry[0] < calls, once, start)[1:]

    return run


def _strong(x: jax.Array) -> jax.Array:
    return x if keys.is_key(x.dtype) else jax.lax.convert_element_type(x, x.dtype)
