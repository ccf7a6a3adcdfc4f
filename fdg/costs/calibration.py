"""Calibrates the cost model on this machine, in three minutes.

One microbenchmark measures each figure of `hardware.RATES`. The other parameters are fitted to timed jobs
(`fdg/training/reference_jobs.py`, `fitting`).

Every operation runs many times in one program (`profiling.repeating`). A rate is the work that the cost model
counts for it (`profiling.work`) divided by its time, so measurement and prediction use the same definition.
On a CPU all cores run at once, each on its own copy, as host devices do; the speedup of a single device that
has all cores is measured too.
"""

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from fdg.cores import usable_cores
from fdg.costs import links, published
from fdg.costs.hardware import TIMES, DeviceKind, Figure, Link
from fdg.costs.machine import MEASURED, REFERENCE, SHARED_MEMORY, SOCKETS, Calibration, fingerprint
from fdg.errors import FdgError, UnknownNameError
from fdg.jaxprs.count import Product
from fdg.profiling.repeating import Repeated, compile_all, rounds
from fdg.profiling.work import Work, work_of

ROUNDS = 8
_SMALL, _LARGE = 2**18, 2**26  # bytes of arrays that fit into the cache, and that do not
# Bytes that an operation reads and writes, to find the size of the cache.
_SIZES = tuple(2**k for k in range(21, 26))
_NEGLIGIBLE_S = 1e-16  # seconds for a FLOP or a byte; a smaller fitted value means 0
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Timed:
    """Timings of a function."""

    work: Work  # the work that the cost model counts for it
    alone: float  # seconds of a call while nothing else runs
    crowded: float  # seconds of a call while every core runs a copy
    spread: float  # relative distance of the rounds' median from their minimum


def calibrate(
    devices: Sequence[jax.Device],
    say: Say = lambda line: None,
    time_jobs: Callable[[], Mapping[str, float]] = dict,
) -> Calibration:
    """Measures the rates of this process's devices of one kind.

    With two devices or more, links between them are measured too. `say` is called with lines of progress;
    `time_jobs` times reference jobs (`Calibration.jobs`), and rates are measured before and after it.
    """
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1:
        raise FdgError(f"calibrate: devices of {len(kinds)} kinds: calibrate one kind at a time")
    begun = time.perf_counter()
    first, is_cpu = devices[0], devices[0].platform == "cpu"
    lanes = usable_cores() if is_cpu else 1
    with jax.default_device(first):
        figures = _device_figures(lanes, say)
        say("starting programs")
        figures.update(_host_figures())
    say("links")
    figures.update(_transfer_figure(devices))
    if is_cpu:
        inside = links.among(devices, "shared memory", say) or SHARED_MEMORY
        between = links.between_processes(say) or SOCKETS
    else:
        inside, between = _published_links(first)
        inside = links.among(devices, f"links of {first.device_kind}", say) or inside
    memory = (first.memory_stats() or {}).get("bytes_limit") if not is_cpu else None
    if memory:
        figures["memory_bytes"] = Figure(float(memory), 0.0, "what the allocator says")
    jobs = time_jobs()
    with jax.default_device(first):  # a second time: other processes may have used the cache the first time
        figures = better(figures, _device_figures(lanes, say))
    return Calibration(
        fingerprint(first.device_kind),
        DeviceKind(first.device_kind, first.platform, figures),
        inside,
        between,
        usable_cores() if is_cpu else None,
        datetime.date.today().isoformat(),
        time.perf_counter() - begun,
        jobs,
    )


def better(first: Mapping[str, Figure], second: Mapping[str, Figure]) -> dict[str, Figure]:
    """Merges two sets of measurements: the better value of each figure, with the larger spread."""
    found = {**second, **first}
    for name in first.keys() & second.keys():
        one, other = first[name].value, second[name].value
        best = min(one, other) if name in TIMES else max(one, other)
        spread = max(first[name].spread, second[name].spread)
        found[name] = first[name]._replace(value=best, spread=spread)
    return found


def _published_links(device: jax.Device) -> tuple[Link, Link]:
    try:
        return published.usual_links(device.device_kind)
    except UnknownNameError:
        return published.LINKS["PCIe 4"], published.LINKS["Ethernet 100"]


# --- a device ---


def _device_figures(lanes: int, say: Say) -> dict[str, Figure]:
    say("products of matrices")
    found = _product_figures(lanes)
    say("operations by class")
    timed = _time_functions(_operations(), lanes)
    trip, start = timed.pop("trip"), timed.pop("operation")
    count = sum(start.work.operations.values())
    found["operation"] = _figure(max(start.crowded / count, 1e-9), start)
    inside = sum(trip.work.operations.values()) * found["operation"].value
    found["trip"] = _figure(max((trip.crowded - inside) / trip.work.trips, 1e-8), trip)
    for name in ("memory", "cache"):
        one = timed.pop(name)
        found[name] = _figure(one.work.total_bytes / one.crowded, one)
    sizes = {size: timed.pop(_sized(size)) for size in _SIZES}
    at_least = math.sqrt(found["memory"].value * found["cache"].value)
    fitting = [size for size, one in sizes.items() if size / one.crowded >= at_least]
    largest = max(fitting, default=_SIZES[0] // 2)
    found["cache_bytes"] = _figure(largest, sizes.get(largest, sizes[_SIZES[0]]))
    for name, one in timed.items():
        size = sum(operation.bytes * count for operation, count in one.work.operations.items())
        found[name] = _figure(size / max(one.crowded - found["operation"].value, 1e-9), one)
    if lanes > 1:
        gains = [
            one.crowded / one.alone
            for name, one in timed.items()
            if name in ("elementwise", "transcendental")
        ]
        gain = min(float(lanes), max(1.0, statistics.median(gains)))
        found.setdefault("parallel", Figure((gain - 1) / (lanes - 1), 0.2, MEASURED))
        found["parallel_bytes"] = Figure(1e5, 0.0, "taken, not measured")
    return found


def _operations() -> dict[str, tuple[Callable, list[Any]]]:
    """The benchmarked functions and their arguments, by the rate that they measure."""
    small, large = _SMALL // 4, _LARGE // 8
    x, big = jnp.ones((small,), jnp.float32), jnp.ones((large,), jnp.float32)
    rows = jnp.ones((4096, 16), jnp.float32)
    order = jax.random.permutation(jax.random.key(0), small)
    table, unsorted = jnp.ones((256, small // 256)), jax.random.uniform(jax.random.key(1), (64, 1024))

    def starts(x: jax.Array) -> list[jax.Array]:
        for _ in range(16):
            x = _link_of_chain(x)
        return [x]

    def trips(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.scan(lambda c, _: (_link_of_chain(c), None), x, length=1000)[0]]

    return {
        "memory": (lambda x: [x + 1.0], [big]),
        "cache": (lambda x: [x + 1.0], [x]),
        **{_sized(size): (lambda x: [x + 1.0], [jnp.ones((size // 8,), jnp.float32)]) for size in _SIZES},
        "elementwise": (lambda x: [x + 1.0], [x]),
        "transcendental": (lambda x: [jnp.tanh(x)], [x]),
        "special": (lambda x: [jnp.sin(x)], [x]),
        "reduction": (lambda x: [x.sum(axis=1)], [table]),
        "random": (lambda key: [jax.random.bits(key, (small // 4,))], [jax.random.key(0)]),
        "sort": (lambda x: [jax.lax.sort(x)], [unsorted]),
        "movement": (lambda x, i: [x.at[i].get(mode="promise_in_bounds")], [x, order]),
        "copy": (lambda x: [x.T], [rows]),
        "host": (_on_host, [x]),
        "operation": (starts, [jnp.ones((8,), jnp.float32)]),
        "trip": (trips, [jnp.ones((8,), jnp.float32)]),
    }


def _sized(size: int) -> str:
    """The name of the benchmark of an addition that reads and writes `size` bytes."""
    return f"{size} bytes"


def _link_of_chain(x: jax.Array) -> jax.Array:
    """One link of a chain: a sum and an operation on it; XLA cannot fuse them with the next link."""
    return x * 0.5 + x.sum()


def _on_host(x: jax.Array) -> list[jax.Array]:
    return [jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)]


def _time_functions(functions: Mapping[str, tuple[Callable, list[Any]]], lanes: int) -> dict[str, Timed]:
    """Times each function, repeated within one program; each round runs all functions."""
    programs = {name: Repeated(function, arguments) for name, (function, arguments) in functions.items()}
    compile_all(programs.values())
    alone = rounds(programs, ROUNDS)
    crowded = rounds(programs, ROUNDS, lanes) if lanes > 1 else alone
    works = {
        name: work_of(jax.make_jaxpr(function)(*arguments))
        for name, (function, arguments) in functions.items()
    }
    return {
        name: Timed(works[name], min(alone[name]), min(crowded[name]), _spread(crowded[name]))
        for name in functions
    }


def _spread(samples: Sequence[float]) -> float:
    return statistics.median(samples) / min(samples) - 1


def _figure(value: float, timed: Timed) -> Figure:
    return Figure(value, round(timed.spread, 3), MEASURED)


_SHAPES = [
    *((m, k, n) for m in (32, 256, 2048) for k, n in ((4, 64), (64, 64), (64, 4), (256, 256))),
    (512, 512, 512),
]


def _product_figures(lanes: int) -> dict[str, Figure]:
    """Start-up time, FLOP rate and byte rate of matrix products: a fit of relative errors over shapes."""
    functions = {str(shape): _product(shape) for shape in _SHAPES}
    timed = _time_functions(functions, lanes)
    rows, taken = [], []
    for m, k, n in _SHAPES:
        product = Product(1, m, k, n, "float32")
        seconds = timed[str((m, k, n))].crowded
        rows.append([1.0 / seconds, product.flops / seconds, product.bytes / seconds])
        taken.append(1.0)
    scale = np.array([1e-6, 1e-11, 1e-10])
    start, a_flop, a_byte = nnls(np.array(rows) * scale, np.array(taken))[0] * scale
    largest = timed[str((512, 512, 512))]
    rate = 1 / a_flop if a_flop > _NEGLIGIBLE_S else 2 * 512**3 / largest.crowded
    found = {
        "product/float32": Figure(rate, round(largest.spread, 3), MEASURED),
        "product_call": Figure(float(start), round(largest.spread, 3), MEASURED),
    }
    if a_byte > _NEGLIGIBLE_S:
        found["product_bytes"] = Figure(float(1 / a_byte), round(largest.spread, 3), MEASURED)
    else:
        found["product_bytes"] = Figure(1e15, 0.0, "products take no longer for what they read and write")
    if lanes > 1:
        gain = min(float(lanes), max(1.0, largest.crowded / largest.alone))
        found["parallel"] = Figure((gain - 1) / (lanes - 1), round(largest.spread, 3), MEASURED)
    return found


def _product(shape: tuple[int, int, int]) -> tuple[Callable, list[Any]]:
    m, k, n = shape
    return lambda x, w: [x @ w], [jnp.ones((m, k), jnp.float32), jnp.ones((k, n), jnp.float32)]


# --- the host ---


def _host_figures() -> dict[str, Figure]:
    """Seconds to dispatch a program, and additional seconds for each argument and result."""
    few, many = _dispatch_seconds(2), _dispatch_seconds(64)
    an_array = max(0.0, (min(many) - min(few)) / (2 * 62))
    start = max(1e-7, min(few) - 4 * an_array)
    return {
        "dispatch": Figure(start, round(_spread(few), 3), MEASURED),
        "argument": Figure(an_array, round(_spread(many), 3), MEASURED),
    }


def _dispatch_seconds(arrays: int) -> list[float]:
    """Host seconds to dispatch a program with `arrays` arguments and results, without waiting for it."""
    given = [jnp.float32(i) for i in range(arrays)]
    compiled = jax.jit(lambda xs: [x + 1 for x in xs]).lower(given).compile()
    samples = []
    for _ in range(3 * ROUNDS):
        begun = time.perf_counter()
        for _ in range(100):
            given = compiled(given)
        samples.append((time.perf_counter() - begun) / 100)
        jax.block_until_ready(given)
    return samples


def _transfer_figure(devices: Sequence[jax.Device]) -> dict[str, Figure]:
    """Host seconds to start a transfer, without its cost per array (see `overheads.OVERHEADS`)."""
    if len(devices) < 2:
        return {"transfer": Figure(REFERENCE.rate("transfer"), 0.5, "taken: there is one device only")}
    one, many = _transfer_seconds(devices, 1), _transfer_seconds(devices, 16)
    an_array = max(0.0, (min(many) - min(one)) / 15)
    return {"transfer": Figure(max(1e-7, min(one) - an_array), round(_spread(one), 3), MEASURED)}


def _transfer_seconds(devices: Sequence[jax.Device], arrays: int) -> list[float]:
    """Host seconds to start copies of `arrays` arrays to another device."""
    given = jax.device_put([jnp.ones((8,), jnp.float32) for _ in range(arrays)], devices[0])
    samples = []
    for _ in range(3 * ROUNDS):
        begun = time.perf_counter()
        arrived = [jax.device_put(given, [devices[1]] * arrays) for _ in range(50)]
        samples.append((time.perf_counter() - begun) / 50)
        jax.block_until_ready(arrived)
    return samples
