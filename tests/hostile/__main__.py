"""`python -m tests.hostile --count 2000 --seed 0`: passes hostile run directories to every command.

Each directory goes through some of the commands in one worker process, under the audit hook of `driver`; each
50th also through a command in a new process. OUT/results.jsonl has one line per directory, and an interrupted
run resumes from it. Exit status 1 if a command did anything that no option allows.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile import driver

HANG = 400.0  # seconds until a process that hangs is killed


def main() -> int:
    """Starts a worker process that tries directories, restarts it after a crash, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first directory")
    parser.add_argument(
        "--processes", type=int, default=50, help="also try each N-th directory in a new process"
    )
    parser.add_argument("--each", type=int, default=2, help="random commands per directory")
    parser.add_argument("--only", default="", help="comma-separated commands (default: all)")
    parser.add_argument("--out", type=Path, default=Path("hostile-out"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    if given.worker:
        return work(given, out)
    results = out / "results.jsonl"
    end = given.first + given.count
    words = [sys.executable, "-m", "tests.hostile", "--worker", "--seed", str(given.seed), "--out", str(out)]
    words += ["--only", given.only, "--processes", str(given.processes), "--each", str(given.each)]
    while (first := _next(results, given.first)) < end:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **_settings(out)}
        more = ["--first", str(first), "--count", str(end - first)]
        status = subprocess.run([*words, *more], env=environment).returncode
        if status and (lost := _next(results, given.first)) < end:
            at = (out / "at").read_text() if (out / "at").exists() else "?"
            row = {
                "number": lost,
                "changes": at,
                "tries": {"process": {"faults": [f"lost: status {status}"]}},
            }
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return driver.report([row for row in rows if given.first <= row["number"] < end])


def commands(path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """Calls on a hostile run directory, by command; they may write only to `out` and the directory."""
    import fdg
    from fdg.commands import cli, using

    config, no_length = str(path / "config.json"), "--total-steps 32 --eval-episodes 0".split()

    def loaded() -> Any:
        fdg.load(path)
        return 0

    return {
        "load": loaded,
        "evaluate": lambda: using.COMMANDS["evaluate"](
            [str(path), "--episodes", "2", "--out", str(out / "e.jsonl")]
        ),
        "export": lambda: using.COMMANDS["export"]([str(path), "--out", str(out / "policy.jax")]),
        "play": lambda: using.COMMANDS["play"]([str(path), "--out", str(out / "v.gif"), "--max-steps", "2"]),
        "plot": lambda: using.COMMANDS["plot"]([str(path), "--out", str(out / "p.png")]),
        "diff": lambda: using.COMMANDS["diff"]([str(path), str(path), "--checkpoint", "0"]),
        "plan --config": lambda: cli.plan_main(["--config", config]),
        "train --config": lambda: cli.train_main(["--config", config, *no_length, "--out", str(out / "a")]),
        "train --from": lambda: cli.train_main(["--from", str(path), *no_length, "--out", str(out / "b")]),
        "train --resume": lambda: cli.train_main(["--resume", str(path), "--total-steps", "64"]),
    }


COMMAND_LINES = {
    "load": ["-c", "import fdg, sys; fdg.load(sys.argv[1])", "DIR"],
    "evaluate": ["-m", "fdg.evaluate", "DIR", "--out", "OUT/e.jsonl"],
    "export": ["-m", "fdg.export", "DIR", "--out", "OUT/x.jax"],
    "play": ["-m", "fdg.play", "DIR", "--out", "OUT/v.gif"],
    "plot": ["-m", "fdg.plot", "DIR", "--out", "OUT/p.png"],
    "diff": ["-m", "fdg", "diff", "DIR", "DIR", "--record", "OUT/r.npz"],
    "plan --config": ["-m", "fdg.plan", "--config", "DIR/config.json"],
    "train --config": "-m fdg.train --config DIR/config.json --total-steps 32 --out OUT/a".split(),
    "train --from": "-m fdg.train --from DIR --total-steps 32 --out OUT/b".split(),
    "train --resume": "-m fdg.train --resume DIR --total-steps 64".split(),
}


COMPILING = (
    "evaluate",
    "play",
    "diff",
    "train --config",
    "train --from",
    "train --resume",
)  # slow, so drawn less often


def in_process(command: str, path: Path, out: Path, mark: Path, folder: Path) -> dict[str, Any]:
    """Runs a command in a new process, in a folder with the modules that hostile files name."""
    words = [word.replace("DIR", str(path)).replace("OUT", str(out)) for word in COMMAND_LINES[command]]
    root = str(Path(__file__).parents[2])
    faults: list[str] = []
    try:
        ran = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": root},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANG,
        )
    except subprocess.TimeoutExpired:
        return {"faults": [f"took longer than {HANG:g} s"]}
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    if ran.returncode not in (0, 1, 2):
        faults.append(f"status {ran.returncode}")
    if any(line.startswith("Traceback") for line in lines) and (
        command != "load" or "FdgError" not in lines[-1]
    ):
        faults.append(f"traceback: {lines[-1]:.200}")
    if mark.exists():
        faults.append(f"the mark was made: {mark.read_text()}")
        mark.unlink()
    return {"faults": faults, "status": ran.returncode, "said": (lines or [""])[-1][:300]}


def work(given: argparse.Namespace, out: Path) -> int:
    """Tries directories one by one, and writes a line per directory to `results.jsonl`."""
    import faulthandler
    import importlib.util

    import jax

    import fdg
    from tests.hostile import directories

    fdg.host_devices(2)
    jax.devices()  # starts the backends: no file can change the number of devices
    for package in (
        "matplotlib.pyplot",
        "orbax.checkpoint",
        "gymnasium",
        "optuna",
    ):  # a time limit must not interrupt these imports
        importlib.util.find_spec(package.partition(".")[0]) and importlib.import_module(package)
    runs = directories.train_all(out / "runs")
    for number in range(given.first, given.first + given.count):
        folder = driver.scratch()
        try:
            mark = folder / "mark"
            here = folder / "here"
            here.mkdir()
            directories.plant(here, mark)
            os.chdir(here)
            sys.path.insert(0, str(here))
            path, changes = directories.hostile(runs, folder, number, given.seed, mark)
            (out / "at").write_text(json.dumps(changes))
            faulthandler.dump_traceback_later(HANG, exit=True)
            kept = shutil.copytree(path, folder / "kept")
            tries: dict[str, Any] = {}
            names = [name for name in given.only.split(",") if name] or list(COMMAND_LINES)
            draw = random.Random(number)
            often = [name for name in names for _ in range(1 if name in COMPILING else 3)]
            while len(tries) < min(given.each, len(names)):
                command = draw.choice(often)
                if command in tries:
                    continue
                write = folder / "out"
                shutil.rmtree(write, ignore_errors=True)
                write.mkdir()
                faulthandler.dump_traceback_later(HANG, exit=True)
                call = commands(path, write)[command]
                size = driver.files_size(path)
                found = driver.attempt(call, [write, path], memory=driver.MEMORY + 20 * size)
                if mark.exists():
                    found.faults.append(f"the mark was made: {mark.read_text()}")
                    mark.unlink()
                tries[command] = {**vars(found), "said": found.said[:300]}
                if command.startswith("train --resume"):
                    shutil.rmtree(path)
                    shutil.copytree(kept, path)
            if given.processes and number % given.processes == 0:
                command = random.Random(number).choice(list(COMMAND_LINES))
                tries["process"] = in_process(command, path, write, mark, here)
            faulthandler.cancel_dump_traceback_later()
            with (out / "results.jsonl").open("a") as file:
                file.write(
                    json.dumps({"number": number, "changes": changes, "tries": tries}, default=str) + "\n"
                )
        finally:
            os.chdir(out)
            sys.path.remove(str(here))
            shutil.rmtree(folder, ignore_errors=True)
        if number % 25 == 24:
            jax.clear_caches()
    return 0


def _next(results: Path, first: int) -> int:
    """The number of the next directory."""
    lines = results.read_text().splitlines() if results.exists() else []
    return max([first, *(json.loads(line)["number"] + 1 for line in lines)])


def _settings(out: Path) -> dict[str, str]:
    """Environment variables: cache folders, where writes are allowed, and settings for fast compilation."""
    names = {"JAX_COMPILATION_CACHE_DIR": "xla", "XDG_CACHE_HOME": "cache", "MPLCONFIGDIR": "mpl"}
    caches = {name: os.environ.get(name) or str(out / folder) for name, folder in names.items()}
    quick = "--xla_backend_optimization_level=0"  # programs run for milliseconds but compile for seconds
    return {
        **caches,
        "MPLBACKEND": "agg",
        "XLA_FLAGS": quick,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


if __name__ == "__main__":
    raise SystemExit(main())
