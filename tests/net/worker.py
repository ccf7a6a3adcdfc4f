"""Runs jobs with the code that is in PYTHONPATH: one for each line of JSON that it reads, which it answers.

It is started by its path, and imports nothing of this folder: the code that is recorded may be older, and
have none of it. Of that code it uses what users do, commands and public names, so that it can record any.
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
import ml_dtypes  # noqa: F401  names bfloat16 for NumPy
import numpy as np

# What tells of time, or of where a run was, and never of numbers.
_OF_TIME = re.compile("versions|(?!predicted_s$).*(_s|_per_second)")


def run_module(name: str, words: list[str]) -> dict[str, str]:
    """Runs `python -m name words` within this process; gives what it printed and its exit status."""
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
    found["rows"]["metrics.jsonl"] = [_timeless(row) for row in rows]
    found["rows"]["summary.json"] = [_timeless(json.loads(Path("run/summary.json").read_text()))]
    return found, _checkpoint(Path("run/checkpoints"))


def plan(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import algos
    import envs
    import fdg
    import policies

    words = []
    flags = {name: given[name] for name in ("algo", "env", "policy", "devices")}
    for name, value in {**flags, **given["fields"], "num_seeds": given.get("num_seeds")}.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    ran = run_module("fdg.plan", words)
    texts = {"fdg.plan": ran["out"] + ran["err"], "exit status": ran["status"]}
    try:
        algorithm = algos.make(given["algo"], envs.make(given["env"]))
        graph = fdg.trace(algorithm)
        kind = policies.get(given["policy"])
        placed = fdg.place(graph, kind(**given["fields"]), given["devices"], given.get("num_seeds"))
        texts["graph.mermaid"], texts["plan.mermaid"] = graph.to_mermaid(), placed.to_mermaid()
        texts["graph.svg"], texts["plan.svg"] = (
            x._repr_svg_().replace("><", ">\n<") for x in (graph, placed)
        )
    except fdg.FdgError as error:
        texts["plan"] = str(error)
    try:
        choice = policies.auto(
            algorithm,
            given["devices"],
            graph=graph,
            policies=[kind],
            max_staleness=given["fields"].get("staleness", 0),
            num_seeds=given.get("num_seeds"),
            further=False,
        )
        _, table = choice.table.split(
            "\n", 1
        )  # the first line says how long it took, and how busy the machine is
        texts["prediction"] = f"{choice.seconds!r}\n{table}"
    except fdg.FdgError as error:
        texts["prediction"] = str(error)
    return {"texts": texts, "rows": {}}, {}


def messages(module: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Runs a module of tests, and notes every message that one of them reads of an error or a warning."""
    import pytest

    import fdg

    said: dict[str, list[str]] = {}
    test = [""]

    def note(text: str) -> str:
        plain = re.sub(r"0x[0-9a-f]{6,}", "0x", text).replace(os.getcwd(), ".")
        plain = re.sub(r"/tmp/\S*?pytest-\S*?/", "/tmp/", plain)
        said.setdefault(test[0], []).append(plain)
        return text

    class Notes:
        """Which test it is that reads messages, and which fail."""

        failed: ClassVar[list[str]] = []

        def pytest_runtest_setup(self, item: Any) -> None:
            test[0] = item.nodeid.partition("::")[2]

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
    texts = {name: "\n".join(dict.fromkeys(lines)) for name, lines in said.items()}
    return {"texts": {**texts, "exit status": "\n".join([str(int(status)), *Notes.failed])}, "rows": {}}, {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries of C++ print is no answer
    if int(sys.argv[1]):
        assert len(jax.devices()) == int(sys.argv[1])  # starts the backend: no job's flags change it any more
    gc.set_threshold(200_000, 50, 100)
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="fdg-net-") as folder, warnings.catch_warnings():
            os.chdir(folder)
            do = {"train": train, "plan": plan, "messages": messages}[job["kind"]]
            try:
                found, arrays = do(job["arguments"])
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
    """Keeps what was recorded of a job; the JSON file last, so that what has one is whole."""
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


def _timeless(found: Any) -> Any:
    if isinstance(found, list):
        return [_timeless(value) for value in found]
    if not isinstance(found, dict):
        return found
    return {name: _timeless(value) for name, value in found.items() if not _OF_TIME.fullmatch(name)}


def _checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, by name, as Orbax reads them without knowing what they are of."""
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
