"""Restarts the processes of a run after a failure, if that can help, and says which process caused it."""

import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

STOP_SECONDS = 20.0  # time limit for the other processes to end after a process has failed
LOST_SECONDS = 5.0  # the same if that process was killed or stopped; the others have to detect it

REFUSED = 2  # exit status of an invalid request: a restart cannot help
# Exit statuses of a process that the user ended.
_ENDED_BY_USER = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE))


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a run that has ended."""

    who: str  # the process's name in errors
    status: int | None  # exit status; negative: the number of the signal that killed it; None: it vanished
    how: str = ""  # what happened to the process, if known

    def reason(self) -> str:
        """Why it ended; "" if the process printed its own error."""
        if self.status is None:
            return f"{self.who} is gone: {self.how}"
        if self.status < 0:
            return f"{self.who} was killed by {_signal_name(-self.status)}"
        return f"{self.who}: {self.how}" if self.how else ""


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of all processes of a run."""

    status: int  # the exit status of the run; 0 for success
    reason: str = ""  # which process failed first and how; "" if that process printed its own error
    interrupted: bool = False  # whether the user ended the run

    @property
    def can_restart(self) -> bool:
        """Whether a restart from the last checkpoint can help: not after an invalid request or Ctrl-C."""
        return not self.interrupted and self.status not in (0, REFUSED, *_ENDED_BY_USER)


def ending_of(processes: Sequence[Process], interrupted: bool = False) -> Ending:
    """Combines the ends of all processes, which are given in order of time.

    A process that was killed or has vanished is the cause, even if another one ended before: the others end
    because of it. They may also abort (SIGABRT), when a collective times out.

    >>> ending_of([Process("process 0", 1), Process("process 1", -9)])
    Ending(status=137, reason='process 1 was killed by SIGKILL', interrupted=False)
    """
    failed = [process for process in processes if process.status != 0]
    if not failed:
        return Ending(0, interrupted=interrupted)
    cause = min(failed, key=_rank_as_cause)
    status = 1 if cause.status is None else 128 - cause.status if cause.status < 0 else cause.status
    return Ending(status, cause.reason(), interrupted)


def _rank_as_cause(process: Process) -> int:
    """A rank by which failed processes are sorted; 0 is the most likely cause of a failure."""
    if process.status is None:
        return 0
    return 3 if process.status > 0 else 2 if process.status == -signal.SIGABRT else 1


def _signal_name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


class Launcher(Protocol):
    """Starts the processes of a run."""

    def reserve(self, first: bool) -> int:
        """Reserves resources for processes; returns their number. `first` is False for a restart."""

    def run(self, words: Sequence[str]) -> Ending:
        """Starts `python -m fdg.train WORDS` in each process, and waits until all have ended."""


def run_with_restarts(
    launcher: Launcher, words: Callable[[int, int, bool], Sequence[str]], restarts: int
) -> int:
    """Runs the processes of a run, and restarts them after failures, at most `restarts` times.

    `words` returns the command-line words of a process, given the original number of processes, the current
    number, and whether this is a restart. Returns the exit status of the last run.
    """
    original_count = count = launcher.reserve(True)
    for num_restarts in range(restarts + 1):
        ending = launcher.run(words(original_count, count, num_restarts > 0))
        if ending.reason:
            print("error:", ending.reason, file=sys.stderr, flush=True)
        if not ending.can_restart or num_restarts == restarts:
            break
        count = launcher.reserve(False)
        noun = "process" if count == 1 else "processes"
        print(f"restart {num_restarts + 1} of {restarts}, with {count} {noun}", file=sys.stderr, flush=True)
    return ending.status
