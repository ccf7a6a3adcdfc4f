"""`python -m fdg.launch`: runs `fdg.train` in several processes, on this machine or on a Ray cluster.

On other clusters, start `fdg.train` with the cluster's launcher (`srun`, Kubernetes) and `--distributed`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdg.commands.cli import guarded
from fdg.commands.flags import (
    Flag,
    JobFlags,
    Parser,
    Words,
    add_aliases,
    add_earlier,
    add_flags,
    fields_of,
    normalise,
)
from fdg.errors import FdgError
from fdg.launching.here import Here
from fdg.launching.restarting import run_with_restarts
from fdg.training.run_directory import read_config
from fdg.training.settings import Names, Settings
from fdg.training.starting import free_directory

FLAGS = (
    Flag("num_processes", int, 2, "how many to start on this machine"),
    Flag("ray", bool, False, "start one on each node of a Ray cluster instead"),
    Flag("nodes", int | None, None, "with --ray: on how many (None: all that have room)"),
    Flag(
        "ray_address",
        str | None,
        None,
        "with --ray: HOST:PORT of the cluster's head (None: RAY_ADDRESS, the cluster that this machine is in,"
        " or one started here)",
    ),
    Flag("cpus_per_node", float, 1.0, "with --ray: what Ray counts for a process; the rest is for others"),
    Flag(
        "restarts",
        int,
        0,
        "how often a run goes on from its last checkpoint, with what is left, once a process or node is lost",
    ),
)
_OF_RAY = ("nodes", "ray_address", "cpus_per_node")
_USAGE = "%(prog)s [flags] -- [flags of fdg.train]"

_OF_A_PROCESS = ("--coordinator-address", "--process-id", "--distributed")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes and waits; returns the exit status of the one that failed, or 0."""

    def run(argv: Sequence[str]) -> int:
        given, words = _read(argv)
        if given is None:
            return 0
        plan = _Words(words, may_restart=given["restarts"] > 0)
        engine: Any = Here(given["num_processes"])
        if given["ray"]:
            from fdg.launching.on_ray import OnRay

            engine = OnRay(given["ray_address"], given["nodes"], given["cpus_per_node"])
        try:
            return run_with_restarts(engine, plan.of, given["restarts"])
        finally:
            engine.close()

    return guarded(run, argv)


def _read(argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """The launcher's flags (None after `--help`), and those of `fdg.train`."""
    parser = Parser(
        prog="python -m fdg.launch", description=__doc__, usage=_USAGE, allow_abbrev=False, add_help=False
    )
    add_flags(parser, FLAGS)
    if "--" in argv:
        mine, rest = normalise(argv[: argv.index("--")]), normalise(argv[argv.index("--") + 1 :])
        helps = {"-h", "--help"} & {*mine}
        given = {} if helps else parser.parse_strictly(mine)
    else:
        known, rest = parser.parse_known_args(normalise(argv))
        given, helps = vars(known), {"-h", "--help"} & {*rest}
    if helps:
        parser.print_help()
        return None, []
    if given.get("ray"):
        if "num_processes" in given:
            raise FdgError("--num-processes is of one machine: with --ray, say --nodes")
    elif other := next((name for name in _OF_RAY if name in given), None):
        raise FdgError(f"--{other.replace('_', '-')} is of a Ray cluster: say --ray too")
    flags = [word.partition("=")[0] for word in rest]
    if flag := next((one for one in _OF_A_PROCESS if one in flags), None):
        raise FdgError(f"{flag} is given to each process by the launcher: leave it out, or use fdg train")
    for name in ("num_processes", "nodes"):
        if given.get(name) is not None and given[name] < 1:
            raise FdgError(f"--{name.replace('_', '-')} {given[name]}: it must be at least 1")
    if given.get("restarts", 0) < 0:
        raise FdgError(f"--restarts {given['restarts']}: it must be 0 or more")
    if not 0 < given.get("cpus_per_node", 1.0) < float("inf"):
        raise FdgError(f"--cpus-per-node {given['cpus_per_node']}: it must be above 0")
    return {flag.name: given.get(flag.name, flag.default) for flag in FLAGS}, rest


class _Words:
    """The words of a run, as given and as used to resume."""

    def __init__(self, argv: Sequence[str], may_restart: bool):
        self._words, left = list(argv), Words(argv)
        parser = Parser(add_help=False, allow_abbrev=False)
        where = [flag for flag in fields_of(Settings) if flag.name in ("out", "devices")]
        add_flags(parser, where)
        add_earlier(parser)
        add_aliases(parser, where)
        given = left.take(parser)
        self._rest = left.left
        self._devices: int | None = given.get("devices")
        directory = given.get("resume") or given.get("out")
        self._adds = may_restart and directory is None  # else `fdg.train` finds a place
        if directory is None:  # where it would write, which must be known here to go on there
            said = left.take(JobFlags().parser(add_help=False))
            # A configuration that the run begins with is not read here.
            begins = Names(algo="launched", env=None) if {"config", "start_from"} & given.keys() else Names()
            seed = said.get("seed", "" if begins.env is None else Settings.seed)
            directory = free_directory(said.get("env", begins.env), said.get("algo", begins.algo), seed)
        self._directory = Path(directory)

    def of(self, first: int, count: int, again: bool) -> list[str]:
        """The words for `fdg.train`.

        `first` is the original number of processes; each keeps its number of devices. A restarted run
        (`again`) starts afresh if it had not written any file.
        """
        try:
            config = read_config(self._directory) if again else None
        except FdgError:
            config = None
        if config is None:
            words = [*self._words, "--out", str(self._directory)] if self._adds else self._words
            return words if count == first else [*words, *_fewer(self._devices, first, count)]
        devices = config.get("devices")
        return [*self._rest, "--resume", str(self._directory), *_fewer(devices, first, count)]


def _fewer(devices: Any, first: int, count: int) -> list[str]:
    """Adjusts `--devices` to another number of processes."""
    return [] if not isinstance(devices, int) else ["--devices", str(max(1, devices // first) * count)]
