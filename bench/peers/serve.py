"""The side of a driver: a process that is ready to train, and does so once for each line that it is sent.

Standard library only, since drivers run in the environments of peers. A driver is started with one argument,
its configuration as JSON; it prints one JSON object once all is compiled, and one for each line on its
standard input, which is the seed of a round. Whatever libraries print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(
    prepare: Callable[[dict[str, Any]], tuple[Callable[[int], dict[str, Any]], dict[str, Any]]],
) -> None:
    """Runs a driver until its standard input ends.

    Args:
      prepare: takes the configuration; returns a round, and facts for the report such as `compile_seconds`.
        A round takes a seed, trains, waits for the numbers, and returns `{"steps", "seconds", "return"}`.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    one_round, facts = prepare(json.loads(sys.argv[1]))
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
