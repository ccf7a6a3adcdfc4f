"""The cluster of this process: calibrated, or with published figures.

A calibration is a JSON file in the user's cache directory, for a processor and a kind of device. The file
names its machine; files of other machines are refused.
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

from fdg.cores import sharing, usable_cores
from fdg.costs import published
from fdg.costs.hardware import Cluster, DeviceKind, Figure, Link
from fdg.costs.overheads import Overheads
from fdg.errors import FdgError, UnknownNameError
from fdg.kinds import annotations_of, matches
from fdg.reading import read_json
from fdg.running import program_cache

VERSION = 4
MEASURED = "measured here"  # the source of measured figures
AT_MOST_UNREST = 0.25
FIX = "run python -m fdg.calibrate, which takes three minutes"

# Unmeasured figures of a core: those of a server of 2026, as in `bench/machines/intel-xeon-*`. Those of
# float64, linear algebra and calls of the host are assumed.
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
    """Measured figures of a machine."""

    machine: Mapping[str, Any]  # the machine: see `fingerprint`
    kind: DeviceKind  # the kind of its devices
    inside: Link  # links between devices of a process, and between processes
    between: Link
    cores: int | None  # cores that they share; None for accelerators
    date: str = ""  # when it was measured, and how long it took
    seconds: float = 0.0
    # seconds of an iteration of the jobs that `kind.joined` and `kind.overheads` were fitted to, by
    # `reference_jobs.ReferenceJob.key`
    jobs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def cluster(self, devices: int, processes: int = 1) -> Cluster:
        """A cluster of this many devices, in each of some processes."""
        return Cluster(
            self.kind, devices, processes, self.inside, self.between, self.cores, hosts_per_machine=processes
        )

    @property
    def unrest(self) -> float:
        """The noise of the measurements: the median, over all figures, of how much longer the median repeat
        took than the fastest. A few percent on a quiet machine.
        """
        measured = [figure.spread for figure in self.kind.figures.values() if figure.source == MEASURED]
        return statistics.median(measured) if measured else 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used the machine during the measurement, which makes it unreliable."""
        return self.unrest > AT_MOST_UNREST

    def as_json(self) -> dict[str, Any]:
        """As JSON types."""

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
    """The identity of a machine: processor features, cores, devices, JAX version."""
    programs = program_cache.default_directory()
    return {
        "processor": "" if programs is None else programs.name,
        "cores": usable_cores(),
        "device_kind": device_kind,
        "jax": jax.__version__,
        "system": platform.system(),
    }


def path_of(device_kind: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file of this machine's calibration; None for a user without a home directory."""
    programs = program_cache.default_directory(environment)
    if programs is None:
        return None
    name = "".join(c if c.isalnum() else "-" for c in device_kind).lower()
    return programs.parent.parent / "calibration" / f"{programs.name}-{name}.json"


def read(path: Path) -> Calibration:
    """Reads a calibration, of any machine."""
    if not os.path.lexists(path):
        raise FdgError(f"there is no calibration {path}: {FIX}")
    try:
        stored = read_json(path, any_number=True)
    except FdgError as error:
        raise FdgError(f"{error}, so it is no calibration: remove it, and {FIX}") from None
    version = stored.get("version")
    if version != VERSION:
        raise FdgError(f"{path} is a calibration of version {version}, and this needs {VERSION}: {FIX}")
    try:
        figures = {name: Figure(**figure) for name, figure in stored["figures"].items()}
        overheads = stored["overheads"] and Overheads(**stored["overheads"])
        kind = DeviceKind(
            stored["kind"]["name"], stored["kind"]["platform"], figures, stored["joined"], overheads
        )
        inside, between = (link_from_json(stored[word]) for word in ("inside", "between"))
        found = Calibration(
            stored["machine"], kind, inside, between, stored["cores"], stored["date"], stored["seconds"],
            stored["jobs"],
        )  # fmt: skip
        if not _has_its_kinds(found, Calibration):
            raise TypeError("a value is of another kind than written")
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise FdgError(f"{path} is no whole calibration ({error}): remove it, and {FIX}") from None


def _has_its_kinds(value: Any, kind: Any) -> bool | None:
    """Whether all that a calibration holds matches its annotations: a `kinds.Leaf`."""
    if isinstance(value, Mapping) and typing.get_origin(kind) is Mapping:
        _, inner = typing.get_args(kind)
        return all(matches(one, inner, _has_its_kinds) for one in value.values())
    if isinstance(value, Calibration | DeviceKind | Link | Overheads | Figure):
        fields = annotations_of(type(value)).items()
        return all(matches(getattr(value, name), field, _has_its_kinds) for name, field in fields)
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
    """Checks that a calibration is of this machine."""
    here = fingerprint(calibration.machine.get("device_kind", ""))
    for name, value in here.items():
        other = calibration.machine.get(name)
        if other != value:
            raise FdgError(
                f"{path} is a calibration of another machine ({name} {other}, here {value}): {FIX}"
            )


def usable_calibration(device_kind: str) -> Calibration | None:
    """This machine's calibration for a kind of device, or None."""
    path = path_of(device_kind)
    if path is None or not path.exists():
        return None
    calibration = read(path)
    try:
        check_machine(calibration, path)
    except FdgError:
        return None
    return calibration


def _noise_warning(found: Calibration) -> str:
    """The warning about a disturbed calibration."""
    if not found.is_disturbed:
        return ""
    return f" while other programs had it (repeats {found.unrest:.0%} apart): {FIX} once it is quiet"


def _busy_warning(cores: int | None) -> str:
    """The warning that the machine is busy now."""
    others = busy_cores()
    if cores is None or others < 0.5 * cores:
        return ""
    return f"; now {others:.1f} of {cores} cores have other work, which --policy auto:measure sees"


def busy_cores() -> float:
    """The load average of the last minute, if the system has one; else 0."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def cluster_of(devices: Sequence[jax.Device]) -> Cluster:
    """The cluster of devices of this job, process by process.

    Each process is a host: processes communicate by sockets.
    """
    device = next((one for one in devices if one.platform != "cpu"), devices[0])
    processes = len({one.process_index for one in devices})
    found = host_cluster(device.device_kind, device.platform, math.ceil(len(devices) / processes), processes)
    return dataclasses.replace(found, hosts_per_machine=min(processes, sharing()))


def cluster_for(devices: int | Sequence[jax.Device]) -> Cluster:
    """The cluster of some devices; for a number, of that many CPU devices of this machine."""
    return host_cluster("cpu", "cpu", devices) if isinstance(devices, int) else cluster_of(list(devices))


def host_cluster(device_kind: str, platform_name: str, devices_per_host: int, hosts: int = 1) -> Cluster:
    """A cluster of this many devices of this machine's kind."""
    cores, found = usable_cores() if platform_name == "cpu" else None, usable_calibration(device_kind)
    if found is not None:
        kind, links, cores = found.kind, (found.inside, found.between), found.cores
        note = f"this machine's, measured {found.date}{_noise_warning(found)}"
    elif platform_name == "cpu":
        kind, links = REFERENCE, (SHARED_MEMORY, SOCKETS)
        note = f"of another machine's processor, for this one has no calibration: {FIX}"
    else:
        try:
            kind = published.kind(device_kind)
        except UnknownNameError:
            raise FdgError(f"no rates are known for devices of kind '{device_kind}': {FIX}") from None
        links, note = (
            published.usual_links(kind.name),
            f"published ones of {kind.name}, not measured here: {FIX}",
        )
    note = f"rates: {note}{_busy_warning(cores)}"
    return Cluster(kind, devices_per_host, hosts, *links, cores, note=note)
