"""Runs a driver: a process that trains a peer, or fdg, for one round per line of its standard input.

    python -m bench.peers.serve MODULE CONFIGURATION

This module uses only the standard library, because drivers run in the environments of peers. MODULE, such as
`bench.peers.drivers.brax`, has a function `prepare`, which takes the configuration (JSON). The process prints
a JSON object of facts when everything is compiled. Each line of its input is the seed of a round, for which
it prints a JSON object of figures. Output of libraries goes to standard error.
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

    The driver's `prepare` returns a function and facts such as `compile_seconds`. The function takes a seed,
    trains for a round, waits for the results, and returns `{"steps", "seconds", "return"}`.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    one_round, facts = importlib.import_module(module).prepare(json.loads(config))
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        print(json.dumps(one_round(int(line))), file=answers)


class Stopwatch:
    """Measures seconds: `with Stopwatch() as watch: ...`, then `watch.seconds`."""

    def __enter__(self) -> "Stopwatch":
        self._begun = time.perf_counter()
        self.seconds = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begun


class Rounds:
    """Divides a training that is one call into rounds: its thread waits after each round."""

    def __init__(self) -> None:
        self._starts: queue.Queue[None] = queue.Queue()
        self._results: queue.Queue[dict[str, Any] | Exception] = queue.Queue()

    def start(self, train: Callable[[], Any]) -> dict[str, Any]:
        """Starts the training; returns the figures of the first round."""

        def call() -> None:
            try:
                train()
            except Exception as error:
                self._results.put(error)

        threading.Thread(target=call, daemon=True).start()
        return self._figures()

    def next(self, seed: int) -> dict[str, Any]:
        """Continues the training; returns the figures of the round, or raises the training's error.

        `seed` has no effect: the training keeps the seed that it started with.
        """
        self._starts.put(None)
        return self._figures()

    def end(self, figures: dict[str, Any]) -> None:
        """Ends a round; the training's thread calls this."""
        self._results.put(figures)

    def wait(self) -> None:
        """Waits until the next round starts; the training's thread calls this."""
        self._starts.get()

    def _figures(self) -> dict[str, Any]:
        figures = self._results.get()
        if isinstance(figures, Exception):
            raise figures
        return figures


if __name__ == "__main__":
    serve(*sys.argv[1:])
