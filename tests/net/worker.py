"""Worker process: runs jobs with the code in PYTHONPATH. Reads one job per line of JSON and answers each.

It is started by its path and imports nothing from tests.net, which the recorded commit may not have. It only
uses commands and public names of fdg, so that it can record older commits.
"""

import contextlib
import functools
import gc
import io
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 in NumPy
import numpy as np

# Keys of times and versions, which are not recorded.
_TIMES = re.compile("versions|(?!predicted_s$).*(_s|_per_second)")


def run_module(name: str, words: list[str]) -> dict[str, str]:
    """Runs `python -m name words` in this process; returns its output and exit status."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = [name, *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = int(error.code or 0)
    finally:
        sys.argv = before
    return {"out": out.getvalue(), "err": err.getvalue(), "status": str(status)}


def train(lines: list[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    found: dict[str, Any] = {"texts": {}, "rows": {}}
    for number, line in enumerate(lines):
        ran = run_module("fdg.train", shlex.split(line))
        found["texts"][f"exit status {number}"] = ran["status"]
        if ran["status"] != "0":
            found["texts"]["error"] = ran["err"] or "no error"
            return found, {}
    rows = [json.loads(row) for row in Path("run/metrics.jsonl").read_text().splitlines()]
    found["rows"]["metrics.jsonl"] = [_without_times(row) for row in rows]
    found["rows"]["summary.json"] = [_without_times(json.loads(Path("run/summary.json").read_text()))]
    return found, _checkpoint(Path("run/checkpoints"))


def plan(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import algos
    import envs
    import fdg
    import policies

    words = []
    flags = {name: request[name] for name in ("algo", "env", "policy", "devices")}
    for name, value in {**flags, **request["fields"], "num_seeds": request.get("num_seeds")}.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    ran = run_module("fdg.plan", words)
    texts = {"fdg.plan": ran["out"] + ran["err"], "exit status": ran["status"]}
    try:
        algorithm = algos.make(request["algo"], envs.make(request["env"]))
        graph = fdg.trace(algorithm)
        kind = policies.get(request["policy"])
        placed = fdg.place(graph, kind(**request["fields"]), request["devices"], request.get("num_seeds"))
        texts["graph.mermaid"], texts["plan.mermaid"] = graph.to_mermaid(), placed.to_mermaid()
        texts["graph.svg"], texts["plan.svg"] = (
            x._repr_svg_().replace("><", ">\n<") for x in (graph, placed)
        )
    except fdg.FdgError as error:
        texts["plan"] = str(error)
    try:
        choice = policies.auto(
            algorithm,
            request["devices"],
            graph=graph,
            policies=[kind],
            max_staleness=request["fields"].get("staleness", 0),
            num_seeds=request.get("num_seeds"),
            further=False,
        )
        # The first line has the time it took and the load of the machine.
        _, table = choice.table.split("\n", 1)
        texts["prediction"] = f"{choice.seconds!r}\n{table}"
    except fdg.FdgError as error:
        texts["prediction"] = str(error)
    return {"texts": texts, "rows": {}}, {}


def messages(module: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Runs a test module and records each message of an FdgError or FdgWarning that a test reads."""
    import pytest

    import fdg

    messages_by_test: dict[str, list[str]] = {}
    current_test = [""]

    def note(text: str) -> str:
        plain = re.sub(r"0x[0-9a-f]{6,}", "0x", text).replace(os.getcwd(), ".")
        plain = re.sub(r"/tmp/\S*?pytest-\S*?/", "/tmp/", plain)
        messages_by_test.setdefault(current_test[0], []).append(plain)
        return text

    class Notes:
        """Tracks the running test, and collects failed ones."""

        failed: ClassVar[list[str]] = []

        def pytest_runtest_setup(self, item: Any) -> None:
            current_test[0] = item.nodeid.partition("::")[2]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.failed.append(report.nodeid.partition("::")[2])

    path = Path(fdg.__file__).parents[1] / (module.replace(".", "/") + ".py")
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(out))
        for kind in (fdg.FdgError, fdg.FdgWarning):
            noting = functools.partialmethod(lambda error, say: note(say(error)), kind.__str__)
            stack.enter_context(mock.patch.object(kind, "__str__", noting))
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--whole", str(path)]
        status = pytest.main(words, plugins=[Notes()])
    print(out.getvalue(), file=sys.stderr, flush=True)
    texts = {name: "\n".join(dict.fromkeys(lines)) for name, lines in messages_by_test.items()}
    return {"texts": {**texts, "exit status": "\n".join([str(int(status)), *Notes.failed])}, "rows": {}}, {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # C++ libraries print to stdout: keep it out of the answers
    if int(sys.argv[1]):
        assert len(jax.devices()) == int(sys.argv[1])  # starts the backend before a job's flags can change it
    gc.set_threshold(200_000, 50, 100)
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="fdg-net-") as folder, warnings.catch_warnings():
            os.chdir(folder)
            run_job = {"train": train, "plan": plan, "messages": messages}[job["kind"]]
            try:
                found, arrays = run_job(job["arguments"])
            except Exception as error:
                found, arrays = {"texts": {"error": f"{type(error).__name__}: {error}"}, "rows": {}}, {}
            os.chdir("/")
        write(Path(job["to"]), {"job": {k: job[k] for k in ("name", "kind", "arguments")}, **found}, arrays)
        jax.clear_caches()
        gc.collect()
        error = found["texts"].get("error", "").strip().splitlines()
        answers.write(json.dumps({"error": error[-1] if error else "", "cpu_s": time.process_time()}) + "\n")
        answers.flush()


def write(to: Path, found: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes the results of a job; the JSON file last, so that a job with one is complete."""
    found["dtypes"] = {name: str(array.dtype) for name, array in arrays.items()}
    if arrays:
        bits = {
            name: array if array.dtype.kind in "biufc" else array.view(f"u{array.itemsize}")
            for name, array in arrays.items()
        }
        np.savez_compressed(f"{to}.npz", **bits)
    temporary = Path(f"{to}.writing")
    temporary.write_text(json.dumps(found, indent=1))
    temporary.rename(f"{to}.json")


def _without_times(found: Any) -> Any:
    if isinstance(found, list):
        return [_without_times(value) for value in found]
    if not isinstance(found, dict):
        return found
    return {name: _without_times(value) for name, value in found.items() if not _TIMES.fullmatch(name)}


def _checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, by name, restored by Orbax without the state's structure."""
    import orbax.checkpoint

    newest = max(
        (path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)
    )
    metadata = next(newest.rglob("_METADATA"))
    state = orbax.checkpoint.PyTreeCheckpointer().restore(metadata.parent.absolute())
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").strip("/"): np.asarray(x) for path, x in leaves
    }


if __name__ == "__main__":
    main()
