"""Measures links for calibration: among the devices of a process, and between two processes of this machine.

The two processes are children of this one; they run `python -m fdg.costs.links ADDRESS INDEX`.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdg.costs.hardware import Figure, Link
from fdg.costs.machine import MEASURED, link_as_json, link_from_json
from fdg.lowering.mesh import make_mesh
from fdg.processes import distributed
from fdg.processes.ports import free_port
from fdg.profiling.repeating import Repeated, compile_all, timed_rounds
from fdg.running.host_devices import environment_of_a_child

ROUNDS = 50  # each program is timed once per round
_LARGE_BYTES = 2**22  # per device, in the all-reduce that measures bandwidth
_AXIS = "device"  # the axis of the mesh
_TIMEOUT_S = 120  # until the children are killed
Report = Callable[[str], None]  # takes the name of what is measured next, to show progress


def between_processes(report: Report) -> Link | None:
    """The link between two processes of this machine, each with one CPU device; None if a process fails."""
    report("two processes")
    address = f"localhost:{free_port('localhost')}"
    command = [sys.executable, "-m", "fdg.costs.links", address]
    one_cpu_device = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    variables = {**environment_of_a_child(), **one_cpu_device}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    children = [subprocess.Popen([*command, index], env=variables, **options) for index in ("0", "1")]
    try:
        outputs = [child.communicate(timeout=_TIMEOUT_S)[0] for child in children]
        return link_from_json(json.loads(outputs[0].splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError):
        return None
    finally:
        for child in children:
            child.kill()
            child.wait()


def between_devices(devices: Sequence[jax.Device], name: str, report: Report) -> Link | None:
    """Measures the link among devices; returns None if there is only one device.

    Times small all-reduces on two devices and on all devices, and a large all-reduce on two. The overhead of
    a collective is the time that a small all-reduce adds to a computation. Without the computation, XLA's
    threads would stay awake from one all-reduce to the next, and the overhead would seem too small. Every
    process that owns one of the devices must call this.
    """
    if len(devices) < 2:
        return None
    counts = [2] if len(devices) < 4 else [2, len(devices)]
    cases = [*itertools.product(counts, ("", "little")), (2, "much")]
    programs = {(count, size): _work_then_all_reduce(devices[:count], size) for count, size in cases}
    report("collectives")
    compile_all(programs.values())
    samples = timed_rounds(programs, ROUNDS)
    extra_seconds = {
        count: [b - a for a, b in zip(samples[count, ""], samples[count, "little"], strict=True)]
        for count in counts
    }
    median_extra = {count: max(1e-7, statistics.median(seconds)) for count, seconds in extra_seconds.items()}
    deviation = statistics.median(abs(seconds - median_extra[2]) for seconds in extra_seconds[2])
    spread = round(deviation / median_extra[2], 3)
    latency = 0.0
    if len(counts) > 1:
        # An all-reduce on n devices sends 2 log2(n) messages one after the other, so 2 on two devices.
        extra_messages = 2 * (math.log2(counts[1]) - 1)
        latency = max(0.0, (median_extra[counts[1]] - median_extra[2]) / extra_messages)
    overhead = max(1e-7, median_extra[2] - 2 * latency)
    transfer = min(samples[2, "much"]) - min(samples[2, "little"])
    # In an all-reduce, each of n devices sends 2 (n - 1) / n times its bytes, so once on two devices.
    bandwidth = _LARGE_BYTES / max(transfer, 1e-9)
    return Link(name, *(Figure(value, spread, MEASURED) for value in (latency, bandwidth, overhead)))


def _work_then_all_reduce(devices: Sequence[jax.Device], size: str) -> Repeated:
    """A program with work on each device, then an all-reduce; `size` is "little", "much", or "" for none."""
    mesh = make_mesh(devices, _AXIS)
    sharded, replicated = PartitionSpec(_AXIS), PartitionSpec()

    def work(x: jax.Array, weights: jax.Array, large: jax.Array) -> list[jax.Array]:
        for _ in range(4):
            x = jnp.tanh(x @ weights)
        if size == "little":
            x = x + 1e-6 * jax.lax.psum(x[0], _AXIS)
        if size == "much":
            large = jax.lax.psum(large + x[0, 0], _AXIS) * 0.5
        return [x, large]

    specs = sharded, replicated, sharded
    function = jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=[sharded, sharded], check_vma=False)
    arguments = [
        jnp.ones((len(devices) * 256, 64), jnp.float32),
        jnp.eye(64, dtype=jnp.float32),
        jnp.ones((len(devices), _LARGE_BYTES // 4), jnp.float32),
    ]
    arguments = jax.device_put(arguments, [NamedSharding(mesh, spec) for spec in specs])
    return Repeated(function, arguments, {0: 0, 1: 2})  # results become `x` and `large` of the next call


def _measure(address: str, index: int) -> None:
    """The main function of the two child processes; the first of them prints the link as JSON."""
    distributed.initialize(address, 2, index)
    link = between_devices(jax.devices(), "sockets of this host", lambda line: None)
    assert link is not None
    if distributed.is_first():
        print(json.dumps(link_as_json(link)), flush=True)
    distributed.leave()


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]))
