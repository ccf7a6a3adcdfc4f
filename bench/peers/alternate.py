"""Runs fdg and a peer in turns: both compile first, then train alternately, round after round."""

import contextlib
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

# Environment variables: JAX caches no compiled programs, so that compilation is timed.
NO_COMPILATION_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
ON_CPU = {**NO_COMPILATION_CACHE, "JAX_PLATFORMS": "cpu"}


class DriverError(Exception):
    """A driver ended early; the message is the end of its error output."""


class Driver(contextlib.AbstractContextManager["Driver"]):
    """A driver process (`bench.peers.serve`): a module of `bench/peers/drivers/`, with its configuration.

    `python` is its interpreter; `environment` has environment variables in addition to those of this process.

    Attributes:
      facts: the JSON object that the driver printed when ready, and `start_seconds`, the time until then.
    """

    def __init__(self, python: Path, module: str, config: Mapping[str, Any], environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", "bench.peers.serve", f"bench.peers.drivers.{module}", json.dumps(config)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.facts = {**self._read_answer(), "start_seconds": time.perf_counter() - begun}
        except BaseException:
            self.close()
            raise

    def round(self, seed: int) -> dict[str, Any]:
        """Trains for one round; returns the driver's figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise DriverError(self._log.read()[-2000:])
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            file.close()


def ours(flags: str, keeps_state: bool = False, environment: Mapping[str, str] = ON_CPU) -> Driver:
    """fdg's driver, with flags of `fdg.train`; `keeps_state`: a round starts where the last one ended."""
    config = {"flags": flags.split(), "keeps_state": keeps_state}
    return Driver(Path(sys.executable), "ours", config, environment)


def compare(
    pair: Pair,
    checkout: str | None,
    rounds: int,
    more_flags: str = "",
    python: Path | None = None,
    environment: Mapping[str, str] = ON_CPU,
) -> dict[str, Any]:
    """Measures a pair: a warm-up round of each side, then `rounds` rounds of each in turns.

    Returns the figures of both sides (`ours`, `theirs`), the ratio of speeds, its middle half, and `rounds`.

    Args:
      pair: the two sides.
      checkout: the folder of a peer's scripts, if it needs one.
      rounds: rounds of each side, without the warm-up.
      more_flags: further flags of `fdg.train`.
      python: the peer's interpreter; None for that of its environment.
      environment: environment variables of both sides, in addition to those of this process.

    Raises:
      DriverError: a side did not start, or failed.
    """
    config = {**pair.config, **({"checkout": checkout} if checkout else {})}
    peer = PEERS[pair.peer]
    with (
        ours(f"{' '.join(pair.our_flags)} {more_flags}", pair.keeps_state, environment) as mine,
        Driver(python or peer.python, pair.driver or pair.peer, config, environment) as theirs,
    ):
        figures = in_turns({"ours": mine.round, "theirs": theirs.round}, rounds)
        return {
            "ours": _summary(mine.facts, figures["ours"]) | {"devices": mine.facts["devices"]},
            "theirs": _summary(theirs.facts, figures["theirs"]),
            **Spread.ratio(speeds(figures["ours"]), speeds(figures["theirs"])).figures,
            "rounds": rounds,
        }


def speeds(rounds: Sequence[Mapping[str, Any]]) -> list[float]:
    """Steps per second of each round."""
    return [figures["steps"] / figures["seconds"] for figures in rounds]


def _summary(facts: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of one side, and the middle half of its speeds."""
    speed = Spread.of(speeds(rounds))
    returns = [figures["return"] for figures in rounds if figures["return"] is not None]
    return {
        "steps_per_s": speed.median,
        "middle_half": [speed.low, speed.high],
        "start_seconds": facts["start_seconds"],
        "compile_seconds": facts["compile_seconds"],
        "returned": statistics.median(returns) if returns else None,
    }
