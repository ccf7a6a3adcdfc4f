"""Two trainers in turns: both are compiled and ready, and train one after the other, round after round."""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import ROOT
from bench.peers.pairs import Pair
from bench.peers.peers import PEERS

# No program comes from an earlier run, or the seconds that compiling takes would say nothing.
FRESH = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
_ENVIRONMENT = {**FRESH, "JAX_PLATFORMS": "cpu"}


class DriverError(Exception):
    """A driver ended; the last lines that it printed."""


class Driver:
    """A running driver.

    Attributes:
      facts: what it said when it was ready; `start_seconds` were those from its start to then.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        config: Mapping[str, Any],
        environment: Mapping[str, str] = _ENVIRONMENT,
    ):
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` does
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.drivers.{module}", json.dumps(config)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            self.facts = {**self._answer(), "start_seconds": time.perf_counter() - begun}
        except BaseException:
            self.close()
            raise

    def round(self, seed: int) -> dict[str, Any]:
        """One training; what the driver says of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise DriverError(self._said.read()[-2000:])
        return json.loads(line)

    def close(self) -> None:
        """Ends its process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            file.close()


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one side: medians, and the middle half of its speeds."""

    steps_per_s: float
    middle_half: tuple[float, float]
    start_seconds: float
    compile_seconds: float
    returned: float | None

    @classmethod
    def of(cls, facts: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> "Summary":
        """Of what a driver said."""
        speeds = [one["steps"] / one["seconds"] for one in rounds]
        returns = [one["return"] for one in rounds if one["return"] is not None]
        return cls(
            statistics.median(speeds),
            middle_half(speeds),
            facts["start_seconds"],
            facts["compile_seconds"],
            statistics.median(returns) if returns else None,
        )


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Without the lowest and the highest quarter of the values, rounded down to whole values.

    >>> middle_half([5.0, 1.0, 3.0, 2.0, 4.0])
    (2.0, 4.0)
    """
    ordered = sorted(values)
    without = len(ordered) // 4
    return ordered[without], ordered[-1 - without]


def compare(
    pair: Pair,
    checkout: str | None,
    rounds: int,
    more_flags: Sequence[str] = (),
    python: Path | None = None,
    environment: Mapping[str, str] = _ENVIRONMENT,
) -> dict[str, Any]:
    """Measures a pair: one round of each that does not count, then `rounds` of each in turns.

    Args:
      pair: what is compared.
      checkout: of a peer that is a script.
      rounds: of each that count.
      more_flags: of `fdg.train`.
      python: the peer's interpreter; None for that of its environment.
      environment: variables of both sides, over those of this process.

    Raises:
      DriverError: a side could not be started, or failed.
    """
    config = {**pair.config, **({"checkout": checkout} if checkout else {})}
    peer = PEERS[pair.peer]
    mine = {"flags": [*pair.our_flags, *more_flags], "continues": pair.continues}
    with (
        _running(Path(sys.executable), "ours", mine, environment) as ours,
        _running(python or peer.python, pair.driver or pair.peer, config, environment) as theirs,
    ):
        said: dict[Driver, list[dict[str, Any]]] = {ours: [], theirs: []}
        for seed in range(rounds + 1):
            for driver in (ours, theirs) if seed % 2 else (theirs, ours):
                said[driver].append(driver.round(seed))
        first, second = (said[driver][1:] for driver in (ours, theirs))
        ratios = [
            (a["steps"] / a["seconds"]) / (b["steps"] / b["seconds"])
            for a, b in zip(first, second, strict=True)
        ]
        return {
            "ours": dataclasses.asdict(Summary.of(ours.facts, first)) | {"devices": ours.facts["devices"]},
            "theirs": dataclasses.asdict(Summary.of(theirs.facts, second)),
            "ratio": statistics.median(ratios),
            "ratio_middle_half": middle_half(ratios),
            "rounds": rounds,
        }


@contextlib.contextmanager
def _running(*words: Any) -> Iterator[Driver]:
    driver = Driver(*words)
    try:
        yield driver
    finally:
        driver.close()
