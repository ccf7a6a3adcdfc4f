"""Reads a cluster from a TOML file: hosts, devices, links, prices, failures. Errors are one line.

hosts = 512
devices_per_host = 8
kind = "H100"              # a published kind, or "this machine", or NAME of a table [kinds.NAME] in the file
inside = "NVLink 4"        # default: the usual links of the kind
between = "InfiniBand NDR"
price = 2.5                # per device and hour
failures_per_device_hour = 2e-6
straggling = 0.02

[kinds.Mine]
platform = "gpu"
"product/float32" = 4e13
memory = 1.5e12

[first]                    # hosts of another kind, whose devices come before those above
hosts = 480
devices_per_host = 32
kind = "CPU core"
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fdg.arguments import quoted
from fdg.costs import published
from fdg.costs.hardware import RATES, Cluster, DeviceKind, Figure, Link
from fdg.costs.machine import FIX, SHARED_MEMORY, UNCALIBRATED_CPU, usable_calibration
from fdg.errors import FdgError, FdgWarning, escape_unprintable, unknown_name
from fdg.kinds import number_fix, parse_quantity
from fdg.placing.place import MAX_DEVICES
from fdg.reading import read_toml

THIS_MACHINE = "this machine"
_CORE = dataclasses.replace(UNCALIBRATED_CPU, name="CPU core")  # each core is a device
# Key in the file -> (field of `Cluster`, meaning and unit of the number, an example).
_NUMBER_FIELDS: Mapping[str, tuple[str, str, float]] = {
    "price": ("price", "per device and hour, in any currency", 2.5),
    "straggling": ("straggling", "relative standard deviation of devices' times for equal work", 0.02),
    "failures_per_device_hour": ("failures", "failures per device and hour", 2e-6),
    "restart_seconds": ("restart", "s from a failure until the last checkpoint is loaded", 300),
    "storage_bytes_per_second": ("storage", "B/s to the checkpoint storage, of all hosts together", 1e9),
}
# Key in a table [links.NAME] -> (meaning and unit of the number, an example).
_LINK_FIELDS: Mapping[str, tuple[str, float]] = {
    "latency": ("s until the first byte of a message arrives", 6e-7),
    "bandwidth": ("B/s one way, per device within a host or per host between hosts", 3.8e11),
    "call": ("s that a collective takes in addition to its messages", 6.6e-6),
}
# Keys of the file whose values are whole numbers, those that describe hosts of one kind, and all keys.
_WHOLE_NUMBERS = ("hosts", "devices_per_host", "cores")
_OF_HOSTS = (*_WHOLE_NUMBERS, "devices", "kind", "inside", "between", "price", "failures_per_device_hour")
_SETTINGS = (*dict.fromkeys((*_OF_HOSTS, *_NUMBER_FIELDS)), "kinds", "links", "first")


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file."""
    fix = "docs/scale.md has example files"
    try:
        content = read_toml(path, fix)
    except FdgError as error:
        raise FdgError(f"--cluster {error}" + ("" if fix in str(error) else f": {fix}")) from None
    try:
        return cluster_from(content)
    except FdgError as error:
        raise FdgError(f"--cluster {path}: {error}") from None


def cluster_from(content: Mapping[str, Any], between: Link | None = None) -> Cluster:
    """The cluster that the content of a file describes; `between` is the default of its link."""
    for name in content:
        if name not in _SETTINGS:
            raise unknown_name("setting of a cluster", name, _SETTINGS)
    for name in ("hosts", "kind"):
        if name not in content and not (name == "hosts" and "devices" in content):
            raise FdgError(f"'{name}' is missing: give {name} = {'8' if name == 'hosts' else repr('H100')}")
    whole_numbers = {
        name: _checked_int(name, content[name]) for name in (*_WHOLE_NUMBERS, "devices") if name in content
    }
    numbers: dict[str, Any] = {
        field: _checked_float(name, content[name], meaning, example)
        for name, (field, meaning, example) in _NUMBER_FIELDS.items()
        if name in content
    }
    kinds, links = _tables(content, "kinds"), _tables(content, "links")
    if not isinstance(content["kind"], str):
        raise FdgError(
            f"kind = {content['kind']!r}: give a name in quotes, such as 'H100' or '{THIS_MACHINE}'"
        )
    kind, usual_links, cores = _read_kind(content["kind"], kinds)
    inside, between = (
        _read_link(place, content.get(place), links, default)
        for place, default in (("inside", usual_links[0]), ("between", between or usual_links[1]))
    )
    devices = whole_numbers.get("devices")
    per_host = whole_numbers.get("devices_per_host", min(8, devices or 8))
    hosts = whole_numbers.get("hosts", -(-(devices or 0) // per_host))
    if devices is not None and devices != hosts * per_host:
        fix = "leave devices out" if "hosts" in whole_numbers else f"give devices = {hosts * per_host}"
        raise FdgError(
            f"devices = {devices}, but {hosts} hosts of devices_per_host = {per_host} have"
            f" {hosts * per_host}: {fix}, or give another devices_per_host"
        )
    first = _read_first(content, between)
    if hosts * per_host > MAX_DEVICES - (first.devices if first else 0):
        raise FdgError(
            f"hosts = {hosts} of devices_per_host = {per_host} have {hosts * per_host} devices: give fewer"
            f" hosts; a cluster has at most {MAX_DEVICES:,} devices"
            + ", those of [first] included"
            * bool(first)
        )
    memory = kind.figures["memory"].source
    source = next((word for word in ("rough", "measured") if word in memory), "published or from the file")
    note = f"those of {kind.name}, {source}"
    if first is not None:
        note = f"{first.note.removeprefix('rates: ')}; {note}"
    return Cluster(
        kind,
        per_host,
        hosts,
        inside,
        between,
        cores=whole_numbers.get("cores", per_host if kind is _CORE else cores),
        note=f"rates: {note}",
        first=first,
        **numbers,
    )


def _read_first(content: Mapping[str, Any], between: Link) -> Cluster | None:
    """The hosts of the table [first], by default with the link `between`; None without the table."""
    table = content.get("first")
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise FdgError("first: write the hosts of another kind as a table [first]")
    for name in table:
        if name not in _OF_HOSTS:
            raise unknown_name("setting of [first]", name, _OF_HOSTS)
    shared = {name: value for name, value in content.items() if name not in (*_OF_HOSTS, "first")}
    try:
        return cluster_from({**shared, **table}, between)
    except FdgError as error:
        raise FdgError(f"[first] {error}") from None


def _tables(content: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables [kinds.NAME] or [links.NAME]."""
    tables = content.get(key, {})
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise FdgError(f"{key}: write each as a table [{key}.NAME]")
    return tables


def _checked_int(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fix = "" if isinstance(value, int) else number_fix(str(value), int)
        raise FdgError(f"{name} = {quoted(value)}: give a whole number of at least 1{fix}")
    return value


def _checked_float(
    name: str, value: Any, meaning: str, example: float, find_doubt: Callable[[float], str] | None = None
) -> float:
    """Checks a number of the file; `find_doubt` maps it to the reason why it looks wrong, or to ""."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        number = parse_quantity(value) if isinstance(value, str) else None
        doubt = find_doubt(number) if find_doubt and number else ""
        fix = doubt or number_fix(value, float, name) or f", such as {example:.3g}"
        raise FdgError(f"{name} = {quoted(value)}: give a number of at least 0, {meaning}{fix}")
    if find_doubt and value and (doubt := find_doubt(value)):
        warnings.warn(f"{name} = {value:g} is {meaning}{doubt}", FdgWarning, stacklevel=2)
    return float(value)


def _reason_to_doubt(name: str, published_values: Mapping[str, Sequence[float]], value: float) -> str:
    """The reason why a rate looks wrong, or "": it resembles another rate, or is far from published ones."""

    def is_within(other: str, factor: float) -> bool:
        values = published_values[other]
        return bool(values) and min(values) / factor <= value <= max(values) * factor

    other = {"memory": "memory_bytes", "memory_bytes": "memory"}.get(name)
    if other and is_within(other, 1) and not is_within(name, 1):
        return f": it looks like {other} = {value:g}, which is {RATES[other].meaning}"
    if (values := published_values[name]) and not is_within(name, 1000):
        return f": published values are from {min(values):.2g} to {max(values):.2g}"
    return ""


def _read_kind(
    name: str, kinds: Mapping[str, Mapping[str, Any]]
) -> tuple[DeviceKind, tuple[Link | None, Link | None], int | None]:
    """The device kind, its usual links, and the number of cores that host devices share (None: unknown)."""
    if name in kinds:
        settings = dict(kinds[name])
        like_name = settings.pop("like", None)
        platform = settings.pop("platform", None)
        base: Mapping[str, Figure] = {}
        usual_links: tuple[Link | None, Link | None] = (None, None)
        if like_name is not None:
            similar, usual_links = _kind_and_links(like_name)
            base = similar.figures
            platform = platform or similar.platform
        if platform is None:
            raise FdgError(f"[kinds.{name}] needs platform = 'gpu', 'tpu' or 'cpu', or like = 'H100'")
        rates = {key: (rate.meaning, published.kind("H100").rate(key)) for key, rate in RATES.items()}
        references = [] if platform == "cpu" else [kind.figures for kind in published.KINDS.values()]
        figures = _read_figures(f"[kinds.{name}]", "rate", settings, rates, references)
        return DeviceKind(escape_unprintable(name), platform, {**base, **figures}), usual_links, None
    if name == THIS_MACHINE:
        device = jax.local_devices()[0]
        calibration = usable_calibration(device.device_kind)
        if calibration is None:
            raise FdgError(f"kind = '{THIS_MACHINE}', but this machine has no calibration: {FIX}")
        return calibration.kind, (calibration.inside, calibration.between), calibration.cores
    if name not in published.KINDS and name not in published.ALIASES and name != _CORE.name:
        raise unknown_name("device kind", name, (*published.KINDS, *kinds, _CORE.name, THIS_MACHINE))
    return *_kind_and_links(name), None


def _kind_and_links(name: Any) -> tuple[DeviceKind, tuple[Link, Link | None]]:
    """A device kind that needs no table, and its usual links."""
    if name == _CORE.name:
        return _CORE, (SHARED_MEMORY, None)
    kind = published.kind(name)
    return kind, published.usual_links(kind.name)


def _read_figures(
    where: str,
    entry: str,
    settings: Mapping[str, Any],
    units: Mapping[str, tuple[str, float]],
    references: Sequence[Mapping[str, Figure]],
    required: Sequence[str] = (),
) -> dict[str, Figure]:
    """The figures of a table [kinds.NAME] or [links.NAME]; warns if one is far from those of `references`.

    Messages call the table `where`, and each of its keys an `entry`. `units` has the meaning and an example
    of each key.
    """
    if (bad_name := next((name for name in settings if name not in units), None)) is not None:
        raise unknown_name(f"{entry} of {where}", bad_name, units)
    if (missing := next((name for name in required if name not in settings), None)) is not None:
        meaning, example = units[missing]
        raise FdgError(f"{where} needs {missing}, {meaning}, such as {example:g}")
    published_values = {name: [row[name].value for row in references if name in row] for name in units}
    figures = {}
    for name, value in settings.items():
        find_doubt = functools.partial(_reason_to_doubt, name, published_values) if references else None
        number = _checked_float(f"{where} {name}", value, *units[name], find_doubt)
        figures[name] = Figure(number, 0.0, "from the cluster's file")
    return figures


def _read_link(place: str, name: Any, links: Mapping[str, Mapping[str, Any]], default: Link | None) -> Link:
    """The link `name` from the file's `links` or the published ones; None: `default`."""
    if name is None:
        if default is None:
            raise FdgError(f"'{place}' is missing: give {place} = 'NVLink 4', or a link of docs/scale.md")
        return default
    if isinstance(name, str) and name in links:
        references, required = [vars(link) for link in published.LINKS.values()], ("latency", "bandwidth")
        place = f"[links.'{name}']"
        figures = _read_figures(place, "setting", links[name], _LINK_FIELDS, references, required)
        return Link(escape_unprintable(name), **figures)
    if not isinstance(name, str):
        raise FdgError(f"{place} = {name!r}: give the name of a link in quotes")
    if name not in published.LINKS:
        raise unknown_name("link", name, (*published.LINKS, *links))
    return published.LINKS[name]
