"""A cluster from a TOML file: hosts, devices, links, prices, failures. Wrong files are one clear line.

hosts = 512
devices_per_host = 8
kind = "H100"              # of the published ones, or "this machine", or a [kinds.NAME] of the file's own
inside = "NVLink 4"        # left out: the usual ones of the kind
between = "InfiniBand NDR"
price = 2.5                # of a device for an hour
failures_per_device_hour = 2e-6
straggling = 0.02

[kinds.Mine]
platform = "gpu"
"product/float32" = 4e13
memory = 1.5e12
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fdg.arguments import quoted
from fdg.costs import published
from fdg.costs.hardware import RATES, Cluster, DeviceKind, Figure, Link
from fdg.costs.machine import FIX, usable_calibration
from fdg.errors import FdgError, FdgWarning, unknown_name
from fdg.kinds import as_number, parse_quantity
from fdg.reading import read_toml

HERE = "this machine"
# By key: the field of a `Cluster`, what the number is, and an example.
_NUMBERS: Mapping[str, tuple[str, str, float]] = {
    "price": ("price", "of a device for an hour, in any money", 2.5),
    "straggling": ("straggling", "relative standard deviation of a device's time for the same work", 0.02),
    "failures_per_device_hour": ("failures", "failures of a device in an hour", 2e-6),
    "restart_seconds": ("restart", "s from a failure to where the last checkpoint is loaded", 300),
    "storage_bytes_per_second": ("storage", "B/s to where checkpoints go, of all hosts together", 1e9),
}
_LINK: Mapping[str, tuple[str, float]] = {
    "latency": ("s until the first byte is there, a message", 6e-7),
    "bandwidth": ("B/s one way, of a device within a host or of a host between hosts", 3.8e11),
    "call": ("s that a collective takes besides its messages", 6.6e-6),
}
_WHOLE = ("hosts", "devices_per_host", "cores")
_KNOWN = (*_WHOLE, *_NUMBERS, "kind", "inside", "between", "kinds", "links", "devices")


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file."""
    fix = "docs/scale.md has files to start from"
    try:
        content = read_toml(path, fix)
    except FdgError as error:
        raise FdgError(f"--cluster {error}" + ("" if fix in str(error) else f": {fix}")) from None
    try:
        return cluster_from(content)
    except FdgError as error:
        raise FdgError(f"--cluster {path}: {error}") from None


def cluster_from(content: Mapping[str, Any]) -> Cluster:
    """The cluster that the content of such a file describes."""
    for name in content:
        if name not in _KNOWN:
            raise unknown_name("setting of a cluster", name, _KNOWN)
    for name in ("hosts", "kind"):
        if name not in content and not (name == "hosts" and "devices" in content):
            raise FdgError(f"'{name}' is missing: give {name} = {'8' if name == 'hosts' else repr('H100')}")
    whole = {name: _whole(name, content[name]) for name in (*_WHOLE, "devices") if name in content}
    numbers: dict[str, Any] = {
        field: _number(name, content[name], what, example)
        for name, (field, what, example) in _NUMBERS.items()
        if name in content
    }
    own, links = _tables(content, "kinds"), _tables(content, "links")
    if not isinstance(content["kind"], str):
        raise FdgError(f"kind = {content['kind']!r}: give a name in quotes, such as 'H100' or '{HERE}'")
    kind, usual, cores = _kind(content["kind"], own)
    inside, between = (
        _link(word, content.get(word), links, usual[i]) for i, word in enumerate(("inside", "between"))
    )
    devices = whole.get("devices")
    per_host = whole.get("devices_per_host", min(8, devices or 8))
    hosts = whole.get("hosts", -(-(devices or 0) // per_host))
    if devices is not None and devices != hosts * per_host:
        fix = "leave devices out" if "hosts" in whole else f"give devices = {hosts * per_host}"
        raise FdgError(
            f"devices = {devices}, but {hosts} hosts of devices_per_host = {per_host} have"
            f" {hosts * per_host}: {fix}, or another devices_per_host"
        )
    source = "measured" if "measured" in kind.figures["memory"].source else "published or given"
    return Cluster(
        kind,
        per_host,
        hosts,
        inside,
        between,
        cores=whole.get("cores", cores),
        note=f"rates: of {kind.name}, {source}",
        **numbers,
    )


def _tables(content: Mapping[str, Any], word: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables [kinds.NAME] or [links.NAME]."""
    found = content.get(word, {})
    if not isinstance(found, Mapping) or not all(isinstance(table, Mapping) for table in found.values()):
        raise FdgError(f"{word}: write each as a table of its own: [{word}.NAME]")
    return found


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fix = "" if isinstance(value, int) else as_number(str(value), int)
        raise FdgError(f"{name} = {quoted(value)}: give a whole number of at least 1{fix}")
    return value


def _number(
    name: str, value: Any, what: str, example: float, odd: Callable[[float], str] | None = None
) -> float:
    """Checks a number of the file.

    `odd` says why a number looks wrong; "" if it does not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        number = parse_quantity(value) if isinstance(value, str) else None
        doubt = odd(number) if odd and number else ""
        fix = doubt or as_number(value, float, name) or f", such as {example:.3g}"
        raise FdgError(f"{name} = {quoted(value)}: give a number of at least 0, {what}{fix}")
    if odd and value and (doubt := odd(value)):
        warnings.warn(f"{name} = {value:g} is {what}{doubt}", FdgWarning, stacklevel=2)
    return float(value)


def _odd_rate(name: str, known: Mapping[str, Sequence[float]], value: float) -> str:
    """Why a rate looks wrong: it is as large as one of another kind, or has another unit; "" if it does
    not."""

    def within(other: str, by: float) -> bool:
        return bool(known[other]) and min(known[other]) / by <= value <= max(known[other]) * by

    other = {"memory": "memory_bytes", "memory_bytes": "memory"}.get(name)
    if other and within(other, 1) and not within(name, 1):
        return f": it looks like {other} = {value:g}, which is {RATES[other]}"
    if known[name] and not within(name, 1000):
        return f": published ones are from {min(known[name]):.2g} to {max(known[name]):.2g}"
    return ""


def _kind(
    name: str, own: Mapping[str, Mapping[str, Any]]
) -> tuple[DeviceKind, tuple[Link | None, Link | None], int | None]:
    """A kind of device, its usual links, and the cores that host devices share."""
    if name in own:
        given = dict(own[name])
        like = given.pop("like", None)
        platform = given.pop("platform", None)
        base: Mapping[str, Figure] = {}
        usual: tuple[Link | None, Link | None] = (None, None)
        if like is not None:
            other = published.kind(like)
            base, usual = other.figures, published.usual_links(other.name)
            platform = platform or other.platform
        if platform is None:
            raise FdgError(f"[kinds.{name}] needs platform = 'gpu', 'tpu' or 'cpu', or like = 'H100'")
        rates = {rate: (what, published.kind("H100").rate(rate)) for rate, what in RATES.items()}
        known = [kind.figures for kind in published.KINDS.values()]
        figures = _figures(f"[kinds.{name}]", "rate", given, rates, () if platform == "cpu" else known)
        return DeviceKind(name, platform, {**base, **figures}), usual, None
    if name == HERE:
        device = jax.local_devices()[0]
        found = usable_calibration(device.device_kind)
        if found is None:
            raise FdgError(f"kind = '{HERE}', and it has no calibration: {FIX}")
        return found.kind, (found.inside, found.between), found.cores
    if name not in published.KINDS and name not in published.ALIASES:
        raise unknown_name("device kind", name, (*published.KINDS, *own, HERE))
    return published.kind(name), published.usual_links(name), None


def _figures(
    where: str,
    word: str,
    given: Mapping[str, Any],
    units: Mapping[str, tuple[str, float]],
    published_ones: Sequence[Mapping[str, Figure]],
    needed: Sequence[str] = (),
) -> dict[str, Figure]:
    """The figures of a table [kinds.NAME] or [links.NAME]; warns of those far from all published ones."""
    if (wrong := next((name for name in given if name not in units), None)) is not None:
        raise unknown_name(f"{word} of {where}", wrong, units)
    if (missing := next((name for name in needed if name not in given), None)) is not None:
        what, example = units[missing]
        raise FdgError(f"{where} needs {missing}, {what}, such as {example:g}")
    known = {name: [one[name].value for one in published_ones if name in one] for name in units}
    found = {}
    for name, value in given.items():
        odd = functools.partial(_odd_rate, name, known) if published_ones else None
        number = _number(f"{where} {name}", value, *units[name], odd)
        found[name] = Figure(number, 0.0, "given in the cluster's file")
    return found


def _link(word: str, name: Any, own: Mapping[str, Mapping[str, Any]], usual: Link | None) -> Link:
    if name is None:
        if usual is None:
            raise FdgError(
                f"'{word}' is missing: give {word} = 'NVLink 4', or another of the links in docs/scale.md"
            )
        return usual
    if isinstance(name, str) and name in own:
        given = own[name]
        known, needed = [vars(link) for link in published.LINKS.values()], ("latency", "bandwidth")
        return Link(name, **_figures(f"[links.'{name}']", "setting", given, _LINK, known, needed))
    if not isinstance(name, str):
        raise FdgError(f"{word} = {name!r}: give the name of a link in quotes")
    if name not in published.LINKS:
        raise unknown_name("link", name, (*published.LINKS, *own))
    return published.LINKS[name]
