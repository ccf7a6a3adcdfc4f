"""Calibrates the cost model on this machine, which takes five minutes.

Microbenchmarks measure the figures of `hardware.RATES`. The other parameters of the model are fitted to timed
jobs (`fdg/training/reference_jobs.py`, `fitting`).

A microbenchmark runs one operation many times in one program (`profiling.repeating`). A rate is the
operation's work divided by its time. The work is counted by the same function as in predictions
(`profiling.work`). On a CPU, each core runs a copy of the operation at the same time, as if each core were a
JAX device. The speedup of a single device that uses all cores is measured too.
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
from fdg.costs.hardware import TIMES, DeviceKind, Figure
from fdg.costs.machine import MEASURED, SHARED_MEMORY, SOCKETS, UNCALIBRATED_CPU, Calibration, fingerprint
from fdg.errors import FdgError, UnknownNameError
from fdg.jaxprs.count import Product
from fdg.profiling.repeating import Repeated, compile_all, platform_of, timed_rounds
from fdg.profiling.work import Work, work_of
from fdg.running.program import compile_lowered

ROUNDS = 8  # the number of times that each benchmark is timed
_SMALL_BYTES = 2**18  # size of an array that fits into the cache
_LARGE_BYTES = 2**26  # bytes that the benchmark of memory reads and writes: more than fit into the cache
# Total bytes that an operation reads and writes, in the benchmarks that find the size of the cache.
_TEST_BYTES = tuple(2**k for k in range(21, 26))
_NEGLIGIBLE_S = 1e-16  # seconds per FLOP or byte; a smaller fitted value counts as 0
Report = Callable[[str], None]  # takes the name of what is measured next, to show progress


@dataclasses.dataclass(frozen=True)
class Times:
    """Timings of a function, in seconds per call."""

    work: Work  # the function's work, as the cost model counts it
    alone: float  # seconds while nothing else runs
    loaded: float  # seconds while every core runs a copy
    spread: float  # relative difference between the median and the minimum of all rounds


def calibrate(
    devices: Sequence[jax.Device],
    report: Report = lambda line: None,
    time_jobs: Callable[[], Mapping[str, float]] = dict,
) -> Calibration:
    """Measures the rates of these devices, which must be of one kind.

    With two devices or more, links between them are measured too. `report` is called with lines of progress.
    `time_jobs` returns the times of the reference jobs (`Calibration.jobs`); rates are measured before and
    after this call.
    """
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1:
        names = ", ".join(sorted(kinds))
        raise FdgError(f"calibrate: the devices are of {len(kinds)} kinds ({names}): calibrate one at a time")
    start_time = time.perf_counter()
    first_device, is_cpu = devices[0], devices[0].platform == "cpu"
    num_copies = usable_cores() if is_cpu else 1
    with jax.default_device(first_device):
        figures = _device_figures(num_copies, report)
        report("starting programs")
        figures.update(_host_figures())
    report("links")
    figures.update(_transfer_figure(devices))
    if is_cpu:
        inside = links.between_devices(devices, "shared memory", report) or SHARED_MEMORY
        between = links.between_processes(report) or SOCKETS
    else:
        try:
            inside, between = published.usual_links(first_device.device_kind)
        except UnknownNameError:
            inside, between = published.LINKS["PCIe 4"], published.LINKS["Ethernet 100"]
        inside = links.between_devices(devices, f"links of {first_device.device_kind}", report) or inside
    memory = (first_device.memory_stats() or {}).get("bytes_limit") if not is_cpu else None
    if memory:
        figures["memory_bytes"] = Figure(float(memory), 0.0, "reported by the allocator")
    jobs = time_jobs()
    with jax.default_device(first_device):  # again, in case other processes disturbed the first time
        figures = merge_figures(figures, _device_figures(num_copies, report))
    return Calibration(
        fingerprint(first_device.device_kind),
        DeviceKind(first_device.device_kind, first_device.platform, figures),
        inside,
        between,
        usable_cores() if is_cpu else None,
        datetime.date.today().isoformat(),
        time.perf_counter() - start_time,
        jobs,
    )


def merge_figures(earlier: Mapping[str, Figure], later: Mapping[str, Figure]) -> dict[str, Figure]:
    """Merges two measurements of the figures: the faster value of each, with the larger spread."""
    merged = {**later, **earlier}
    for name in earlier.keys() & later.keys():
        earlier_value, later_value = earlier[name].value, later[name].value
        better_value = min(earlier_value, later_value) if name in TIMES else max(earlier_value, later_value)
        spread = max(earlier[name].spread, later[name].spread)
        merged[name] = earlier[name]._replace(value=better_value, spread=spread)
    return merged


# --- a device ---


def _device_figures(num_copies: int, report: Report) -> dict[str, Figure]:
    """Figures of the default device by name, while `num_copies` copies of each benchmark run at once."""
    report("matrix products")
    figures = _product_figures(num_copies)
    report("operations by class")
    timings = _time_functions(_benchmarks(), num_copies)
    trips, operations = timings.pop("trip"), timings.pop("operation")
    count = sum(operations.work.operations.values())
    figures["operation"] = _figure(max(operations.loaded / count, 1e-9), operations)
    operation_seconds = sum(trips.work.operations.values()) * figures["operation"].value
    figures["trip"] = _figure(max((trips.loaded - operation_seconds) / trips.work.trips, 1e-8), trips)
    for name in ("memory", "cache"):
        timing = timings.pop(name)
        figures[name] = _figure(timing.work.total_bytes / timing.loaded, timing)
    cache_timings = {size: timings.pop(_addition_name(size)) for size in _TEST_BYTES}
    # A size fits into the cache if its rate is nearer to the cache's than to the memory's.
    min_rate = math.sqrt(figures["memory"].value * figures["cache"].value)
    cached_sizes = [size for size, timing in cache_timings.items() if size / timing.loaded >= min_rate]
    largest = max(cached_sizes, default=_TEST_BYTES[0] // 2)
    figures["cache_bytes"] = _figure(largest, cache_timings.get(largest, cache_timings[_TEST_BYTES[0]]))
    for name, timing in timings.items():
        size = sum(operation.bytes * count for operation, count in timing.work.operations.items())
        figures[name] = _figure(size / max(timing.loaded - figures["operation"].value, 1e-9), timing)
    if num_copies > 1:
        figures["parallel_bytes"] = Figure(1e5, 0.0, "assumed, not measured")
    return figures


def _benchmarks() -> dict[str, tuple[Callable, list[Any]]]:
    """The functions to time and their arguments, by the figure that they measure, or by `_addition_name`."""
    cached_size, uncached_size = _SMALL_BYTES // 4, _LARGE_BYTES // 8
    x, uncached_x = jnp.ones((cached_size,), jnp.float32), jnp.ones((uncached_size,), jnp.float32)
    rows = jnp.ones((4096, 16), jnp.float32)
    order = jax.random.permutation(jax.random.key(0), cached_size)
    table, unsorted = jnp.ones((256, cached_size // 256)), jax.random.uniform(jax.random.key(1), (64, 1024))

    def chain(x: jax.Array) -> list[jax.Array]:
        for _ in range(16):
            x = _unfusible_step(x)
        return [x]

    def loop(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.scan(lambda c, _: (_unfusible_step(c), None), x, length=1000)[0]]

    return {
        "memory": (lambda x: [x + 1.0], [uncached_x]),
        "cache": (lambda x: [x + 1.0], [x]),
        **{
            _addition_name(size): (lambda x: [x + 1.0], [jnp.ones((size // 8,), jnp.float32)])
            for size in _TEST_BYTES
        },
        "elementwise": (lambda x: [x + 1.0], [x]),
        "transcendental": (lambda x: [jnp.tanh(x)], [x]),
        "special": (lambda x: [jnp.sin(x)], [x]),
        "reduction": (lambda x: [x.sum(axis=1)], [table]),
        "random": (lambda key: [jax.random.bits(key, (cached_size // 4,))], [jax.random.key(0)]),
        "sort": (lambda x: [jax.lax.sort(x)], [unsorted]),
        "movement": (lambda x, i: [x.at[i].get(mode="promise_in_bounds")], [x, order]),
        "copy": (lambda x: [x.T], [rows]),
        "host": (lambda x: [jax.pure_callback(np.asarray, jax.typeof(x), x)], [x]),
        "operation": (chain, [jnp.ones((8,), jnp.float32)]),
        "trip": (loop, [jnp.ones((8,), jnp.float32)]),
    }


def _addition_name(size: int) -> str:
    """The name of the benchmark of an addition that reads and writes `size` bytes."""
    return f"{size} bytes"


def _unfusible_step(x: jax.Array) -> jax.Array:
    """A sum and an operation on it, which XLA cannot fuse with the next call of this function."""
    return x * 0.5 + x.sum()


def _time_functions(functions: Mapping[str, tuple[Callable, list[Any]]], num_copies: int) -> dict[str, Times]:
    """Times each function, repeated within one program; each round runs all functions."""
    programs = {name: Repeated(function, arguments) for name, (function, arguments) in functions.items()}
    compile_all(programs.values())
    alone = timed_rounds(programs, ROUNDS)
    loaded = timed_rounds(programs, ROUNDS, num_copies) if num_copies > 1 else alone
    return {
        name: Times(
            work_of(jax.make_jaxpr(function)(*arguments)),
            min(alone[name]),
            min(loaded[name]),
            _spread(loaded[name]),
        )
        for name, (function, arguments) in functions.items()
    }


def _spread(samples: Sequence[float]) -> float:
    """The relative difference between the median and the minimum."""
    return statistics.median(samples) / min(samples) - 1


def _figure(value: float, timing: Times) -> Figure:
    """A measured figure; `timing` is the timing from which it was computed."""
    return Figure(value, round(timing.spread, 3), MEASURED)


_PRODUCT_SHAPES = [  # (m, k, n) of the timed products [m, k] @ [k, n]
    *((m, k, n) for m in (32, 256, 2048) for k, n in ((4, 64), (64, 64), (64, 4), (256, 256))),
    (512, 512, 512),
]


def _product_figures(num_copies: int) -> dict[str, Figure]:
    """Start-up time, FLOP rate and byte rate of matrix products: a least-squares fit of relative errors."""
    functions = {str(shape): _product_benchmark(shape) for shape in _PRODUCT_SHAPES}
    timings = _time_functions(functions, num_copies)
    coefficients = []
    for shape in _PRODUCT_SHAPES:
        product, seconds = Product(1, *shape, "float32"), timings[str(shape)].loaded
        coefficients.append([1.0 / seconds, product.flops / seconds, product.bytes / seconds])
    scale = np.array([1e-6, 1e-11, 1e-10])  # typical values, which make the fit well conditioned
    start, per_flop, per_byte = nnls(np.array(coefficients) * scale, np.ones(len(coefficients)))[0] * scale
    largest = timings[str((512, 512, 512))]
    flop_rate = 1 / per_flop if per_flop > _NEGLIGIBLE_S else 2 * 512**3 / largest.loaded
    figures = {
        "product/float32": _figure(flop_rate, largest),
        "product_call": _figure(float(start), largest),
    }
    if per_byte > _NEGLIGIBLE_S:
        figures["product_bytes"] = _figure(float(1 / per_byte), largest)
    else:
        figures["product_bytes"] = Figure(1e15, 0.0, "bytes do not add to the time of products")
    if num_copies > 1:
        speedup = min(float(num_copies), max(1.0, largest.loaded / largest.alone))
        figures["parallel"] = _figure((speedup - 1) / (num_copies - 1), largest)
    return figures


def _product_benchmark(shape: tuple[int, int, int]) -> tuple[Callable, list[Any]]:
    m, k, n = shape
    return lambda x, w: [x @ w], [jnp.ones((m, k), jnp.float32), jnp.ones((k, n), jnp.float32)]


# --- the host ---


def _host_figures() -> dict[str, Figure]:
    """Seconds to dispatch a program, and additional seconds per argument or result."""
    few, many = _dispatch_seconds(2), _dispatch_seconds(64)
    per_array = max(0.0, (min(many) - min(few)) / (2 * 62))  # 62 more arguments and 62 more results
    start_seconds = max(1e-7, min(few) - 4 * per_array)  # without its 2 arguments and 2 results
    return {
        "dispatch": Figure(start_seconds, round(_spread(few), 3), MEASURED),
        "argument": Figure(per_array, round(_spread(many), 3), MEASURED),
    }


def _dispatch_seconds(num_arrays: int) -> list[float]:
    """Host seconds to dispatch a program with `num_arrays` arguments and results, without waiting for it."""
    values = [jnp.float32(i) for i in range(num_arrays)]
    compiled = compile_lowered(jax.jit(lambda xs: [x + 1 for x in xs]).lower(values), platform_of(values))
    samples = []
    for _ in range(3 * ROUNDS):
        start_time = time.perf_counter()
        for _ in range(100):
            values = compiled(values)
        samples.append((time.perf_counter() - start_time) / 100)
        jax.block_until_ready(values)
    return samples


def _transfer_figure(devices: Sequence[jax.Device]) -> dict[str, Figure]:
    """Host seconds to start a transfer, without its cost per array (see `overheads.OVERHEADS`)."""
    if len(devices) < 2:
        return {
            "transfer": Figure(UNCALIBRATED_CPU.rate("transfer"), 0.5, "assumed: there is only one device")
        }
    single, many = _transfer_seconds(devices, 1), _transfer_seconds(devices, 16)
    per_array = max(0.0, (min(many) - min(single)) / 15)  # 15 more arrays
    return {"transfer": Figure(max(1e-7, min(single) - per_array), round(_spread(single), 3), MEASURED)}


def _transfer_seconds(devices: Sequence[jax.Device], num_arrays: int) -> list[float]:
    """Host seconds to start copies of `num_arrays` arrays to another device."""
    values = jax.device_put([jnp.ones((8,), jnp.float32) for _ in range(num_arrays)], devices[0])
    samples = []
    for _ in range(3 * ROUNDS):
        start_time = time.perf_counter()
        copies = [jax.device_put(values, [devices[1]] * num_arrays) for _ in range(50)]
        samples.append((time.perf_counter() - start_time) / 50)
        jax.block_until_ready(copies)
    return samples
