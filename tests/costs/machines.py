"""Clusters with round numbers, so that tests can compute predictions by hand."""

import dataclasses

from fdg.costs.hardware import Cluster, DeviceKind, Figure, Link


def kind(shares_after_fusion=None, overheads=None, **figures):
    """A device with 1 GFLOP/s, 1 GB/s and no latencies; `figures` override these."""
    zero = dict.fromkeys(
        ("operation", "trip", "dispatch", "argument", "transfer", "product_call", "host_call"), 0.0
    )
    known = {"product/float32": 1e9, "product_bytes": 1e30, "memory": 1e9, **zero, **figures}
    found = {name: Figure(float(value)) for name, value in known.items()}
    return DeviceKind("round", "gpu", found, shares_after_fusion, overheads)


def link(name, latency=0.0, bandwidth=1e9, call=0.0):
    """A link: `latency` and `call` in seconds, `bandwidth` in bytes per second."""
    return Link(name, Figure(latency), Figure(bandwidth), Figure(call))


def cluster(devices, hosts=1, figures=None, **changes):
    """A cluster of `devices` devices on `hosts` hosts."""
    found = Cluster(kind(**(figures or {})), devices // hosts, hosts, link("inside"), link("between"))
    return dataclasses.replace(found, **changes)
