"""A run that goes on from its last checkpoint where one of its processes was lost, with what is left."""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from fdg.launching.ending import Ending


class Engine(Protocol):
    """What starts the processes of a run."""

    def reserve(self, first: bool) -> int:
        """Makes room for processes, of what is there now; how many."""

    def run(self, words: Sequence[str]) -> Ending:
        """Starts `fdg.train` with these words in each, and waits for their end."""


def carry_out(engine: Engine, words: Callable[[int, int, bool], Sequence[str]], restarts: int) -> int:
    """Runs, and runs again where that can help.

    Args:
      engine: that starts the processes.
      words: for `fdg.train`, from the number of processes at first, the number now, and whether this is a
        restart.
      restarts: how often it may be started again.

    Returns:
      The exit status of the last time.
    """
    first = count = engine.reserve(True)
    for done in range(restarts + 1):
        ending = engine.run(words(first, count, done > 0))
        if ending.reason:
            print("error:", ending.reason, file=sys.stderr, flush=True)
        if not ending.may_go_on or done == restarts:
            break
        count = engine.reserve(False)
        noun = "process" if count == 1 else "processes"
        print(f"restart {done + 1} of {restarts}, with {count} {noun}", file=sys.stderr, flush=True)
    return ending.status
