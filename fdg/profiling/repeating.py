"""Times a function by calling it many times in one program, so that the host's overhead is excluded.

The number of calls is an argument. The inputs of each call pass an optimization barrier with the index of the
call, so that XLA can neither hoist nor drop the call. Results that are inputs of the next call are updated in
place. The time of a run without calls is subtracted.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdg import keys
from fdg.processes import distributed
from fdg.running.program import compile_in_parallel

ROUND_S = 0.015  # approximate seconds of a round
_MAX_CALLS = 1_000_000  # per round


Sample = tuple[float, float]  # seconds of a run that makes the calls, and of a run that makes none


class Repeated:
    """A function to be timed, with arguments on its devices."""

    def __init__(
        self,
        function: Callable,
        arguments: Sequence[Any],
        feedback: Mapping[int, int] | None = None,
        continues: bool = False,
        times: int = 1,
    ):
        """Prepares the function; `compile_all` compiles it.

        Result k is argument `feedback[k]` of the next call. With `continues`, a run starts from the results
        of the previous run, which host callbacks with state need. `seconds` is the time of `times` calls.
        """
        self._arguments, self._continues = list(arguments), continues
        self.platform = platform_of(arguments)
        self._function = jax.jit(_repeat_function(function, dict(feedback or {})))
        self._run: Any = None
        self._times = times
        self._calls = 1
        self.num_copies = 1  # concurrent copies of the program
        self._spans_processes = any(not x.is_fully_addressable for x in arguments)
        self.samples: list[Sample] = []  # one per round

    def lower(self) -> Any:
        """Lowers the program."""
        return self._function.lower(np.int32(0), self._arguments)

    def set_compiled(self, run: Any) -> None:
        """Sets the compiled program and chooses the number of calls in a round."""
        self._run = run
        self._time_run(1)
        self._choose_num_calls()

    def choose_copies(self, num_copies: int) -> None:
        """Chooses between one copy and `num_copies` concurrent copies, whichever has the higher throughput.

        Later samples run this many copies.
        """
        if num_copies == 1:
            return
        seconds = {}
        for self.num_copies in (1, num_copies):
            samples = [self._sample() for _ in range(3)]
            seconds[self.num_copies] = self._seconds_per_call(samples) / self.num_copies
        self.num_copies = min(seconds, key=lambda count: seconds[count])

    def measure(self) -> None:
        """Runs one round."""
        self.samples.append(self._sample())

    @property
    def seconds(self) -> float:
        """Seconds of `times` calls, divided by the number of concurrent copies."""
        return self._times * self._seconds_per_call(self.samples) / self.num_copies

    def _choose_num_calls(self) -> None:
        """Increases the number of calls in a round until a round takes about `ROUND_S`."""
        while True:
            # Two samples, since one disturbed sample would lead to rounds with too few calls.
            seconds = self._seconds_per_call([self._sample() for _ in range(2)]) * self._calls
            if self._spans_processes:  # all processes must run the same number of calls
                seconds = distributed.exchange(seconds)[0]
            if seconds >= ROUND_S / 2 or self._calls >= _MAX_CALLS:
                return
            num_calls = max(2 * self._calls, int(self._calls * ROUND_S / max(seconds, ROUND_S / 20)))
            self._calls = min(_MAX_CALLS, num_calls)

    def _sample(self) -> Sample:
        return self._time_run(self._calls), self._time_run(0)

    def _seconds_per_call(self, samples: Sequence[Sample]) -> float:
        """Seconds per call, from the shortest run with calls and the shortest without."""
        with_calls, without_calls = (min(times) for times in zip(*samples, strict=True))
        return (with_calls - without_calls if with_calls > without_calls else with_calls) / self._calls

    def _time_run(self, calls: int) -> float:
        start_time = time.perf_counter()
        running = [self._run(np.int32(calls), self._arguments) for _ in range(self.num_copies)]
        jax.block_until_ready(running)
        seconds = time.perf_counter() - start_time
        if self._continues:
            for j, value in running[-1][0].items():
                self._arguments[j] = value
        return seconds


def platform_of(arrays: Iterable[Any]) -> str:
    """The platform of the arrays' devices; without arrays of JAX, that of its default devices."""
    devices = (device for array in arrays if isinstance(array, jax.Array) for device in array.devices())
    return next((device.platform for device in devices), jax.default_backend())


def compile_all(programs: Iterable[Repeated]) -> None:
    """Compiles programs in parallel, as an engine compiles its own, and prepares each for timing."""
    programs = list(programs)
    lowered, platforms = [program.lower() for program in programs], [program.platform for program in programs]
    runs, _ = compile_in_parallel(lowered, platforms, lambda: None)
    for program, run in zip(programs, runs, strict=True):
        program.set_compiled(run)


def timed_rounds(programs: Mapping[Any, Repeated], count: int, num_copies: int = 1) -> dict[Any, list[float]]:
    """For each program, seconds per call in each of `count` rounds, with `num_copies` concurrent copies."""
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(count):
        for name, program in programs.items():
            program.num_copies = num_copies
            program.samples.clear()
            program.measure()
            seconds[name].append(max(program.seconds * num_copies, 1e-10))
    return seconds


def _repeat_function(function: Callable, feedback: dict[int, int]) -> Callable:
    """A function of the number of calls and the arguments, which returns the last call's results.

    They are a dict of the results that are fed back, by the argument's position, and a list of the others.
    """

    def run(calls: jax.Array, arguments: list[Any]) -> Any:
        carried = {j: arguments[j] for j in feedback.values()}
        fixed = {j: x for j, x in enumerate(arguments) if j not in carried}

        def call_once(carry: Any) -> Any:
            i, carried, _ = carry
            i, carried, constants = jax.lax.optimization_barrier((i, carried, fixed))
            inputs = {**carried, **constants}
            results = [_without_weak_type(x) for x in function(*(inputs[j] for j in range(len(arguments))))]
            carried = {j: results[k] for k, j in feedback.items()}
            return i + 1, carried, [x for k, x in enumerate(results) if k not in feedback]

        shapes = jax.eval_shape(function, *arguments)
        empty = [jnp.zeros(x.shape, x.dtype) for k, x in enumerate(shapes) if k not in feedback]
        start = jnp.int32(0), jax.tree.map(_without_weak_type, carried), empty
        return jax.lax.while_loop(lambda carry: carry[0] < calls, call_once, start)[1:]

    return run


def _without_weak_type(x: jax.Array) -> jax.Array:
    return x if keys.is_key(x.dtype) else jax.lax.convert_element_type(x, x.dtype)
