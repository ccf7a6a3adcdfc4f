"""`fdg study`: trains algorithms x environments x settings x seeds from one file, and compares them."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg import ctrl_c, files
from fdg.commands.command import Command
from fdg.commands.flags import Flag
from fdg.commands.study_file import Study, StudyCell, read_study
from fdg.errors import FdgError, RunError
from fdg.reading import read_json
from fdg.training.writable import check_writable

FLAGS = (Flag("out", str | None, None, "the folder of the study (None: runs/ and the name of the file)"),)
_ABOUT = (
    "Trains each cell of a study file (algorithms x environments x variants x budgets, several seeds in one"
    " program), and writes the tables of fdg compare. The same command resumes an interrupted study."
)


def carry_out_study(study: Study, out: Path) -> int:
    """Trains the cells that are not done, and writes what came of all; returns the exit status.

    Each cell is a run directory in `out/cells`; `study.json` keeps what each was begun with. A cell that ends
    with an error of its run (losses that are not finite) is a failed one, and the others go on.

    Raises:
      FdgError: a cell cannot be trained as asked, which is found before the first is; or `out` is another
        study's.
    """
    _check(study, out)
    cells = files.make_folder(out / "cells")
    ctrl_c.going_on("the same command resumes it")
    for number, cell in enumerate(study.cells, 1):
        print(
            f"cell {number} of {len(study.cells)}: {cell.side} on {cell.env}, {cell.total_steps:,} steps",
            flush=True,
        )
        caught = _train(cell, study.seeds, cells)
        if caught is not None:
            print("interrupted, and saved: the same command resumes it", flush=True)
            return 128 + caught
    random = _random(study, out)
    for budget in dict.fromkeys(cell.budget for cell in study.cells):
        _compare(study, budget, out, random)
    return 0


def _check(study: Study, out: Path) -> None:
    """Refuses what cannot be, before anything is trained; writes `study.json`."""
    check_writable(out / "study.json")
    if (out / "config.json").exists():
        raise FdgError(f"--out {out} is a run directory: give another folder for the study")
    begun = read_json(out / "study.json")["cells"] if (out / "study.json").exists() else {}
    for cell in study.cells:
        words = cell.command(study.seeds)
        if cell.name in begun and begun[cell.name] != words:
            before = _differing(begun[cell.name], words)
            raise FdgError(
                f"--out {out} has {cell.side} on {cell.env} of another study, with {before}:"
                " give another folder"
            )
        if not _is_done(out / "cells" / cell.name, study.seeds):
            _job(cell, study.seeds, out / "cells" / cell.name)
    out.mkdir(parents=True, exist_ok=True)
    content = {cell.name: cell.command(study.seeds) for cell in study.cells}
    files.replace(out / "study.json", (json.dumps({"cells": {**begun, **content}}, indent=1) + "\n").encode())


def _differing(before: Any, now: Sequence[str]) -> str:
    """What a cell was begun with that it has no longer."""
    words = before if isinstance(before, list) else []
    pairs = [f"{flag} {value}" for flag, value in zip(words[::2], words[1::2], strict=False)]
    new = {f"{flag} {value}" for flag, value in zip(now[::2], now[1::2], strict=False)}
    return ", ".join(pair for pair in pairs if pair not in new)[:200] or "fewer flags"


def _job(cell: StudyCell, seeds: range, path: Path) -> Any:
    """The job of a cell: a new run, or that which is in its directory."""
    from fdg.commands.parse import parse

    there = (path / "config.json").exists()
    named = ["--algo", cell.algo, "--env", cell.env]  # the file names them, so its run's own are trusted
    words = ["--resume", str(path), *named] if there else [*cell.command(seeds), "--out", str(path)]
    try:
        return parse(words, "fdg study", _ABOUT)
    except FdgError as error:
        raise type(error)(f"{cell.side} on {cell.env}: {error}") from None


def _runs(path: Path, seeds: range, job: Any = None) -> list[tuple[Path, range]]:
    """Run directories of a cell with their seeds: one, or of environments on the host one for each seed."""
    from envs.host import HostEnvironment
    from envs.wrappers import unwrapped

    own = getattr(getattr(job, "algorithm", None), "env", None)
    on_host = isinstance(unwrapped(own)[0], HostEnvironment)
    if not on_host and not path.with_name(f"{path.name}-seed-{seeds[0]}").exists():
        return [(path, seeds)]
    return [(path.with_name(f"{path.name}-seed-{seed}"), range(seed, seed + 1)) for seed in seeds]


def _is_done(path: Path, seeds: range) -> bool:
    return all(
        (run / "summary.json").exists() or (run / "failed.json").exists() for run, _ in _runs(path, seeds)
    )


def _train(cell: StudyCell, seeds: range, cells: Path) -> int | None:
    """Trains what is left of a cell; returns the signal that interrupted it."""
    path = cells / cell.name
    if _is_done(path, seeds):
        print("  done before", flush=True)
        return None
    import jax

    from fdg.training.loop import carry_out

    for run, own in _runs(path, seeds, _job(cell, seeds, path)):
        if _is_done(run, own):
            continue
        begun = time.perf_counter()
        try:
            outcome = carry_out(_job(cell, own, run), quiet=True)
        except RunError as error:
            if not run.is_dir():
                raise
            files.replace(run / "failed.json", json.dumps({"failed": str(error)}).encode())
            print(f"  failed: {error}", flush=True)
            continue
        if outcome.caught is not None:
            return outcome.caught
        result = "" if outcome.evaluation is None else f"{outcome.evaluation}, "
        print(f"  {result}{time.perf_counter() - begun:.0f} s", flush=True)
        jax.clear_caches()  # programs of other cells are of no use
    return None


def _random(study: Study, out: Path) -> dict[str, np.ndarray]:
    """Returns of random actions in each environment, measured once; `random.json` keeps them."""
    import envs
    from fdg.training.random_level import random_returns

    if not study.random_episodes:
        return {}
    file = out / "random.json"
    known = read_json(file) if file.exists() else {}
    for name in dict.fromkeys(cell.env for cell in study.cells):
        if len(known.get(name, ())) != study.random_episodes:
            own, overrides = envs.parse(name)
            returns = random_returns(envs.make(own, **overrides), study.random_episodes)
            known[name] = [float(one) for one in returns]
            files.replace(file, (json.dumps(known) + "\n").encode())
    return {name: np.asarray(values) for name, values in known.items()}


def _compare(study: Study, budget: str, out: Path, random: dict[str, np.ndarray]) -> None:
    """Writes the comparison of the cells of one budget, and prints it."""
    from fdg.training.comparison import compare

    runs, labels, notes = [], [], []
    for cell in (one for one in study.cells if one.budget == budget):
        for run, _ in _runs(out / "cells" / cell.name, study.seeds):
            if (run / "failed.json").exists():
                notes.append(f"{cell.side} on {cell.env}: {read_json(run / 'failed.json')['failed']}")
            if (run / "metrics.jsonl").exists():
                runs.append(run)
                labels.append(cell.side)
    found = compare(runs, labels=labels, random=random)
    found = dataclasses.replace(found, notes=[*found.notes, *notes])
    if budget:
        print(f"budget {budget}:\n", flush=True)
    print(found, flush=True)
    for path in found.write(out / budget):
        print(path, flush=True)


def _study(given: dict[str, Any]) -> int:
    file = Path(given["file"])
    return carry_out_study(read_study(file), Path(given["out"] or Path("runs") / file.stem))


main = Command(
    "fdg study", _ABOUT, FLAGS, _study, {"file": {"metavar": "FILE", "help": "a study file, in TOML"}}
)
