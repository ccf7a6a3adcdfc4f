"""`python -m fdg.launch`: runs `fdg.train` in several processes, on this machine or on a Ray cluster.

On other clusters, start `fdg.train` with the cluster's launcher (`srun`, Kubernetes) and `--distributed`.
"""

import contextlib
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
    add_earlier_run_flags,
    add_flags,
    flags_of,
    normalise,
)
from fdg.errors import FdgError
from fdg.launching.here import Here
from fdg.launching.restarting import run_with_restarts
from fdg.training.run_directory import make_new_run_folder, read_config
from fdg.training.settings import Names, Settings

FLAGS = (
    Flag("num_processes", int, 2, "number of processes to start on this machine"),
    Flag("ray", bool, False, "start one process on each node of a Ray cluster instead"),
    Flag("nodes", int | None, None, "with --ray: number of nodes (None: all with free resources)"),
    Flag(
        "ray_address",
        str | None,
        None,
        "with --ray: HOST:PORT of the cluster's head (None: RAY_ADDRESS, the cluster of this machine,"
        " or a new local one)",
    ),
    Flag("cpus_per_node", float, 1.0, "with --ray: CPUs that Ray reserves for a process"),
    Flag(
        "restarts",
        int,
        0,
        "maximum number of restarts from the last checkpoint, without the processes or nodes that were lost",
    ),
)
_RAY_FLAGS = ("nodes", "ray_address", "cpus_per_node")  # flags that need --ray
_USAGE = "%(prog)s [flags] -- [flags of fdg.train]"

# Flags of `fdg.train` that a user must not give, since the launcher sets them for each process.
_PROCESS_FLAGS = ("--coordinator-address", "--process-id", "--distributed")


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes and waits for them; returns the exit status of the run."""

    def run(argv: Sequence[str]) -> int:
        flags, words = _parse(argv)
        if flags is None:
            return 0
        with contextlib.closing(_TrainWords(words, may_restart=flags["restarts"] > 0)) as train_words:
            launcher: Any = Here(flags["num_processes"])
            if flags["ray"]:
                from fdg.launching.on_ray import OnRay

                launcher = OnRay(flags["ray_address"], flags["nodes"], flags["cpus_per_node"])
            with contextlib.closing(launcher):
                return run_with_restarts(launcher, train_words.words_for, flags["restarts"])

    return guarded(run, argv)


def _parse(argv: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """The launcher's flags (None after `--help`), and the words for `fdg.train`."""
    parser = Parser(
        prog="python -m fdg.launch", description=__doc__, usage=_USAGE, allow_abbrev=False, add_help=False
    )
    add_flags(parser, FLAGS)
    if "--" in argv:
        separator = argv.index("--")
        launcher_words, train_words = normalise(argv[:separator]), normalise(argv[separator + 1 :])
        asks_help = {"-h", "--help"} & {*launcher_words}
        values = {} if asks_help else parser.parse_strictly(launcher_words)
    else:
        namespace, train_words = parser.parse_known_args(normalise(argv))
        values, asks_help = vars(namespace), {"-h", "--help"} & {*train_words}
    if asks_help:
        parser.print_help()
        return None, []
    if values.get("ray"):
        if "num_processes" in values:
            raise FdgError("--num-processes is for one machine: with --ray, give --nodes")
    elif flag_name := next((name for name in _RAY_FLAGS if name in values), None):
        raise FdgError(f"--{flag_name.replace('_', '-')} is for a Ray cluster: give --ray too")
    flags = [word.partition("=")[0] for word in train_words]
    if "--num-processes" in flags:
        raise FdgError("--num-processes is for the launcher: write it before the --")
    if flag := next((name for name in _PROCESS_FLAGS if name in flags), None):
        raise FdgError(f"{flag} is set for each process by the launcher: leave it out, or use fdg train")
    for name in ("num_processes", "nodes"):
        if values.get(name) is not None and values[name] < 1:
            raise FdgError(f"--{name.replace('_', '-')} {values[name]}: it must be at least 1")
    if values.get("restarts", 0) < 0:
        raise FdgError(f"--restarts {values['restarts']}: it must be 0 or more")
    if not 0 < values.get("cpus_per_node", 1.0) < float("inf"):
        raise FdgError(f"--cpus-per-node {values['cpus_per_node']}: it must be above 0 and finite")
    return {flag.name: values.get(flag.name, flag.default) for flag in FLAGS}, train_words


class _TrainWords:
    """Makes the words for `fdg.train` that start or resume a run."""

    def __init__(self, argv: Sequence[str], may_restart: bool):
        self._words, words = list(argv), Words(argv)
        parser = Parser(add_help=False, allow_abbrev=False)
        run_flags = [flag for flag in flags_of(Settings) if flag.name in ("out", "devices")]
        add_flags(parser, run_flags)
        add_earlier_run_flags(parser)
        add_aliases(parser, run_flags)
        values = words.take(parser)
        self._other_words = words.remaining
        self._devices: int | None = values.get("devices")
        directory = values.get("resume") or values.get("out")
        self._out: Path | None = None  # a folder for the run; without restarts, a run makes its own
        if directory is None and may_restart:
            names_and_seed = words.take(JobFlags().parser(add_help=False))
            # The configuration of --config or --from is not read here, so it cannot be part of the name.
            defaults: dict[str, Any] = {"env": Names.env, "algo": Names.algo, "seed": Settings.seed}
            if {"config", "start_from"} & values.keys():
                defaults = {"env": None, "algo": "launched", "seed": ""}
            names = (names_and_seed.get(name, value) for name, value in defaults.items())
            directory = self._out = make_new_run_folder(*names)
        self._directory = Path(directory or "")

    def close(self) -> None:
        """Removes the folder made for the run if nothing was written into it."""
        if self._out is not None:
            with contextlib.suppress(OSError):
                self._out.rmdir()

    def words_for(self, initial: int, count: int, is_restart: bool) -> list[str]:
        """The words for `fdg.train`.

        `initial` is the number of processes at the first start, and `count` the current number. Each process
        keeps its number of devices. A restart begins from scratch if the run has not written its files yet.
        """
        try:
            config = read_config(self._directory) if is_restart else None
        except FdgError:
            config = None
        if config is None:
            words = self._words if self._out is None else [*self._words, "--out", str(self._out)]
            return words if count == initial else [*words, *_devices_flag(self._devices, initial, count)]
        # The number of the first start: `config.json` may have that of an earlier session, or of a restart
        # with fewer processes.
        self._devices = self._devices or config.get("devices")
        devices = _devices_flag(self._devices, initial, count)
        return [*self._other_words, "--resume", str(self._directory), *devices]


def _devices_flag(devices: Any, initial: int, count: int) -> list[str]:
    """The flag `--devices` for `count` processes, if `initial` processes had `devices`; empty for None."""
    if not isinstance(devices, int):
        return []
    return ["--devices", str(max(1, devices // initial) * count)]
