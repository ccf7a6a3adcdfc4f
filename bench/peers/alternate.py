"""Two trainers in turns: both are compiled and ready, and train one after the other, round after round."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Spread, in_turns
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
            [python, "-m", "bench.peers.serve", f"bench.peers.drivers.{module}", json.dumps(config)],
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

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            file.close()


def ours(flags: str, continues: bool = False, environment: Mapping[str, str] = _ENVIRONMENT) -> Driver:
    """fdg's own driver, of flags of `fdg.train`; `continues`: each round from where the last one ended."""
    return Driver(Path(sys.executable), "ours", {"flags": flags.split(), "continues": continues}, environment)


def compare(
    pair: Pair,
    checkout: str | None,
    rounds: int,
    more_flags: str = "",
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
    with (
        ours(f"{' '.join(pair.our_flags)} {more_flags}", pair.continues, environment) as mine,
        Driver(python or peer.python, pair.driver or pair.peer, config, environment) as theirs,
    ):
        figures = in_turns({"ours": mine.round, "theirs": theirs.round}, rounds)
        speeds = {side: [one["steps"] / one["seconds"] for one in ones] for side, ones in figures.items()}
        return {
            "ours": _summary(mine.facts, figures["ours"]) | {"devices": mine.facts["devices"]},
            "theirs": _summary(theirs.facts, figures["theirs"]),
            **Spread.ratio(speeds["ours"], speeds["theirs"]).figures,
            "rounds": rounds,
        }


def _summary(facts: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one side: medians, and the middle half of its speeds."""
    speed = Spread.of(one["steps"] / one["seconds"] for one in rounds)
    returns = [one["return"] for one in rounds if one["return"] is not None]
    return {
        "steps_per_s": speed.median,
        "middle_half": [speed.low, speed.high],
        "start_seconds": facts["start_seconds"],
        "compile_seconds": facts["compile_seconds"],
        "returned": statistics.median(returns) if returns else None,
    }
