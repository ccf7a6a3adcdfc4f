"""Eight host devices, strict rank promotion, a compilation cache: set before JAX starts its backends."""

import collections
import functools
import gc
import os
import shutil
import signal
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from unittest import mock

# Most test programs run for milliseconds and compile for seconds. These settings make compilation six times
# faster: no LLVM optimisation, the older code generator (jaxlib 0.11 lacks it and refuses the flag), one
# codegen split instead of one per core, no Python source locations. The caller's device count is dropped:
# it would contradict the one below.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # SciPy's threads (orthogonal initialisation) spin-wait
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f),
    ]
)

# Temporary files are in memory if there is space: each checkpoint is synced to disk, which takes half of the
# time of tests that train.
if (
    "TMPDIR" not in os.environ
    and os.access("/dev/shm", os.W_OK)
    and shutil.disk_usage("/dev/shm").free > 2**32
):
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

# Compilation takes most of the test time. Workers and child processes share this cache, as does the next run
# if the caller sets the directory. (Tests that count compilations still see a cached program's trace and
# lowering events, which precede the cache lookup.)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache_directory = tempfile.TemporaryDirectory(prefix="fdg-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache_directory.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # a shorter minimum is slower

import jax
import pytest
from jax._src.interpreters import mlir

import fdg
from envs import registry
from fdg.costs import machine
from fdg.training import loop, summary

# Traces are millions of small, mostly live objects: garbage collection at the default frequency takes a
# seventh of the time.
gc.set_threshold(200_000, 50, 100)

# A shell's background jobs, and their child processes, ignore SIGINT by default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

fdg.host_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts the backends: a test's later --devices flag cannot change the number of devices


# This helper has no examples, and imports brax, Jumanji and JaxMARL: seconds in every worker.
collect_ignore = ["envs/foreign_envs.py"]

_KEPT_PROGRAMS = 1000  # one or two megabytes each

_START_PROCESSES = (
    *("tests/processes/", "tests/training/", "tests/commands/", "tests/language/", "tests/test_"),
    *("tests/envs/test_host", "tests/running/test_program_cache", "tests/conformance/"),
)


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="also run the tests that other tests cover")


def pytest_collection_modifyitems(config, items):
    """Deselects tests marked `whole`, in code or in `tests/whole.toml`, unless `--whole` is given."""
    families = collections.defaultdict(dict)
    for item in items:
        name, _, parameters = item.nodeid.partition("[")
        families[name][parameters.removesuffix("]")] = item
    complete_files = {item.nodeid.partition("::")[0] for item in items}
    if any("::" in word for word in config.args):
        complete_files = set()  # only some tests of these files were collected
    repeats = tomllib.loads((Path(__file__).parent / "whole.toml").read_text())
    for file, name, entry in (
        (file, name, {} if isinstance(entry, str) else entry)
        for file, tests in repeats.items()
        for name, entry in tests.items()
    ):
        found = families.get(f"{file}::{name}", {})
        if file in complete_files:
            if not found:
                raise pytest.UsageError(f"tests/whole.toml: {file} has no {name}: remove or rename the entry")
            if missing := [x for x in entry.get("only", []) + entry.get("but", []) if x not in found]:
                raise pytest.UsageError(
                    f"tests/whole.toml: {file}::{name} has no {missing}: give some of {[*found]}"
                )
        repeated = entry.get("but", found) if "only" not in entry else found.keys() - entry["only"]
        for parameters in found.keys() & repeated:
            found[parameters].add_marker(pytest.mark.whole)
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    # Modules with slow tests, which start processes, run first: at the end, one of them would keep the other
    # workers waiting.
    items.sort(key=lambda item: not item.nodeid.startswith(_START_PROCESSES))


@pytest.fixture(scope="module", autouse=True)
def _clear_programs():
    """Clears JAX's caches when many programs are live: those of all modules would fill the memory."""
    yield
    if len(jax.devices()[0].client.live_executables()) > _KEPT_PROGRAMS:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def _no_calibration():
    """Hides the calibration of the test machine, which would change the policies that `auto` chooses."""
    real = machine.path_of

    machine.path_of = lambda device_kind: real(device_kind) if "XDG_CACHE_HOME" in os.environ else None
    yield
    machine.path_of = real


@pytest.fixture(scope="module", autouse=True)
def _restore_cache_config():
    """Undoes `--program-cache`: a command that runs in this process sets it for all later tests."""
    names = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def _shared_mlir_context():
    """Reuses one MLIR context: creation takes 4 ms, and JAX creates one for each of thousands of programs."""
    make = getattr(mlir, "make_ir_context", None)  # internal to JAX: later versions may lack it
    if make is None:
        yield
        return
    shared = functools.cache(make)

    def context():
        # A program lowered during another one's lowering needs a separate context.
        return shared() if mlir.ir.Context.current is None else make()

    with mock.patch.object(mlir, "make_ir_context", context):
        yield


@pytest.fixture(scope="module", autouse=True)
def _restore_environments():
    """Unregisters the environments that a module (or a documentation page) registers."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture(scope="session", autouse=True)
def _no_extras():
    """Disables plots, which take longer than most tests' runs, and predictions, which take half as long."""
    with (
        mock.patch.object(loop, "draw_learning_curve", lambda *_, **__: None),
        mock.patch.object(summary, "predicted_seconds", lambda engine: None),
    ):
        yield


_DRAW, _PREDICT = loop.draw_learning_curve, summary.predicted_seconds


@pytest.fixture
def curves(monkeypatch) -> None:
    """Enables learning curve plots in runs of the test that requests it."""
    monkeypatch.setattr(loop, "draw_learning_curve", _DRAW)


@pytest.fixture
def predictions(monkeypatch) -> None:
    """Enables the predicted iteration time in runs of the test that requests it."""
    monkeypatch.setattr(summary, "predicted_seconds", _PREDICT)


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """Eight CPU devices, even if the default devices are accelerators."""
    return jax.devices("cpu")[:8]


@pytest.fixture
def host_devices(monkeypatch, devices) -> list[jax.Device]:
    """Patches `jax.devices` to return eight CPU devices."""
    monkeypatch.setattr(jax, "devices", lambda backend=None: devices)
    return devices
