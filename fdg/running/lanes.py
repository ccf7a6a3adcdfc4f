"""Lanes: one host thread per group of devices, for schedules that a single thread would block.

On a CPU, a program that calls Python (a reward function, a library's environment) blocks the thread that
dispatches it until it ends. A single thread then dispatches nothing else:

    one thread   act(0)  learn(0)  act(1)  learn(1)  ...

    actors       act(0)  act(1)    act(2)  ...
    learners             learn(0)  learn(1)  ...

The main thread walks the schedule as it does without lanes, but queues each call on the lane of its group and
uses a `Promised` array for each result. The lane's thread runs the calls in that order, and waits only for
arrays that other lanes have promised. So each group dispatches its programs in the order of the schedule, and
reads and donates the same arrays as without lanes: the result does not depend on timing.

All lanes stop at the first error, when the main thread stops (Ctrl-C), and when a host function does not
return within the limit.
"""

import atexit
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from fdg.errors import FdgError, HostError, RunError, one_line
from fdg.lowering import host_calls
from fdg.lowering.mesh import is_of_cpus
from fdg.placing.scheduling.schedule import Call, Repeat, Schedule, ScheduleWalk
from fdg.running.program import is_here, spans_processes

Action: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]  # maps input arrays to output arrays
_QueuedCall: TypeAlias = tuple[Action, Sequence[Any], "list[Promised]"]  # (call, arrays, results)

COLLECTIVE_LANE = "between processes"  # the lane of transfers between processes

LIMIT = "FDG_HOST_TIMEOUT"  # environment variable: the limit in seconds for one call of a host function
_DEFAULT_LIMIT_S = 1800.0  # without the variable `LIMIT`
_CHECK_INTERVAL_S = 1.0  # seconds between checks of the running calls
_JOIN_TIMEOUT_S = 2.0  # how long to wait for threads whose results are not needed


def host_limit() -> float:
    """The limit in seconds for one call of a host function; a longer call ends the run."""
    text = os.environ.get(LIMIT, "").strip() or str(_DEFAULT_LIMIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FdgError(f"{LIMIT}={text!r:.40}: give seconds above 0, such as {_DEFAULT_LIMIT_S:.0f}")
    return seconds


class Promised(Future):
    """One result of a call on a lane. It does not keep the call's other results alive."""

    def __init__(self, lane_threads: "_LaneThreads"):
        super().__init__()
        self._threads = lane_threads

    def array(self) -> Any:
        """Waits for the array; raises the error that stopped the lanes."""
        while True:
            try:
                return self.result(self._threads.check_interval_s)
            except TimeoutError:
                if self.done():  # the call raised TimeoutError itself, or has just ended
                    return self.result()
            self._threads.fail_if_late()

    def block_until_ready(self) -> "Promised":
        """Waits until the array is computed, as `jax.Array.block_until_ready` does."""
        jax.block_until_ready(self.array())
        return self


def array_of(entry: Any) -> Any:
    """Waits for a `Promised` array and returns it; returns anything else unchanged."""
    return entry.array() if type(entry) is Promised else entry


class Lanes:
    """The lanes of some groups: a context in which their threads run."""

    def __init__(self, groups: Iterable[str]):
        # The groups that have a lane; with several processes, calls of other groups are on `COLLECTIVE_LANE`.
        self.groups = tuple(groups)
        self._threads: _LaneThreads | None = None
        self._abandoned: list[threading.Thread] = []

    def defer(self, group: str, call: Action, count: int) -> Action:
        """A function that queues a call on the group's lane and returns `count` promised arrays."""
        lane = group if group in self.groups else COLLECTIVE_LANE

        def enqueue(arrays: Sequence[Any]) -> Sequence[Any]:
            assert self._threads is not None
            return self._threads.put(lane, call, arrays, count)

        return enqueue

    def __enter__(self) -> "Lanes":
        """Starts the threads.

        Raises:
          HostError: a host function of an earlier run has not returned yet.
        """
        _join(self._abandoned, _JOIN_TIMEOUT_S)
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if self._abandoned:
            function_name, seconds = host_calls.slowest() or ("a program", _JOIN_TIMEOUT_S)
            raise HostError(
                f"{function_name} of the previous run has not returned after {seconds:.0f} s: wait for it,"
                " or start a new process"
            )
        self._threads = _LaneThreads([*self.groups, *([COLLECTIVE_LANE] if jax.process_count() > 1 else [])])
        try:
            for thread in self._threads.threads:
                _all_threads.add(thread)
                thread.start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        """Waits until all queued calls are done; after an error, does not wait."""
        lane_threads, self._threads = self._threads, None
        assert lane_threads is not None
        self._abandoned = lane_threads.threads
        lane_threads.end(error)


class _LaneThreads:
    """The threads of lanes, from one `Lanes.__enter__` to the next `__exit__`."""

    def __init__(self, lanes: Iterable[str]):
        self._limit_s = host_limit()
        self.check_interval_s = min(_CHECK_INTERVAL_S, self._limit_s / 2)
        self._lock = threading.Lock()  # held briefly, never while waiting or running a call
        # Queued or running calls, by their first result. The thread that removes a call sets its results.
        self._unfinished_calls: dict[Promised, list[Promised]] = {}
        self._error: Exception | None = None
        self._queues: dict[str, queue.SimpleQueue[_QueuedCall | None]] = {
            lane: queue.SimpleQueue() for lane in lanes
        }
        config: Any = jax.config
        self._x64 = bool(config.jax_enable_x64)  # may be set for the calling thread only
        self.threads = [
            threading.Thread(target=self._run_calls, args=(calls,), name=f"lane {lane}", daemon=True)
            for lane, calls in self._queues.items()
        ]

    def put(self, lane: str, call: Action, arrays: Sequence[Any], count: int) -> Sequence[Any]:
        """Queues a call; returns its `count` promised results, or raises the error that stopped the lanes."""
        promised = [Promised(self) for _ in range(count)]
        with self._lock:
            if self._error is not None:
                raise self._error
            self._unfinished_calls[promised[0]] = promised
        self._queues[lane].put((call, arrays, promised))
        return promised

    def fail(self, error: Exception) -> None:
        """Stops all lanes: every unfinished call fails with the first error."""
        with self._lock:
            self._error = self._error or error
            failed_calls, self._unfinished_calls = self._unfinished_calls, {}
        for promised in itertools.chain(*failed_calls.values()):
            promised.set_exception(self._error)

    def end(self, error: BaseException | None) -> None:
        """Waits for unfinished calls, or fails them if there is an error; then ends the threads."""
        try:
            while error is None and (promised := self._last_unfinished_call()) is not None:
                promised.array()
        except BaseException as late_error:
            error = late_error
            raise
        finally:
            if error is not None:  # Ctrl-C is raised only in this thread; `fail` wakes the threads that wait
                self.fail(error if isinstance(error, Exception) else RunError("the run was interrupted"))
            for calls in self._queues.values():
                calls.put(None)
            if error is None:
                _join(self.threads, _JOIN_TIMEOUT_S)

    def fail_if_late(self) -> None:
        """Stops all lanes if a host function exceeds the limit."""
        function_name, seconds = host_calls.slowest() or ("", 0.0)
        if seconds > self._limit_s:
            text = (
                f"{function_name} has not returned after {seconds:.0f} s: fix it, or raise the limit with"
                f" the environment variable {LIMIT}={2 * self._limit_s:.0f}"
            )
            self.fail(HostError(text))

    def _last_unfinished_call(self) -> Promised | None:
        """The first result of the unfinished call that was queued last."""
        with self._lock:
            return next(reversed(self._unfinished_calls), None)

    def _run_calls(self, calls: "queue.SimpleQueue[_QueuedCall | None]") -> None:
        """The thread of a lane: runs the queued calls in order, until it reads None."""
        try:
            with jax.enable_x64(self._x64):
                while (queued := calls.get()) is not None:
                    self._run_call(*queued)
                    del queued
        except BaseException as error:
            self.fail(error if isinstance(error, Exception) else RunError(one_line(error)))

    def _run_call(self, call: Action, arrays: Sequence[Any], promised: list[Promised]) -> None:
        """Runs a call and sets its results; does nothing if the call has already failed."""
        if promised[0] not in self._unfinished_calls:
            return
        results = call([array_of(entry) for entry in arrays])
        pairs = list(zip(promised, results, strict=True))
        with self._lock:
            is_unfinished = self._unfinished_calls.pop(promised[0], None) is not None
        if is_unfinished:
            for promise, result in pairs:
                promise.set_result(result)


def may_block_host(call: Call, mesh: Mesh) -> bool:
    """Whether dispatching a program may block the host thread until it ends: on a CPU, if it calls Python."""
    return is_of_cpus(mesh) and host_calls.calls_host(call.equations)


def lanes_of(schedule: Schedule, meshes: Mapping[str, Mesh]) -> Lanes | None:
    """The lanes of a schedule's groups; None if a single thread delays no group.

    A single thread is enough if every later fragment needs the results of the programs that block the thread.
    One lane, in the schedule's order, has the transfers between processes, and the programs of groups that
    span processes.
    """
    local_meshes = {name: mesh for name, mesh in meshes.items() if is_here(mesh.devices.flat)}
    if len(local_meshes) < 2 or not _Dependencies(local_meshes).delays_a_group(schedule):
        return None
    return Lanes(name for name, mesh in local_meshes.items() if not spans_processes(mesh))


class _Dependencies(ScheduleWalk[int]):
    """For each value and group, a bit set of the thread-blocking programs that its computation needs."""

    def __init__(self, local_meshes: Mapping[str, Mesh]):
        super().__init__(0)
        self._local_meshes = local_meshes
        self._blocking_bits = 0
        self._needed_by_group: dict[str, int] = {}
        self._is_delayed = False

    def delays_a_group(self, schedule: Schedule) -> bool:
        """Whether a fragment (also of the next iteration) follows a blocking program without needing it."""
        for _ in range(2):
            self.walk(schedule.steps)
            self.rebind(schedule.carry)
        return self._is_delayed

    def trips(self, repeat: Repeat) -> int:
        """At most two trips: in later trips, dependencies are as in the second."""
        return min(repeat.trips, 2)

    def call(self, call: Call) -> None:
        """Sets the bit sets of a program's results; a program that blocks its thread adds its own bit."""
        needed_bits = self._needed_by_group.get(call.group, 0)
        for value in call.inputs:
            needed_bits |= self.facts[value]
        if call.group in self._local_meshes:
            self._is_delayed |= bool(call.fragments and self._blocking_bits & ~needed_bits)
            if may_block_host(call, self._local_meshes[call.group]):
                bit = self._blocking_bits + 1  # all bits so far are ones, so this is the next bit
                self._blocking_bits, needed_bits = self._blocking_bits | bit, needed_bits | bit
        self._needed_by_group[call.group] = needed_bits
        self.facts.update(dict.fromkeys(call.outputs, needed_bits))


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Waits for threads to end, at most `seconds` in total."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


_all_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # joined when Python exits


@atexit.register
def _join_all() -> None:
    """Waits for the threads: a thread that is inside XLA when Python exits would abort the process."""
    _join(list(_all_threads), _JOIN_TIMEOUT_S)
