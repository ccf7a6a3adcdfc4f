"""This machine as a cluster of the cost model, with figures that are calibrated or published.

A calibration is a JSON file in the user's cache directory, one per processor and kind of device. The file
names its machine; calibrations of other machines are not used.
"""

import dataclasses
import math
import os
import platform
import statistics
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fdg.cores import processes_sharing_cores, usable_cores
from fdg.costs import published
from fdg.costs.hardware import RATES, Cluster, DeviceKind, Figure, Link
from fdg.costs.overheads import Overheads
from fdg.errors import FdgError, UnknownNameError
from fdg.kinds import annotations_of, matches
from fdg.reading import read_json
from fdg.running import program_cache

VERSION = 4  # of the format of calibration files
MEASURED = "measured here"  # `Figure.source` of measured figures
MAX_NOISE = 0.25  # the largest `Calibration.noise` of a reliable calibration
FIX = "run python -m fdg.calibrate, which takes five minutes"  # the fix in errors and notes

# Rates of a CPU, and links within and between its processes, for machines without a calibration.
_ROUGH = "rough: measured on another machine's core (Intel Xeon, 2026); this machine has no calibration"
UNCALIBRATED_CPU = DeviceKind(
    "cpu",
    "cpu",
    {name: Figure(rate.core, 0.5, _ROUGH) for name, rate in RATES.items() if rate.core is not None},
)
SHARED_MEMORY = Link(
    "shared memory", Figure(0.0, 0.5, _ROUGH), Figure(3.7e9, 0.5, _ROUGH), Figure(7.3e-5, 0.5, _ROUGH)
)
SOCKETS = Link(
    "sockets of this host", Figure(0.0, 0.5, _ROUGH), Figure(1e9, 0.5, _ROUGH), Figure(7.4e-4, 0.5, _ROUGH)
)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured figures of a machine."""

    machine: Mapping[str, Any]  # the machine: see `fingerprint`
    kind: DeviceKind  # the kind of its devices
    inside: Link  # the link between devices of a process
    between: Link  # the link between processes
    cores: int | None  # shared by the devices; None for accelerators
    date: str = ""  # when it was measured, in ISO format
    seconds: float = 0.0  # how long it took
    # seconds per iteration, by `reference_jobs.ReferenceJob.key`, of the jobs to which
    # `kind.shares_after_fusion` and `kind.overheads` were fitted
    jobs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def cluster(self, devices: int, processes: int = 1) -> Cluster:
        """A cluster of `processes` processes with `devices` devices each, all on this machine."""
        return Cluster(
            self.kind, devices, processes, self.inside, self.between, self.cores, hosts_per_machine=processes
        )

    @property
    def noise(self) -> float:
        """The noise of the measurements: the median of all spreads; a few percent on an idle machine.

        The spread of a figure is the relative difference between its median and its fastest timing.
        """
        measured = [figure.spread for figure in self.kind.figures.values() if figure.source == MEASURED]
        return statistics.median(measured) if measured else 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used the machine during the measurement, which makes it unreliable."""
        return self.noise > MAX_NOISE

    def as_json(self) -> dict[str, Any]:
        """This calibration as JSON types."""
        shares = self.kind.shares_after_fusion
        return {
            "version": VERSION,
            "machine": dict(self.machine),
            "date": self.date,
            "seconds": self.seconds,
            "cores": self.cores,
            "kind": {"name": self.kind.name, "platform": self.kind.platform},
            "joined": None if shares is None else dict(shares),  # an older name, kept in files
            "overheads": None if self.kind.overheads is None else dataclasses.asdict(self.kind.overheads),
            "jobs": dict(self.jobs),
            "figures": {name: figure._asdict() for name, figure in self.kind.figures.items()},
            "inside": link_as_json(self.inside),
            "between": link_as_json(self.between),
        }


def fingerprint(device_kind: str) -> dict[str, Any]:
    """Identifies this machine: processor features, cores, kind of devices, version of JAX, system."""
    cache_directory = program_cache.default_directory()
    return {
        "processor": "" if cache_directory is None else cache_directory.name,
        "cores": usable_cores(),
        "device_kind": device_kind,
        "jax": jax.__version__,
        "system": platform.system(),
    }


def path_of(device_kind: str) -> Path | None:
    """The file of this machine's calibration; None for a user without a home directory."""
    cache_directory = program_cache.default_directory()
    if cache_directory is None:
        return None
    name = "".join(c if c.isalnum() else "-" for c in device_kind).lower()
    return cache_directory.parent.parent / "calibration" / f"{cache_directory.name}-{name}.json"


def read(path: Path) -> Calibration:
    """Reads a calibration, of this machine or another; raises `FdgError` if it cannot be used."""
    if not os.path.lexists(path):
        raise FdgError(f"there is no calibration {path}: {FIX}")
    try:
        stored = read_json(path, any_number=True)
    except FdgError as error:
        raise FdgError(f"{error}, so it is not a calibration: remove it, and {FIX}") from None
    version = stored.get("version")
    if version != VERSION:
        raise FdgError(
            f"{path} is a calibration of version {version}, but fdg reads version {VERSION}: {FIX}"
        )
    try:
        figures = {name: Figure(**figure) for name, figure in stored["figures"].items()}
        overheads = stored["overheads"] and Overheads(**stored["overheads"])
        kind = DeviceKind(
            stored["kind"]["name"], stored["kind"]["platform"], figures, stored["joined"], overheads
        )
        inside, between = (link_from_json(stored[name]) for name in ("inside", "between"))
        calibration = Calibration(
            stored["machine"], kind, inside, between, stored["cores"], stored["date"], stored["seconds"],
            stored["jobs"],
        )  # fmt: skip
        if not _matches_types(calibration, Calibration):
            raise TypeError("a value has the wrong type")
        calibration.cluster(1)  # checks the values
        return calibration
    except (KeyError, TypeError, AttributeError, FdgError) as error:
        raise FdgError(f"{path} is not a complete calibration ({error}): remove it, and {FIX}") from None


def _matches_types(value: Any, kind: Any) -> bool | None:
    """Whether a mapping or a part of a calibration matches an annotation; None for others (`kinds.Leaf`)."""
    if isinstance(value, Mapping) and typing.get_origin(kind) is Mapping:
        _, value_type = typing.get_args(kind)
        return all(matches(item, value_type, _matches_types) for item in value.values())
    if isinstance(value, Calibration | DeviceKind | Link | Overheads | Figure):
        fields = annotations_of(type(value)).items()
        return all(matches(getattr(value, name), annotation, _matches_types) for name, annotation in fields)
    return None


def link_as_json(link: Link) -> dict[str, Any]:
    """A link as JSON types."""
    figures = {"latency": link.latency, "bandwidth": link.bandwidth, "call": link.call}
    return {"name": link.name, **{name: figure._asdict() for name, figure in figures.items()}}


def link_from_json(stored: Mapping[str, Any]) -> Link:
    """The inverse of `link_as_json`."""
    latency, bandwidth, call = (Figure(**stored[name]) for name in ("latency", "bandwidth", "call"))
    return Link(stored["name"], latency, bandwidth, call)


def check_machine(calibration: Calibration, path: Path) -> None:
    """Raises `FdgError` unless this machine made the calibration."""
    this_machine = fingerprint(calibration.machine.get("device_kind", ""))
    for name, value in this_machine.items():
        recorded = calibration.machine.get(name)
        if recorded != value:
            raise FdgError(
                f"{path} was made on another machine ({name} {recorded}; this machine has {value}): {FIX}"
            )


def usable_calibration(device_kind: str) -> Calibration | None:
    """This machine's calibration for a kind of device; None if there is none, or another machine made it."""
    path = path_of(device_kind)
    if path is None or not path.exists():
        return None
    calibration = read(path)
    try:
        check_machine(calibration, path)
    except FdgError:
        return None
    return calibration


def calibration_problem(device_kind: str) -> str:
    """Why this machine's calibration for a kind of device cannot be read; "" if it can, or there is none."""
    try:
        usable_calibration(device_kind)
    except FdgError as error:
        return str(error)
    return ""


def busy_cores() -> float:
    """The load average of the last minute, if the system has one; else 0."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def cluster_for(devices: int | Sequence[jax.Device]) -> Cluster:
    """The cluster of these devices. An integer is a number of CPU devices of this machine.

    Each process counts as a host, because processes communicate through sockets, even on one machine.
    """
    if isinstance(devices, int):
        return host_cluster("cpu", "cpu", devices)
    main = next((device for device in devices if device.platform != "cpu"), devices[0])
    processes = len({device.process_index for device in devices})
    cluster = host_cluster(main.device_kind, main.platform, math.ceil(len(devices) / processes), processes)
    return dataclasses.replace(cluster, hosts_per_machine=min(processes, processes_sharing_cores()))


def host_cluster(device_kind: str, platform_name: str, devices_per_host: int, hosts: int = 1) -> Cluster:
    """A cluster of devices of this kind, with this machine's calibration, else rough or published rates."""
    cores, calibration = usable_cores() if platform_name == "cpu" else None, usable_calibration(device_kind)
    if calibration is not None:
        kind, links, cores = calibration.kind, (calibration.inside, calibration.between), calibration.cores
        note = f"this machine's, measured {calibration.date}"
        if calibration.is_disturbed:
            repeats = f"repeats differ by {calibration.noise:.0%}"
            note += f" while other programs used it ({repeats}): {FIX} once it is idle"
    elif platform_name == "cpu":
        kind, links = UNCALIBRATED_CPU, (SHARED_MEMORY, SOCKETS)
        note = f"of another machine's processor, since this one has no calibration: {FIX}"
    else:
        try:
            kind = published.kind(device_kind)
        except UnknownNameError:
            raise FdgError(f"fdg has no rates of devices of kind '{device_kind}': {FIX}") from None
        links = published.usual_links(kind.name)
        note = f"published for {kind.name}, not measured here: {FIX}"
    if cores is not None and (busy := busy_cores()) >= 0.5 * cores:
        note += f"; now {busy:.1f} of {cores} cores are busy: only --policy auto:measure considers this"
    return Cluster(kind, devices_per_host, hosts, *links, cores, note=f"rates: {note}")
