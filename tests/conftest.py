"""Eight host devices, strict shapes, a cache of programs: set here, before JAX starts its backends."""

import collections
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from unittest import mock

# Most programs here run for milliseconds and compile for seconds. A sixth of that is enough without LLVM's
# optimisation, with the older code generator, which jaxlib 0.11 has no more (and refuses the flag), in one
# piece instead of one a core, and without the lines of Python that operations stem from. A number of devices
# given by the caller would contradict the one below.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # SciPy's threads (orthogonal starts) spin while they wait
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f),
    ]
)

# Temporary files in memory, where there is room: each checkpoint waits until the disk has its files, which is
# half of the time of tests that train.
if (
    "TMPDIR" not in os.environ
    and os.access("/dev/shm", os.W_OK)
    and shutil.disk_usage("/dev/shm").free > 2**32
):
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

# Compiling is most of what the tests do. What one has compiled, others find, also those that start processes,
# and the next run too if a directory is given. (Who listens for compilations still hears a program that is
# made again: it is traced and lowered before it is looked up.)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="fdg-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # to write less takes longer

import jax
import pytest
from jax._src.interpreters import mlir

import fdg
from envs import registry
from fdg.costs import machine

# Traces are millions of small objects, most of which live: to look through them for garbage so often is a
# seventh of the time.
gc.set_threshold(200_000, 50, 100)

# Whoever starts the tests in the background of a shell has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

fdg.host_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts the backends: from here on no --devices flag that a test gives changes the number


_KEPT_PROGRAMS = 1000  # of a megabyte or two each

_START_PROCESSES = (
    *("tests/processes/", "tests/training/", "tests/commands/", "tests/language/", "tests/test_"),
    *("tests/envs/test_host", "tests/running/test_program_cache", "tests/conformance/"),
)


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="also the tests that repeat what others have shown")


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked `whole`, there or in `tests/whole.toml`, unless asked for."""
    families = collections.defaultdict(dict)
    for item in items:
        name, _, parameters = item.nodeid.partition("[")
        families[name][parameters.removesuffix("]")] = item
    narrowed = any("::" in word for word in config.args)
    repeats = tomllib.loads((Path(__file__).parent / "whole.toml").read_text())
    for test, one in (
        (f"{file}::{test}", one) for file, tests in repeats.items() for test, one in tests.items()
    ):
        found, one = families.get(test, {}), {} if isinstance(one, str) else one
        listed = one.get("only", []) + one.get("but", [])
        if found and not narrowed and (missing := [name for name in listed if name not in found]):
            raise pytest.UsageError(f"tests/whole.toml: {test} has no {missing}: those of {[*found]}")
        for name, item in found.items():
            if name not in one["only"] if "only" in one else name in one.get("but", [name]):
                item.add_marker(pytest.mark.whole)
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    # Modules whose few tests take long, since they start processes, go first: at the end one of them would
    # have the other workers wait.
    items.sort(key=lambda item: not item.nodeid.startswith(_START_PROCESSES))


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs of all modules would fill the memory; most of them compile the same small ones."""
    yield
    if len(jax.devices()[0].client.live_executables()) > _KEPT_PROGRAMS:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def _rates_of_nobody():
    """A calibration of the machine that the tests run on would have it choose policies of its own."""
    real = machine.path_of

    def path_of(device_kind, environment=os.environ):
        return real(device_kind, environment) if "XDG_CACHE_HOME" in environment else None

    machine.path_of = path_of
    yield
    machine.path_of = real


@pytest.fixture(scope="module", autouse=True)
def _where_programs_are_kept():
    """A command that was given `--program-cache` within this process would decide it for all that follow."""
    names = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def _one_context():
    """One of MLIR takes four milliseconds to make, and JAX makes one for each of thousands of programs."""
    make = getattr(mlir, "make_ir_context", None)  # of JAX's inner parts: it may be gone in a later version
    if make is None:
        yield
        return
    shared = functools.cache(make)

    def context():
        # A program that is made while another is lowered would become a part of that one.
        return shared() if mlir.ir.Context.current is None else make()

    with mock.patch.object(mlir, "make_ir_context", context):
        yield


@pytest.fixture(scope="module", autouse=True)
def _own_environments():
    """What one module registers under a name, pages of the documents among it, no other module finds."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def curves() -> None:
    """Who asks for it has its runs draw their learning curves."""


@pytest.fixture
def predictions() -> None:
    """Who asks for it has its runs say how long an iteration was predicted to take."""


@pytest.fixture(autouse=True)
def _no_extras(request, monkeypatch):
    """The picture of a run takes longer than the run, in most tests, and its prediction half as long."""
    if "curves" not in request.fixturenames and (loop := sys.modules.get("fdg.training.loop")):
        monkeypatch.setattr(loop, "draw_learning_curve", lambda *_, **__: None)
    if "predictions" not in request.fixturenames and (summary := sys.modules.get("fdg.training.summary")):
        monkeypatch.setattr(summary, "predicted_seconds", lambda engine: None)


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """Eight CPU devices, also on a machine whose default devices are accelerators."""
    return jax.devices("cpu")[:8]


@pytest.fixture
def host_devices(monkeypatch, devices) -> list[jax.Device]:
    """Has commands find eight CPU devices, whatever the machine's default devices are."""
    monkeypatch.setattr(jax, "devices", lambda backend=None: devices)
    return devices
