"""The cluster that this process is on: its calibration where there is one, else published figures.

A calibration is a JSON file in the user's cache directory, one for each processor and kind of device. Whose
figures these are stands in the file; a file of another machine is refused, not used.
"""

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fdg.cores import sharing, usable_cores
from fdg.costs import published
from fdg.costs.hardware import Cluster, DeviceKind, Figure, Link
from fdg.costs.overheads import Overheads
from fdg.errors import FdgError, UnknownNameError
from fdg.running import program_cache

VERSION = 4
MEASURED = "measured here"  # the source of what was
AT_MOST_UNREST = 0.25
FIX = "run python -m fdg.calibrate, which takes three minutes"

# What a core does where nobody has measured it: figures of a server's of 2026, as those of
# `bench/machines/intel-xeon-*`. Those of float64, linear algebra and calls of the host are assumed.
_A_CORE = "rough: of another machine's core, an Intel Xeon of 2026; this machine has no calibration"
REFERENCE = DeviceKind(
    "cpu",
    "cpu",
    {
        name: Figure(value, 0.5, _A_CORE)
        for name, value in {
            "product/float32": 1.5e11,
            "product/float64": 7.5e10,
            "product_bytes": 1.9e10,
            "product_call": 2.5e-7,
            "memory": 2.2e10,
            "cache": 2.6e10,
            "cache_bytes": 2**21,
            "elementwise": 2.5e10,
            "transcendental": 2.1e10,
            "special": 2.9e9,
            "reduction": 1.3e10,
            "random": 2.3e8,
            "sort": 3.5e7,
            "movement": 2e11,
            "copy": 4.7e10,
            "linear algebra": 1e9,
            "host": 3.4e9,
            "host_call": 3e-5,
            "operation": 1.7e-8,
            "trip": 1e-8,
            "dispatch": 3.2e-6,
            "argument": 6e-7,
            "transfer": 5.9e-6,
            "parallel": 1.0,
            "parallel_bytes": 1e5,
        }.items()
    },
)
SHARED_MEMORY = Link(
    "shared memory", Figure(0.0, 0.5, _A_CORE), Figure(3.7e9, 0.5, _A_CORE), Figure(7.3e-5, 0.5, _A_CORE)
)
SOCKETS = Link(
    "sockets of this host", Figure(0.0, 0.5, _A_CORE), Figure(1e9, 0.5, _A_CORE), Figure(7.4e-4, 0.5, _A_CORE)
)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured of a machine.

    Attributes:
      machine: which one: see `fingerprint`.
      kind: of its devices.
      inside, between: links among the devices of a process, and from process to process.
      cores: that they share; None for accelerators.
      date, seconds: when, and how long it took.
      jobs: seconds of an iteration of those that `kind.joined` and `kind.overheads` are fitted to, by their
        `reference_jobs.ReferenceJob.key`.
    """

    machine: Mapping[str, Any]
    kind: DeviceKind
    inside: Link
    between: Link
    cores: int | None
    date: str = ""
    seconds: float = 0.0
    jobs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def cluster(self, devices: int, processes: int = 1) -> Cluster:
        """So many devices of it, in each of some processes."""
        return Cluster(
            self.kind, devices, processes, self.inside, self.between, self.cores, hosts_per_machine=processes
        )

    @property
    def unrest(self) -> float:
        """How far repeats of one measurement lay apart: the median, over all figures, of how much longer than
        the quickest repeat the middle one took. On a quiet machine a few hundredths.
        """
        measured = [figure.spread for figure in self.kind.figures.values() if figure.source == MEASURED]
        return statistics.median(measured) if measured else 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs had the machine meanwhile, so that its figures say little."""
        return self.unrest > AT_MOST_UNREST

    def as_json(self) -> dict[str, Any]:
        """Of numbers, strings and dicts."""

        return {
            "version": VERSION,
            "machine": dict(self.machine),
            "date": self.date,
            "seconds": self.seconds,
            "cores": self.cores,
            "kind": {"name": self.kind.name, "platform": self.kind.platform},
            "joined": None if self.kind.joined is None else dict(self.kind.joined),
            "overheads": None if self.kind.overheads is None else dataclasses.asdict(self.kind.overheads),
            "jobs": dict(self.jobs),
            "figures": {name: figure._asdict() for name, figure in self.kind.figures.items()},
            "inside": link_as_json(self.inside),
            "between": link_as_json(self.between),
        }


def fingerprint(device_kind: str) -> dict[str, Any]:
    """What tells one machine from another: its processor by its features, cores, devices, JAX."""
    programs = program_cache.default_directory()
    return {
        "processor": "" if programs is None else programs.name,
        "cores": usable_cores(),
        "device_kind": device_kind,
        "jax": jax.__version__,
        "system": platform.system(),
    }


def path_of(device_kind: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the calibration of this machine's devices is kept; None for a user without a home."""
    programs = program_cache.default_directory(environment)
    if programs is None:
        return None
    name = "".join(c if c.isalnum() else "-" for c in device_kind).lower()
    return programs.parent.parent / "calibration" / f"{programs.name}-{name}.json"


def read(path: Path) -> Calibration:
    """A calibration from its file, whichever machine it is of.

    Raises:
      FdgError: there is none, or it cannot be read.
    """
    try:
        stored = json.loads(path.read_text())
    except OSError:
        raise FdgError(f"there is no calibration {path}: {FIX}") from None
    except ValueError:
        raise FdgError(f"{path} is no calibration, for it is no JSON: remove it, and {FIX}") from None
    version = stored.get("version") if isinstance(stored, dict) else None
    if version != VERSION:
        raise FdgError(f"{path} is a calibration of version {version}, and this needs {VERSION}: {FIX}")
    try:
        figures = {name: Figure(**figure) for name, figure in stored["figures"].items()}
        overheads = stored["overheads"] and Overheads(**stored["overheads"])
        kind = DeviceKind(
            stored["kind"]["name"], stored["kind"]["platform"], figures, stored["joined"], overheads
        )
        inside, between = (link_from_json(stored[word]) for word in ("inside", "between"))
        return Calibration(
            stored["machine"], kind, inside, between, stored["cores"], stored["date"], stored["seconds"],
            stored["jobs"],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise FdgError(f"{path} is no whole calibration ({error}): remove it, and {FIX}") from None


def link_as_json(link: Link) -> dict[str, Any]:
    """Of numbers, strings and dicts."""
    figures = {"latency": link.latency, "bandwidth": link.bandwidth, "call": link.call}
    return {"name": link.name, **{name: figure._asdict() for name, figure in figures.items()}}


def link_from_json(stored: Mapping[str, Any]) -> Link:
    """What `link_as_json` made."""
    latency, bandwidth, call = (Figure(**stored[name]) for name in ("latency", "bandwidth", "call"))
    return Link(stored["name"], latency, bandwidth, call)


def check_machine(calibration: Calibration, path: Path) -> None:
    """Refuses figures of another machine.

    Raises:
      FdgError: says what differs.
    """
    here = fingerprint(calibration.machine.get("device_kind", ""))
    for name, value in here.items():
        other = calibration.machine.get(name)
        if other != value:
            raise FdgError(
                f"{path} is a calibration of another machine ({name} {other}, here {value}): {FIX}"
            )


def calibrated(device_kind: str) -> Calibration | None:
    """This machine's calibration for a kind of device; None where there is none that fits."""
    path = path_of(device_kind)
    if path is None or not path.exists():
        return None
    calibration = read(path)
    try:
        check_machine(calibration, path)
    except FdgError:
        return None
    return calibration


def _disturbed(found: Calibration) -> str:
    """What is to be held against figures."""
    if not found.is_disturbed:
        return ""
    return f" while other programs had it (repeats {found.unrest:.0%} apart): {FIX} once it is quiet"


def _crowded(cores: int | None) -> str:
    """What is to be held against choosing by any figures just now."""
    others = busy_cores()
    if cores is None or others < 0.5 * cores:
        return ""
    return f"; now {others:.1f} of {cores} cores have other work, which --policy auto:measure sees"


def busy_cores() -> float:
    """How many cores had work in the last minute, on average, as far as the system says; else 0."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def cluster_of(devices: Sequence[jax.Device]) -> Cluster:
    """The cluster that some devices are: those of the job's, process by process.

    Each process is a host: sockets lie between them.

    Raises:
      FdgError: nothing is known of their kind; says how to measure it.
    """
    device = next((one for one in devices if one.platform != "cpu"), devices[0])
    processes = len({one.process_index for one in devices})
    found = host_cluster(device.device_kind, device.platform, math.ceil(len(devices) / processes), processes)
    return dataclasses.replace(found, hosts_per_machine=min(processes, sharing()))


def cluster_for(devices: int | Sequence[jax.Device]) -> Cluster:
    """The cluster that some devices are; for a number, that many CPU devices of this machine.

    Raises:
      FdgError: nothing is known of their kind; says how to measure it.
    """
    return host_cluster("cpu", "cpu", devices) if isinstance(devices, int) else cluster_of(list(devices))


def host_cluster(device_kind: str, platform_name: str, devices_per_host: int, hosts: int = 1) -> Cluster:
    """So many devices of this machine's kind.

    Raises:
      FdgError: nothing is known of it.
    """
    found = calibrated(device_kind)
    if found is not None:
        return Cluster(
            found.kind, devices_per_host, hosts, found.inside, found.between, cores=found.cores,
            note=f"rates: this machine's, measured {found.date}{_disturbed(found)}{_crowded(found.cores)}",
        )  # fmt: skip
    if platform_name == "cpu":
        return Cluster(
            REFERENCE, devices_per_host, hosts, SHARED_MEMORY, SOCKETS, cores=usable_cores(),
            note=f"rates: of another machine's processor, for this one has no calibration: {FIX}"
            + _crowded(usable_cores()),
        )  # fmt: skip
    try:
        kind = published.kind(device_kind)
    except UnknownNameError:
        raise FdgError(f"no rates are known for devices of kind '{device_kind}': {FIX}") from None
    inside, between = published.usual_links(kind.name)
    note = f"rates: published ones of {kind.name}, not measured here: {FIX}"
    return Cluster(kind, devices_per_host, hosts, inside, between, note=note)
