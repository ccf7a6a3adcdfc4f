"""Lanes: a host thread for each group of devices, where one thread would hold groups up.

On a CPU the host's thread is in a program that calls Python until that program ends: a reward in Python, an
environment of a library. One thread then starts nothing else meanwhile:

    one thread   act(0)  learn(0)  act(1)  learn(1)  ...

    actors       act(0)  act(1)    act(2)  ...
    learners             learn(0)  learn(1)  ...

With lanes the schedule is walked as ever. But what the walk calls is put on the lane of its group, whose
thread takes it up in that order, and the walk has a `Promised` array in place of each result. A lane waits
for what the others have promised, and for nothing else. So each group starts its programs in the order of the
schedule, reads the same arrays, and gives them up in the same order: time decides nothing.

All lanes end with the first error, with the walk (by Ctrl-C), and with a function on the host that does not
come back.
"""

import atexit
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
from fdg.placing.scheduling.schedule import Call, Move, Schedule, Step, Value
from fdg.running.program import is_here, spans_processes

Action: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]  # from arrays to arrays

CROSSING = "between processes"  # the lane of what crosses from process to process

LIMIT = "FDG_HOST_TIMEOUT"  # environment variable: seconds that a call of a function on the host may take
_LIMIT_S = 1800.0
_LOOK_S = 1.0  # between two looks at how long calls have taken
_END_S = 2.0  # to wait for threads whose work is void


def host_limit() -> float:
    """Seconds that a function on the host may take before the run ends.

    Raises:
      FdgError: the environment variable is no number above 0.
    """
    given = os.environ.get(LIMIT, "").strip() or str(_LIMIT_S)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise FdgError(f"{LIMIT}={given!r:.40}: give seconds above 0, such as {_LIMIT_S:.0f}")
    return seconds


class Promised:
    """An array that an action on a lane makes; it holds no other that the action makes."""

    __slots__ = ("_action", "_array")

    def __init__(self, action: "_Action"):
        self._action, self._array = action, None

    def keep(self, array: Any) -> None:
        """Of the lane: here it is."""
        self._array = array

    def array(self) -> Any:
        """Waits for it, and raises what the lanes have ended with."""
        self._action.wait()
        return self._array

    def block_until_ready(self) -> "Promised":
        """As of a `jax.Array`: until it is computed."""
        jax.block_until_ready(self.array())
        return self


def kept(entry: Any) -> Any:
    """An array that was promised, once it is there; anything else as it is."""
    return entry.array() if type(entry) is Promised else entry


class _Action(Future):
    """What a lane does once: a call, what it takes, and what it has promised."""

    def __init__(self, run: "_Run", call: Action, given: Sequence[Any], count: int):
        super().__init__()
        self.call, self.given, self.promised = call, given, [Promised(self) for _ in range(count)]
        self._run = run

    def wait(self) -> None:
        """Until it is done; raises what the lanes have ended with."""
        while True:
            try:
                return self.result(self._run.look_s)
            except TimeoutError:
                if self.done():  # an error of its own, or just now
                    return self.result()
            self._run.look_after()


class Lanes:
    """The lanes of some groups; their threads are there while it is entered.

    Attributes:
      groups: those with a lane of their own; of several processes, what is of no such group is on `CROSSING`.
    """

    def __init__(self, groups: Iterable[str]):
        self.groups = tuple(groups)
        self._run: _Run | None = None
        self._void: list[threading.Thread] = []

    def deferred(self, group: str, call: Action, count: int) -> Action:
        """A call of a group as one that its lane makes later, and that promises `count` arrays."""
        lane = group if group in self.groups else CROSSING

        def put(given: Sequence[Any]) -> Sequence[Any]:
            assert self._run is not None
            return self._run.put(lane, call, given, count)

        return put

    def __enter__(self) -> "Lanes":
        """Begins the threads.

        Raises:
          HostError: a function on the host in which an earlier run was left has not come back.
        """
        _join(self._void, _END_S)
        self._void = [thread for thread in self._void if thread.is_alive()]
        if self._void:
            who, seconds = host_calls.slowest() or ("a program", _END_S)
            raise HostError(
                f"{who} of the run before has not come back for {seconds:.0f} s: wait for it, or start a new"
                " process"
            )
        self._run = _Run([*self.groups, *([CROSSING] if jax.process_count() > 1 else [])])
        try:
            self._run.begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Waits until all is done that was put on the lanes; after an error for nothing."""
        run, self._run = self._run, None
        assert run is not None
        self._void = run.threads
        run.end(error)


class _Run:
    """The threads of lanes, from one `Lanes.__enter__` to the next `__exit__`."""

    def __init__(self, lanes: Iterable[str]):
        self._limit_s = host_limit()
        self.look_s = min(_LOOK_S, self._limit_s / 2)
        self._lock = threading.Lock()  # held for moments, never while something is waited for or run
        self._open: dict[_Action, None] = {}  # put and not done; who takes one out says how it ended
        self._error: Exception | None = None
        self._todo: dict[str, queue.SimpleQueue[_Action | None]] = {
            lane: queue.SimpleQueue() for lane in lanes
        }
        config: Any = jax.config
        self._x64 = bool(config.jax_enable_x64)  # which may hold for the calling thread alone
        self.threads = [
            threading.Thread(target=self._work, args=(todo,), name=f"lane {lane}", daemon=True)
            for lane, todo in self._todo.items()
        ]

    def begin(self) -> None:
        """Begins the threads."""
        for thread in self.threads:
            _threads.add(thread)
            thread.start()

    def put(self, lane: str, call: Action, given: Sequence[Any], count: int) -> Sequence[Any]:
        """Puts a call on a lane; raises what the lanes have ended with."""
        action = _Action(self, call, given, count)
        promised = list(action.promised)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open[action] = None
        self._todo[lane].put(action)
        return promised

    def fail(self, error: Exception) -> None:
        """Ends all lanes: whatever is open fails with the first error."""
        with self._lock:
            self._error = self._error or error
            opened, self._open = self._open, {}
        for action in opened:
            action.set_exception(self._error)

    def end(self, error: BaseException | None) -> None:
        """Waits for what is open, or, after an error, voids it; ends the threads."""
        try:
            while error is None and (action := self._last()) is not None:
                action.wait()
        except BaseException as late:
            error = late
            raise
        finally:
            if error is not None:  # who waits on another thread is not interrupted, and hears of it
                self.fail(error if isinstance(error, Exception) else RunError("the run was interrupted"))
            for todo in self._todo.values():
                todo.put(None)
            if error is None:
                _join(self.threads, _END_S)

    def look_after(self) -> None:
        """Ends all lanes if a function on the host has taken too long."""
        slowest = host_calls.slowest()
        if slowest is not None and slowest[1] > self._limit_s:
            who, seconds = slowest
            self.fail(
                HostError(
                    f"{who} has not come back for {seconds:.0f} s: mend it, or allow it more with the"
                    f" environment variable {LIMIT}={2 * self._limit_s:.0f}"
                )
            )

    def _last(self) -> _Action | None:
        with self._lock:
            return next(reversed(self._open), None)

    def _work(self, todo: "queue.SimpleQueue[_Action | None]") -> None:
        try:
            with jax.enable_x64(self._x64):
                while (action := todo.get()) is not None:
                    if action in self._open:
                        self._do(action)
                    del action
        except BaseException as error:
            self.fail(error if isinstance(error, Exception) else RunError(one_line(error)))

    def _do(self, action: _Action) -> None:
        results = action.call([kept(entry) for entry in action.given])
        action.given = ()
        for promised, result in zip(action.promised, results, strict=True):
            promised.keep(result)
        action.promised = []
        with self._lock:
            is_open = action in self._open
            self._open.pop(action, None)
        if is_open:
            action.set_result(None)


def holds_host(call: Call, mesh: Mesh) -> bool:
    """Whether a program may hold its host's thread until it ends: on a CPU one that calls Python does."""
    return mesh.devices.flat[0].platform == "cpu" and host_calls.calls_host(call.equations)


def lanes_of(schedule: Schedule, meshes: Mapping[str, Mesh]) -> Lanes | None:
    """The lanes of a schedule's groups; None where one thread keeps none of them waiting.

    That is where whatever comes after a program that holds the thread needs its results. What crosses from
    process to process, and groups with devices in several, are on one lane: in the schedule's order.
    """
    here = {name: mesh for name, mesh in meshes.items() if is_here(mesh)}
    if len(here) < 2 or not _Order(here).keeps_waiting(schedule):
        return None
    return Lanes(name for name, mesh in here.items() if not spans_processes(mesh))


class _Order:
    """What depends on which programs that hold the thread: a bit for each of these that was met."""

    def __init__(self, here: Mapping[str, Mesh]):
        self._here = here
        self._met = 0
        self._before: dict[Value | str, int] = {}  # of what a value was made, or a group has done

    def keeps_waiting(self, schedule: Schedule) -> bool:
        """Whether a fragment, of this iteration or the next, comes after one of them and does not need it."""
        for _ in range(2):
            if self._steps(schedule.steps):
                return True
            self._rebind(schedule.carry)
        return False

    def _steps(self, steps: Sequence[Step]) -> bool:
        return any(map(self._step, steps))

    def _step(self, step: Step) -> bool:
        if isinstance(step, Move):
            self._rebind(step.pairs)
            return False
        if isinstance(step, Call):
            return self._call(step)
        self._rebind(step.enter)
        for _ in range(min(step.trips, 2)):
            if self._steps(step.steps):
                return True
            self._rebind(step.carry)
        self._rebind(step.leave)
        return False

    def _call(self, call: Call) -> bool:
        before = self._before.get(call.group, 0)
        for value in call.inputs:
            before |= self._before.get(value, 0)
        ours = call.group in self._here
        if ours and call.fragments and self._met & ~before:
            return True
        if ours and holds_host(call, self._here[call.group]):
            bit = self._met + 1  # bits so far are all ones
            self._met, before = self._met | bit, before | bit
        self._before.update(dict.fromkeys([call.group, *call.outputs], before))
        return False

    def _rebind(self, pairs: Sequence[tuple[Value, Value]]) -> None:
        before = [self._before.get(a, 0) for a, _ in pairs]
        self._before.update((b, bits) for (_, b), bits in zip(pairs, before, strict=True))


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Waits for threads to end, so long at most."""
    end = time.monotonic() + seconds
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, end - time.monotonic()))


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No thread may be in XLA when Python ends: it would be unwound there, which aborts the process."""
    _join(list(_threads), _END_S)
