"""Makes recordings: worker processes run jobs with the code of a tree, and write two files per job."""

import contextlib
import hashlib
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from tests.net.jobs import Job

_WORKER = Path(__file__).with_name("worker.py")
_RECORDED = (
    *("fdg/**/*.py", "policies/**/*.py", "algos/**/*.py", "envs/**/*.py"),
    *("tests/mistakes/*.py", "tests/tiny.py", "tests/conftest.py"),
)
_JOBS_PER_PROCESS = 40  # then restart it: programs and traces stay in memory
_DEVICES = 4
# Shortens compilation, which takes most of the time, as in tests/conftest.py.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + (
    " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
)


class NetError(Exception):
    """A usage error, with a message of one line."""


def record(tree: Path, out: Path, jobs: Sequence[Job], processes: int, cache: Path) -> None:
    """Runs jobs with the code in `tree` and writes their results to `out`; skips recorded jobs.

    Raises:
      NetError: `out` has a recording of other code or of another machine.
    """
    about = _about(tree)
    old = read_about(out) if (out / "recording.json").exists() else None
    other = [name for name in ("code", "recorder", "machine", "jax") if (old or about)[name] != about[name]]
    if other:
        raise NetError(f"{out} holds a recording of another {other[0]}: remove it, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / "recording.json").write_text(json.dumps(about, indent=1) + "\n")
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    missing = [job for job in jobs if not _is_recorded(out, job)]
    for job in missing:
        waiting.put(job)
    print(f"{len(missing)} of {len(jobs)} jobs to record of {about['commit']} in {out}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fdg-net-") as empty:
        environment = _environment(tree, cache, Path(empty))
        done = _Counter(len(missing))
        with ThreadPoolExecutor(processes) as pool, (out / "log.txt").open("a") as log:
            futures = [pool.submit(_work, waiting, out, environment, log, done) for _ in range(processes)]
            try:
                for future in futures:
                    future.result()
            except KeyboardInterrupt:
                done.stopped.set()
                raise NetError("interrupted: the same command continues from there") from None
    if missing:
        print(f"recorded with {done.cpu_s:.0f} s of a core", flush=True)


def read_about(folder: Path) -> dict[str, Any]:
    """Metadata of a recording: commit, digest of the code, machine, versions.

    Raises:
      NetError: there is no recording.
    """
    try:
        return json.loads((folder / "recording.json").read_text())
    except (OSError, ValueError):
        raise NetError(f"{folder} holds no recording: make one with record --out {folder}") from None


def digest(tree: Path) -> str:
    """Digest of the code that a recording runs, independent of the tree's path."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in _RECORDED for path in tree.glob(pattern)}):
        found.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _about(tree: Path) -> dict[str, Any]:
    named = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return {
        "commit": named.stdout.strip() or "no commit",
        "code": digest(tree),
        "recorder": hashlib.sha256(_WORKER.read_bytes() + _XLA_FLAGS.encode()).hexdigest()[:12],
        "machine": _machine(),
        "jax": f"{version('jax')}, jaxlib {version('jaxlib')}",
        "python": platform.python_version(),
    }


def _machine() -> str:
    """Processor model, number of cores, and a digest of the CPU flags, for which XLA compiles."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = hashlib.sha256(" ".join(sorted(fields.get("flags", "").split())).encode()).hexdigest()[:8]
    model = fields.get("model name", platform.processor() or platform.machine())
    return f"{model}, {os.cpu_count()} cores, {flags}"


def _environment(tree: Path, cache: Path, empty: Path) -> dict[str, str]:
    own = {
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XDG_CACHE_HOME": str(empty),  # no calibration of this machine
        "MPLBACKEND": "agg",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return {**{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}, **own}


def _is_recorded(out: Path, job: Job) -> bool:
    path = out / f"{job.name}.json"
    if not path.exists():
        return False
    given = {"name": job.name, "kind": job.kind, "arguments": job.arguments}
    return json.loads(path.read_text())["job"] == json.loads(json.dumps(given))


class _Counter:
    """Counts finished jobs and prints progress, from several threads."""

    def __init__(self, total: int):
        self._lock, self._done, self._total, self._started = threading.Lock(), 0, total, time.monotonic()
        self.cpu_s, self.stopped = 0.0, threading.Event()

    def add(self, job: Job, seconds: float, cpu_s: float, note: str) -> None:
        with self._lock:
            self._done += 1
            self.cpu_s += cpu_s
            took = time.monotonic() - self._started
            times = f"{seconds:.1f} s, {cpu_s:.1f} of a core"
            print(f"{took:5.0f} s {self._done:3}/{self._total} {job.name}: {times}{note}", flush=True)


class _Process:
    """A worker process. With `devices` 0, for tests of messages, the job itself starts JAX."""

    def __init__(self, environment: Mapping[str, str], devices: int, log: TextIO):
        own = {}
        if devices:
            own = {
                "XLA_FLAGS": f"{_XLA_FLAGS} --xla_force_host_platform_device_count={devices}",
                "PJRT_NPROC": str(2 * devices),  # sets the size of XLA's thread pool
            }
        self.devices, self.jobs, self.cpu_s = devices, 0, 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environment, **own},
            text=True,
        )

    def record_job(self, job: Job, out: Path) -> dict[str, Any] | None:
        """Records a job; returns the worker's answer, or None if the process ended."""
        self.jobs += 1
        assert self._process.stdin is not None and self._process.stdout is not None
        given = {"name": job.name, "kind": job.kind, "arguments": job.arguments}
        try:
            self._process.stdin.write(json.dumps({**given, "to": str(out.absolute() / job.name)}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(answer) if answer else None

    def end(self) -> int:
        """Ends the worker by closing its input; returns the exit status."""
        self._process.communicate()
        return self._process.returncode


def _work(
    waiting: "queue.SimpleQueue[Job]",
    out: Path,
    environment: Mapping[str, str],
    log: TextIO,
    done: _Counter,
) -> None:
    process = None
    while not waiting.empty() and not done.stopped.is_set():
        with contextlib.suppress(queue.Empty):
            process = _record_one(waiting.get_nowait(), process, out, environment, log, done)
    if process is not None:
        process.end()


def _record_one(
    job: Job,
    process: _Process | None,
    out: Path,
    environment: Mapping[str, str],
    log: TextIO,
    done: _Counter,
) -> _Process | None:
    """Records a job in `process` if that can be reused, else in a new one; returns it for the next job."""
    devices = 0 if job.kind == "messages" else _DEVICES
    if process is not None and (process.devices != devices or process.jobs >= _JOBS_PER_PROCESS):
        process.end()
        process = None
    started, note, cpu = time.monotonic(), "", 0.0
    for _attempt in range(2):  # on a busy machine XLA may time out
        if done.stopped.is_set():
            return process
        process = process or _Process(environment, devices, log)
        if answer := process.record_job(job, out):
            note = f": {answer['error'][:200]}" if answer["error"] else ""
            process.cpu_s, cpu = answer["cpu_s"], answer["cpu_s"] - process.cpu_s
            break
        note = f": its process ended with {process.end()}"
        process = None
    done.add(job, time.monotonic() - started, cpu, note)
    return process
