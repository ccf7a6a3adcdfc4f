"""Compares fdg with other trainers on one device, in turns."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

from bench.gpu.measuring import Figures, Measurement, Settings
from bench.peers.alternate import NO_COMPILATION_CACHE, DriverError, compare
from bench.peers.checkouts import purejaxrl
from bench.peers.libraries import brax
from bench.peers.pairs import Pair
from bench.peers.peers import PEERS
from fdg.errors import FdgError


def measurements(settings: Settings) -> list[Measurement]:
    """Pairs whose rounds take seconds on a GPU; peers run in this interpreter's environment."""
    # PureJaxRL: environment, number of environments, steps per round, target of the ratio.
    # brax: number of environments, steps per rollout, steps per round, environment.
    pairs = [
        purejaxrl("CartPole-v1", 4096, 10_485_760, 1.0),
        purejaxrl("Breakout-MinAtar", 4096, 10_485_760, 1.0),
        brax(4096, 16, 2_097_152),
        purejaxrl("CartPole-v1", 65536, 83_886_080, 1.0),
        brax(4096, 16, 2_097_152, "ant"),
    ]
    if settings.tiny:
        pairs = [purejaxrl("CartPole-v1", 4, 1024, 1.0)]
    measure = partial(compare_pair, rounds=settings.full_or_tiny(3, 1), peers=settings.peers)
    return [
        Measurement("In turns", pair.name, partial(measure, pair), seconds=60, limit=150) for pair in pairs
    ]


def compare_pair(pair: Pair, rounds: int, peers: Path | None) -> Figures:
    """The medians of both sides, and the median of the ratios; `peers` is the folder of checkouts.

    Raises:
      FdgError: the peer needs a checkout, and there is none; or a side failed.
    """
    checkout = None
    if PEERS[pair.peer].is_checkout:
        checkout = peers and peers / pair.peer
        if checkout is None or not checkout.is_dir():
            place = f" in {checkout}" if checkout else ""
            raise FdgError(
                f"no checkout of {PEERS[pair.peer].source}{place}: clone it into DIR/{pair.peer}, and add"
                " --peers DIR"
            )
    try:
        comparison = compare(
            pair,
            checkout and str(checkout.resolve()),
            rounds,
            "--devices 1",
            python=Path(sys.executable),
            # Two processes share the memory of the device.
            environment={**NO_COMPILATION_CACHE, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
    except DriverError as error:
        raise FdgError((str(error).strip().splitlines() or ["the driver wrote no error"])[-1]) from None
    ours, theirs = comparison["ours"], comparison["theirs"]
    return {
        "fdg steps/s": ours["steps_per_s"],
        "peer's steps/s": theirs["steps_per_s"],
        "ratio": comparison["ratio"],
        "fdg compiles s": ours["compile_seconds"],
        "peer compiles s": theirs["compile_seconds"],
        "fdg return": ours["returned"],
        "peer's return": theirs["returned"],
        "found": comparison,
        "pair": dataclasses.asdict(pair),
    }
