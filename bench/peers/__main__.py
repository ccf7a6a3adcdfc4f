"""Compares the speed of fdg with other trainers, in turns; results go to `docs/performance.json`.

    python -m bench.peers --list
    python -m bench.peers purejaxrl/PPO-CartPole --purejaxrl build/purejaxrl
    python -m bench.peers --purejaxrl PATH --purejaxql PATH --jaxmarl PATH

A pair is fdg and a peer on one task. `--list` prints the pairs' names; a prefix of names selects several.
Without names all pairs run, except those whose checkout is missing. Each peer is installed into its own
environment, `build/venvs/NAME`, on first use.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import harness
from bench.peers.alternate import DriverError, compare
from bench.peers.pairs import Pair
from bench.peers.peers import PEERS
from bench.peers.table import PAIRS
from bench.results import RESULTS, keep, returns_text


def main() -> None:
    parser = harness.parser("bench.peers", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pairs, or prefixes of their names (all)")
    parser.add_argument("--list", action="store_true", help="print the pairs and run nothing")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds of each side, after one of warm-up (5)"
    )
    parser.add_argument("--flags", default="", help='further flags for fdg, such as "--devices 1"')
    parser.add_argument("--out", type=Path, help="file of the results (docs/performance.json)")
    parser.add_argument(
        "--install-only", action="store_true", help="create the environments of peers and run nothing"
    )
    for peer in PEERS.values():
        if peer.is_checkout and any(pair.peer == peer.name for pair in PAIRS.values()):
            parser.add_argument(f"--{peer.name}", metavar="PATH", help=f"a checkout of {peer.source}")
    args = parser.parse_args()
    names = set(args.names or [""])
    exact, starts = names & PAIRS.keys(), tuple(names - PAIRS.keys())
    chosen = [pair for name, pair in PAIRS.items() if name in exact or name.startswith(starts)]
    if args.list:
        for pair in chosen:
            print(f"{pair.name:50} >= {pair.target_ratio:g}x  fdg.train {' '.join(pair.our_flags)}")
        return
    if not chosen:
        parser.error(f"no pair begins with {' or '.join(args.names)}: --list shows them")
    failed = []
    for pair in chosen:
        checkout = getattr(args, pair.peer, None)
        if PEERS[pair.peer].is_checkout and checkout is None:
            print(f"{pair.name}: left out, because it needs --{pair.peer} PATH", flush=True)
            continue
        PEERS[pair.peer].install()
        if not args.install_only and not _measure(pair, checkout and str(Path(checkout).resolve()), args):
            failed.append(pair.name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _measure(pair: Pair, checkout: str | None, args: argparse.Namespace) -> bool:
    """Measures a pair; False if a side failed."""
    try:
        result = compare(pair, checkout, args.rounds, args.flags)
    except DriverError as error:
        print(f"{pair.name}: failed\n{error}", flush=True)
        return False
    print(line(pair.name, result, pair.target_ratio), flush=True)
    if not args.flags or args.out is not None:  # by default, only results without further flags are recorded
        keep("peers", pair.name, {**pair.figures, **result}, args.out or RESULTS)
    return True


def line(name: str, result: dict[str, Any], target_ratio: float) -> str:
    """The result of `compare` as a line of text; before each slash is fdg's figure."""
    ours, theirs = result["ours"], result["theirs"]
    low, high = result["ratio_middle_half"]
    return (
        f"{name}: {result['ratio']:.2f}x [{low:.2f}, {high:.2f}] of >= {target_ratio:g}x; steps/s "
        f"{ours['steps_per_s']:,.0f} / {theirs['steps_per_s']:,.0f}; compile "
        f"{ours['compile_seconds']:.1f} / {theirs['compile_seconds']:.1f} s; start "
        f"{ours['start_seconds']:.1f} / {theirs['start_seconds']:.1f} s; return {returns_text(result)}; "
        f"{ours['devices']} device{'s' * (ours['devices'] > 1)}"
    )


if __name__ == "__main__":
    main()
