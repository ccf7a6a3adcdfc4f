"""Measuring links: among the devices of a process, and between two processes of this machine.

Two processes are two children of this one, that run `python -m fdg.costs.links ADDRESS INDEX`.
"""

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
from fdg.profiling.repeating import Repeated, compile_all
from fdg.running.host_devices import environment_of_a_child

ROUNDS = 50
_MUCH = 2**22  # bytes of an all-reduce whose bytes count
_AXIS = "device"
_PATIENCE = 120  # seconds for the children
Say = Callable[[str], None]


def between_processes(say: Say) -> Link | None:
    """Between two processes of this machine, with a CPU device each; None where they could not be started."""
    say("two processes")
    address = f"localhost:{free_port('localhost')}"
    words = [sys.executable, "-m", "fdg.costs.links", address]
    environment = {
        **environment_of_a_child(),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    children = [subprocess.Popen([*words, index], env=environment, **pipes) for index in ("0", "1")]
    try:
        said = [child.communicate(timeout=_PATIENCE)[0] for child in children]
        return link_from_json(json.loads(said[0].splitlines()[-1]))
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError):
        return None
    finally:
        for child in children:
            child.kill()
            child.wait()


def among(devices: Sequence[jax.Device], name: str, say: Say) -> Link | None:
    """Among devices: from all-reduces of little and of much, on two of them and on all.

    What a collective takes besides its bytes is how much longer some work takes with one behind it: devices
    that meet at once, one time after the other, find each other awake, and after work they do not.

    Args:
      devices: of this process, or of several that all call this; of a single one nothing is said.
      name: of the link.
      say: told what is being done.
    """
    if len(devices) < 2:
        return None
    counts = [2] if len(devices) < 4 else [2, len(devices)]
    programs = {(count, how): _worked(devices[:count], how) for count in counts for how in ("", "little")}
    programs[2, "much"] = _worked(devices[:2], "much")
    say("collectives")
    compile_all(programs.values())
    taken: dict[tuple[int, str], list[float]] = {key: [] for key in programs}
    for _ in range(ROUNDS):
        for key, one in programs.items():
            one.samples.clear()
            one.measure()
            taken[key].append(one.seconds)
    met = {
        count: [b - a for a, b in zip(taken[count, ""], taken[count, "little"], strict=True)]
        for count in counts
    }
    typical = {count: max(1e-7, statistics.median(each)) for count, each in met.items()}
    spread = round(statistics.median(abs(each - typical[2]) for each in met[2]) / typical[2], 3)
    latency = 0.0
    if len(counts) > 1:
        rounds = 2 * (math.log2(counts[1]) - 1)
        latency = max(0.0, (typical[counts[1]] - typical[2]) / rounds)
    call = max(1e-7, typical[2] - 2 * latency)
    longer = min(taken[2, "much"]) - min(taken[2, "little"])
    return Link(
        name,
        Figure(latency, spread, MEASURED),
        Figure(_MUCH / max(longer, 1e-9), spread, MEASURED),
        Figure(call, spread, MEASURED),
    )


def _worked(devices: Sequence[jax.Device], how: str) -> Repeated:
    """Some work on each device, and an all-reduce of "little" or "much" behind it, or none.

    Of an all-reduce twice (n - 1) / n of the bytes pass each device.
    """
    mesh = make_mesh(devices, _AXIS)
    split, whole = PartitionSpec(_AXIS), PartitionSpec()

    def work(x: jax.Array, weights: jax.Array, large: jax.Array) -> list[jax.Array]:
        for _ in range(4):
            x = jnp.tanh(x @ weights)
        if how == "little":
            x = x + 1e-6 * jax.lax.psum(x[0], _AXIS)
        if how == "much":
            large = jax.lax.psum(large + x[0, 0], _AXIS) * 0.5
        return [x, large]

    specs = split, whole, split
    function = jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=[split, split], check_vma=False)
    arguments = [
        jnp.ones((len(devices) * 256, 64), jnp.float32),
        jnp.eye(64, dtype=jnp.float32),
        jnp.ones((len(devices), _MUCH // 4), jnp.float32),
    ]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
    return Repeated(function, placed, {0: 0, 1: 2})


def main(address: str, index: int) -> None:
    """One of the two children; the first prints what was found."""
    distributed.initialize(address, 2, index)
    link = among(jax.devices(), "sockets of this host", lambda line: None)
    assert link is not None
    if distributed.is_first():
        print(json.dumps(link_as_json(link)), flush=True)
    distributed.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
