"""The side of a driver: a process that is ready to train, and does so once for each line that it is sent.

    python -m bench.peers.serve MODULE CONFIGURATION

Standard library only, since drivers run in the environments of peers. MODULE has a function `prepare`, which
takes the configuration (JSON); the process prints one JSON object once all is compiled, and one for each line
on its standard input, which is the seed of a round. Whatever libraries print goes to standard error.
"""

import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def serve(module: str, config: str) -> None:
    """Runs a driver until its standard input ends.

    Its `prepare` returns a round, and facts for the report such as `compile_seconds`. A round takes a seed,
    trains, waits for the numbers, and returns `{"steps", "seconds", "return"}`.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    one_round, facts = importlib.import_module(module).prepare(json.loads(config))
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        print(json.dumps(one_round(int(line))), file=answers)


class Stopwatch:
    """`with Stopwatch() as watch: ...`, then `watch.seconds`."""

    def __enter__(self) -> "Stopwatch":
        self._begun = time.perf_counter()
        self.seconds = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begun


class Rounds:
    """Rounds of a trainer whose training is one call: it runs in a thread of its own and waits after each."""

    def __init__(self) -> None:
        self._asked: queue.Queue[int] = queue.Queue()
        self._done: queue.Queue[dict[str, Any] | Exception] = queue.Queue()

    def start(self, train: Callable[[], Any]) -> dict[str, Any]:
        """Begins the training; what its first round says."""

        def call() -> None:
            try:
                train()
            except Exception as error:
                self._done.put(error)

        threading.Thread(target=call, daemon=True).start()
        return self._said()

    def next(self, seed: int) -> dict[str, Any]:
        """Has it go on; what the round says. Raises what the training raises."""
        self._asked.put(seed)
        return self._said()

    def end(self, figures: dict[str, Any]) -> None:
        """Of the training's own thread, at the end of a round: says so."""
        self._done.put(figures)

    def wait(self) -> None:
        """Of the training's own thread: until the next round is asked for."""
        self._asked.get()

    def _said(self) -> dict[str, Any]:
        figures = self._done.get()
        if isinstance(figures, Exception):
            raise figures
        return figures


if __name__ == "__main__":
    serve(*sys.argv[1:])
