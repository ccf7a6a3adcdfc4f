"""Describes the machine, measures the highest rates of its device, and compares results with a CPU."""

import importlib.metadata
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset

import algos
import envs
import fdg
import policies
from bench.gpu.measuring import Figures, Measurement, Settings
from bench.peers.serve import Stopwatch
from fdg.profiling.repeating import Repeated, compile_all

TOLERANCE = 1e-4
"""Largest accepted difference between GPU and CPU, relative to the array's largest value."""

_PRODUCTS = {  # name -> dtype of the operands, algorithm of the product (None: XLA chooses)
    "bfloat16": (jnp.bfloat16, None),
    "tf32": (jnp.float32, DotAlgorithmPreset.TF32_TF32_F32),
    "float32": (jnp.float32, DotAlgorithmPreset.F32_F32_F32),
}
_PACKAGES = "jax jaxlib flax optax chex orbax-checkpoint numpy gymnax brax craftax".split()
_PACKAGES_OF_CUDA = "jax-cuda13-plugin nvidia-cudnn-cu13 nvidia-nccl-cu13 nvidia-cublas".split()


def measurements(settings: Settings) -> list[Measurement]:
    """The first measurements of part 1 (`training.machine_and_training`)."""
    n = settings.full_or_tiny(8192, 128)
    megabytes = settings.full_or_tiny(1024, 1)
    compare = partial(compare_with_cpu, settings.full_or_tiny(256, 4))
    product_names = [name for name in _PRODUCTS if name != "tf32" or not settings.tiny]  # CPUs have no TF32
    return [
        Measurement("Machine", "device", describe_machine, seconds=3),
        *(Measurement("Products", name, partial(time_product, name, n), seconds=5) for name in product_names),
        Measurement("Memory", "read and write", partial(time_memory, megabytes * 2**20), seconds=5),
        Measurement("Starts", "a trip of a loop, a call", launch_overheads, seconds=3),
        Measurement("Agreement with the CPU", "PPO, CartPole-v1", compare, seconds=40),
    ]


def describe_machine() -> Figures:
    """Devices, memory, driver, and versions of packages (None: not known)."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "devices": jax.device_count(),
        "memory GiB": round(stats["bytes_limit"] / 2**30, 1) if "bytes_limit" in stats else None,
        "driver": _driver(),
        **{name: _version(name) for name in ("jax", "jaxlib")},
        "versions": {name: _version(name) for name in (*_PACKAGES, *_PACKAGES_OF_CUDA)},
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def seconds_of(repeated: Repeated) -> float:
    """Compiles, and returns the shortest time of a call, in seconds, over five rounds."""
    compile_all([repeated])
    for _ in range(5):
        repeated.measure()
    return repeated.seconds


def time_product(name: str, n: int) -> Figures:
    """Multiplies two `[n, n]` arrays of normal numbers; zeros need less power, and so less time."""
    dtype, algorithm = _PRODUCTS[name]
    x, w = (jax.random.normal(key, (n, n), dtype) for key in jax.random.split(jax.random.key(0)))
    seconds = seconds_of(Repeated(lambda x, w: [jnp.dot(x, w, precision=algorithm)], [x, w]))
    return {"size": n, "ms": 1e3 * seconds, "TFLOP/s": 2e-12 * n**3 / seconds}


def time_memory(size: int) -> Figures:
    """Reads and writes an array of `size` bytes in place."""
    x = jnp.ones(size // 4, jnp.float32)
    feedback = {0: 0}  # result 0 is argument 0 of the next call
    seconds = seconds_of(Repeated(lambda x: [x * 0.5 + 0.5], [x], feedback))
    return {"MiB": size // 2**20, "ms": 1e3 * seconds, "GB/s": 2e-9 * size / seconds}


def launch_overheads() -> Figures:
    """Times one iteration of a WHILE loop around a small operation, and a call that waits for its result."""
    x = jnp.ones(128)
    feedback = {0: 0}  # result 0 is argument 0 of the next call
    trip = seconds_of(Repeated(lambda x: [jnp.sin(x)], [x], feedback))
    small = jax.jit(jnp.sin).lower(x).compile()

    for calls in (10, 1000):  # the first is a warm-up
        with Stopwatch() as watch:
            for _ in range(calls):
                small(x).block_until_ready()
    return {"trip us": 1e6 * trip, "call us": 1e6 * watch.seconds / calls}


def compare_with_cpu(num_envs: int) -> Figures:
    """Compares iterations of PPO on the first device with the CPU, both with full float32 products.

    A difference is relative to the array's largest value. If rounding changes an action, the runs diverge:
    differences are then large, and many integers and positions of NaN differ.
    """
    iterations = 4
    algorithm = algos.PPO(env=envs.make("CartPole-v1"), num_envs=num_envs, num_steps=32, total_steps=10**6)
    results = []
    with jax.default_matmul_precision("highest"):
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            with jax.default_device(device):
                engine = fdg.compile(algorithm, policies.GPUOnly(), [device])
                state, metrics = engine.run(engine.init(0), iterations)
                results.append(jax.device_get((state.parameters, metrics)))
    largest, differing = 0.0, 0
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        if np.issubdtype(x.dtype, np.floating):
            differing += int(np.sum(np.isnan(x) != np.isnan(y)))
            difference = np.abs(np.nan_to_num(x) - np.nan_to_num(y)).max(initial=0.0)
            largest = max(largest, float(difference / max(np.abs(np.nan_to_num(y)).max(initial=0.0), 1e-30)))
        else:
            differing += int(np.sum(x != y))
    return {
        "iterations": iterations,
        "largest relative difference": largest,
        "tolerance": TOLERANCE,
        "differing integers": differing,  # and positions of NaN
        "agrees": largest <= TOLERANCE and not differing,
    }
