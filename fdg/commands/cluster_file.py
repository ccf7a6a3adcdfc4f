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

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fdg.costs import published
from fdg.costs.hardware import RATES, Cluster, DeviceKind, Figure, Link
from fdg.costs.machine import FIX, calibrated
from fdg.errors import FdgError, unknown_name

HERE = "this machine"
_NUMBERS = {
    "price": "price",
    "straggling": "straggling",
    "failures_per_device_hour": "failures",
    "restart_seconds": "restart",
    "storage_bytes_per_second": "storage",
}
_WHOLE = ("hosts", "devices_per_host", "cores")
_KNOWN = (*_WHOLE, *_NUMBERS, "kind", "inside", "between", "kinds", "links", "devices")


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
      FdgError: there is no such file, it is no TOML, or something in it is wrong: names it and the fix.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise FdgError(
            f"--cluster {path}: {error.strerror or error}: docs/scale.md has files to start from"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FdgError(f"--cluster {path} is no TOML: {error}") from None
    try:
        return cluster_of(content)
    except FdgError as error:
        raise FdgError(f"--cluster {path}: {error}") from None


def cluster_of(content: Mapping[str, Any]) -> Cluster:
    """The cluster that the content of such a file describes.

    Raises:
      FdgError: something in it is wrong.
    """
    for name in content:
        if name not in _KNOWN:
            raise unknown_name("setting of a cluster", name, _KNOWN)
    for name in ("hosts", "kind"):
        if name not in content and not (name == "hosts" and "devices" in content):
            raise FdgError(f"'{name}' is missing: give {name} = {'8' if name == 'hosts' else repr('H100')}")
    whole = {name: _whole(name, content[name]) for name in (*_WHOLE, "devices") if name in content}
    numbers: dict[str, Any] = {
        field: _number(name, content[name]) for name, field in _NUMBERS.items() if name in content
    }
    own, links = _tables(content, "kinds"), _tables(content, "links")
    if not isinstance(content["kind"], str):
        raise FdgError(f"kind = {content['kind']!r}: give a name in quotes, such as 'H100' or '{HERE}'")
    kind, usual, cores = _kind(content["kind"], own)
    inside, between = (
        _link(word, content.get(word), links, usual[i]) for i, word in enumerate(("inside", "between"))
    )
    per_host = whole.get("devices_per_host", 8)
    hosts = whole.get("hosts", 0)
    if not hosts:
        hosts = -(-whole["devices"] // per_host)
    return Cluster(
        kind,
        per_host,
        hosts,
        inside,
        between,
        cores=whole.get("cores", cores),
        note=f"rates: {_source(kind)}",
        **numbers,
    )


def _tables(content: Mapping[str, Any], word: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables [kinds.NAME] or [links.NAME]."""
    found = content.get(word, {})
    if not isinstance(found, Mapping) or not all(isinstance(table, Mapping) for table in found.values()):
        raise FdgError(f"{word}: write each as a table of its own: [{word}.NAME]")
    return found


def _source(kind: DeviceKind) -> str:
    measured = "measured" in kind.figures["memory"].source
    return f"of {kind.name}, {'measured' if measured else 'published or given'}"


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FdgError(f"{name} = {value!r}: give a whole number of at least 1")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise FdgError(f"{name} = {value!r}: give a number of at least 0")
    return float(value)


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
            base, usual, platform = (
                other.figures,
                published.usual_links(other.name),
                platform or other.platform,
            )
        if platform is None:
            raise FdgError(f"[kinds.{name}] needs platform = 'gpu', 'tpu' or 'cpu', or like = 'H100'")
        for rate in given:
            if rate not in RATES:
                raise unknown_name(f"rate of [kinds.{name}]", rate, RATES)
        figures = {
            rate: Figure(_number(rate, value), 0.0, "given in the cluster's file")
            for rate, value in given.items()
        }
        return DeviceKind(name, platform, {**base, **figures}), usual, None
    if name == HERE:
        device = jax.local_devices()[0]
        found = calibrated(device.device_kind)
        if found is None:
            raise FdgError(f"kind = '{HERE}', and it has no calibration: {FIX}")
        return found.kind, (found.inside, found.between), found.cores
    if name not in published.KINDS and name not in published.ALIASES:
        raise unknown_name("device kind", name, (*published.KINDS, *own, HERE))
    return published.kind(name), published.usual_links(name), None


def _link(word: str, name: Any, own: Mapping[str, Mapping[str, Any]], usual: Link | None) -> Link:
    if name is None:
        if usual is None:
            raise FdgError(
                f"'{word}' is missing: give {word} = 'NVLink 4', or another of the links in docs/scale.md"
            )
        return usual
    if isinstance(name, str) and name in own:
        given = own[name]
        wrong = next((key for key in given if key not in ("latency", "bandwidth", "call")), None)
        if wrong is not None:
            raise unknown_name(f"setting of [links.'{name}']", wrong, ("latency", "bandwidth", "call"))
        missing = next((key for key in ("latency", "bandwidth") if key not in given), None)
        if missing is not None:
            raise FdgError(
                f"[links.'{name}'] needs {missing}, in"
                f" {'seconds' if missing == 'latency' else 'bytes a second'}"
            )
        figures = {
            key: Figure(_number(key, value), 0.0, "given in the cluster's file")
            for key, value in given.items()
        }
        return Link(str(name), **figures)
    if not isinstance(name, str):
        raise FdgError(f"{word} = {name!r}: give the name of a link in quotes")
    if name not in published.LINKS:
        raise unknown_name("link", name, (*published.LINKS, *own))
    return published.LINKS[name]
