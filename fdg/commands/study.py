"""`fdg study`: trains algorithms x environments x settings x seeds from one file, and compares them.

algorithms = ["ppo", "a2c"]      # or "all": in each environment those that can act in it, without a data set
environments = ["CartPole-v1", "Acrobot-v1"]
total_steps = 100_000            # or {short = 100_000, long = 1_000_000}: a comparison for each
seeds = 10
first_seed = 0
random_episodes = 128            # episodes of random actions, as a baseline; 0 for none

[settings]                       # flags of `fdg train` for all cells
eval_episodes = 32

[variants.default]               # further flags: each variant is a side of the comparison
[variants.wide]
hidden = [128, 128]
"""

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdg import ctrl_c, files
from fdg.commands.command import Command
from fdg.commands.flags import Flag
from fdg.errors import FdgError, RunError, UnwritableError, unknown_name
from fdg.reading import read_json, read_toml
from fdg.training.run_directory import read_summary
from fdg.training.writable import check_results

_KNOWN = (
    *("algorithms", "environments", "total_steps", "seeds", "first_seed", "random_episodes"),
    *("settings", "variants"),
)
_OURS = {  # flags that a study sets, and their entries in its file
    "algo": "algorithms",
    "env": "environments",
    "total_steps": "total_steps",
    "seed": "first_seed",
    "num_seeds": "seeds",
    "out": "--out of fdg study",
    "resume": "--out of fdg study",
    **dict.fromkeys(("sweep", "optuna", "search", "config", "from"), "fdg train, before a study"),
}
_MOST_CELLS = 100_000


@dataclasses.dataclass(frozen=True)
class StudyCell:
    """One algorithm with its settings in one environment, for one budget and all seeds."""

    algo: str  # as on the command line
    env: str
    side: str  # its name in the comparison
    budget: str  # the name of its budget; "" if there is one budget
    total_steps: int  # steps of each seed
    words: tuple[str, ...]  # further flags of `fdg train`

    @property
    def name(self) -> str:
        """The name of its run directory."""
        parts = (self.budget, self.env, self.side)
        return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts if part)

    def command(self, seeds: range) -> list[str]:
        """The flags of `fdg train` for these seeds, without `--out`."""
        words = ["--algo", self.algo, "--env", self.env, "--total-steps", str(self.total_steps)]
        return [*words, "--seed", str(seeds[0]), "--num-seeds", str(len(seeds)), *self.words]


@dataclasses.dataclass(frozen=True)
class Study:
    """The content of a study file."""

    cells: Sequence[StudyCell]  # all cells
    seeds: range  # the seeds of each cell
    random_episodes: int  # episodes of random actions in each environment; 0 for none


def read_study(path: Path) -> Study:
    """Reads a study from a TOML file."""
    content = read_toml(path, "docs/how-to/compare.md has a file to start from")
    try:
        return study_of(content)
    except FdgError as error:
        raise FdgError(f"{path}: {error}") from None


def study_of(content: Mapping[str, Any]) -> Study:
    """The study that the content of such a file describes."""
    for name in content:
        if name not in _KNOWN:
            raise unknown_name("setting of a study", name, _KNOWN)
    environments = _names(content, "environments", "CartPole-v1")
    everyone = content.get("algorithms") == "all"
    algorithms = None if everyone else _names(content, "algorithms", "ppo")
    budgets = _budgets(content)
    seeds = _whole("seeds", content.get("seeds", 1), 1)
    first = _whole("first_seed", content.get("first_seed", 0), 0)
    shared = _words("settings", content.get("settings", {}))
    variants = content.get("variants", {"": {}})
    if not isinstance(variants, dict) or not variants:
        raise FdgError("variants must be tables, such as [variants.wide] with hidden = [128, 128]")
    words = {name: (*shared, *_words(f"variants.{name}", each)) for name, each in variants.items()}
    cells = [
        StudyCell(algo, env, algo + (f" {name}" if name and len(words) > 1 else ""), budget, steps, flags)
        for budget, steps in budgets.items()
        for env in environments
        for algo in (_able(env) if algorithms is None else algorithms)
        for name, flags in words.items()
    ]
    if len(cells) > _MOST_CELLS:
        raise FdgError(f"{len(cells):,} cells are more than {_MOST_CELLS:,}: give fewer names")
    names: dict[str, StudyCell] = {}
    for cell in cells:
        if cell.name in names:
            other = names[cell.name]
            raise FdgError(
                f"{cell.side} on {cell.env} and {other.side} on {other.env} would both be in {cell.name}:"
                " name each once"
            )
        names[cell.name] = cell
    episodes = _whole("random_episodes", content.get("random_episodes", 128), 0)
    return Study(cells, range(first, first + seeds), episodes)


def _able(env: str) -> list[str]:
    """The algorithms that can act in an environment, and whose budget is in environment steps.

    Algorithms that learn from a data set take gradient steps: the file must name them, with `dataset` in
    `[settings]`.
    """
    import algos
    import envs
    from fdg.training.job import steps_of

    name, overrides = envs.parse(env)
    able = algos.able_in(envs.make(name, **overrides))
    return [algo for algo in able if steps_of(algos.get(algo)) == "environment steps"]


def _names(content: Mapping[str, Any], name: str, example: str) -> list[str]:
    given = content.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one for one in given):
        what = "is missing" if given is None else f"= {given!r:.60}"
        raise FdgError(f'{name} {what}: give a list of names, such as {name} = ["{example}"]')
    twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
    if twice is not None:
        raise FdgError(f"{name} has {twice} twice: name each once")
    return given


def _budgets(content: Mapping[str, Any]) -> dict[str, int]:
    given = content.get("total_steps")
    if given is None:
        raise FdgError("total_steps is missing: give steps of each seed, such as total_steps = 100_000")
    if not isinstance(given, dict):
        return {"": _whole("total_steps", given, 1)}
    if not given:
        raise FdgError("total_steps has no budget: give such as {short = 100_000, long = 1_000_000}")
    for name in given:
        if not re.fullmatch(r"\w+", name):
            raise FdgError(f"total_steps has a budget {name!r}: name it by letters and digits, such as short")
    return {name: _whole(f"total_steps.{name}", steps, 1) for name, steps in given.items()}


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise FdgError(f"{name} = {value!r:.60}: give a whole number, at least {least}")
    return value


def _words(where: str, settings: Any) -> tuple[str, ...]:
    """A table of settings as flags of `fdg train`."""
    if not isinstance(settings, dict):
        raise FdgError(
            f"{where} = {settings!r:.60}: it must be a table of flags, such as learning_rate = 1e-3"
        )
    words: list[str] = []
    for name, value in settings.items():
        name = name.replace("-", "_")
        if name in _OURS:
            raise FdgError(f"{where} has {name}, which is not of a cell: say it by {_OURS[name]}")
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
            value = ",".join(map(str, value))
        elif not isinstance(value, str | int | float):
            raise FdgError(
                f"{where}.{name} = {value!r:.60}: give a number, a text, true or false, or numbers"
            )
        words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)


FLAGS = (Flag("out", str | None, None, "the folder of the study (None: runs/ and the name of the file)"),)
_ABOUT = (
    "Trains each cell of a study file (algorithms x environments x variants x budgets, several seeds in one"
    " program), and writes the tables of fdg compare. The same command resumes an interrupted study."
)


def carry_out_study(study: Study, out: Path) -> int:
    """Trains the cells that are not done and writes the comparisons; returns the exit status.

    Each cell is a run directory in `out/cells`; `study.json` records the settings of each cell. A cell whose
    run fails (such as by losses that are not finite) is marked as failed, and the others continue.
    """
    _check(study, out)
    cells = files.make_folder(out / "cells")
    ctrl_c.set_resume_hint("the same command resumes it")
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
    """Checks all cells before any training; writes `study.json`."""
    check_results(out, ["study.json"], " for the study")
    begun = read_json(out / "study.json").get("cells") if (out / "study.json").exists() else {}
    if not isinstance(begun, dict):
        why = "remove it, and runs in cells/ are taken as they are"
        raise FdgError(f"{out / 'study.json'} lists no cells: {why}")
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
    files.write(out / "study.json", (json.dumps({"cells": {**begun, **content}}, indent=1) + "\n").encode())


def _differing(before: Any, now: Sequence[str]) -> str:
    """The settings of a cell that have changed since it was started."""
    words = before if isinstance(before, list) else []
    pairs = [f"{flag} {value}" for flag, value in zip(words[::2], words[1::2], strict=False)]
    new = {f"{flag} {value}" for flag, value in zip(now[::2], now[1::2], strict=False)}
    return ", ".join(pair for pair in pairs if pair not in new)[:200] or "fewer flags"


def _job(cell: StudyCell, seeds: range, path: Path) -> Any:
    """The job of a cell: a new run, or the one in its directory."""
    from fdg.commands.parse import parse

    there = (path / "config.json").exists()
    named = ["--algo", cell.algo, "--env", cell.env]  # named in the file, so its run's own names are trusted
    words = ["--resume", str(path), *named] if there else [*cell.command(seeds), "--out", str(path)]
    try:
        return parse(words, "fdg study", _ABOUT)
    except FdgError as error:
        raise type(error)(f"{cell.side} on {cell.env}: {error}") from None


def _runs(path: Path, seeds: range, job: Any = None) -> list[tuple[Path, range]]:
    """The run directories of a cell with their seeds: one, or for host environments one for each seed."""
    from envs.host import HostEnvironment
    from envs.wrappers import unwrapped

    own = getattr(getattr(job, "algorithm", None), "env", None)
    on_host = isinstance(unwrapped(own)[0], HostEnvironment)
    if not on_host and not path.with_name(f"{path.name}-seed-{seeds[0]}").exists():
        return [(path, seeds)]
    return [(path.with_name(f"{path.name}-seed-{seed}"), range(seed, seed + 1)) for seed in seeds]


def _is_done(path: Path, seeds: range) -> bool:
    return all(
        read_summary(run) is not None or (run / "failed.json").exists() for run, _ in _runs(path, seeds)
    )


def _train(cell: StudyCell, seeds: range, cells: Path) -> int | None:
    """Trains the rest of a cell; returns the signal that interrupted it, or None."""
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
            if isinstance(error, UnwritableError) or not run.is_dir():  # not the cell's fault
                raise
            files.write(run / "failed.json", json.dumps({"failed": str(error)}).encode())
            print(f"  failed: {error}", flush=True)
            continue
        if outcome.caught is not None:
            return outcome.caught
        result = "" if outcome.evaluation is None else f"{outcome.evaluation}, "
        print(f"  {result}{time.perf_counter() - begun:.0f} s", flush=True)
        jax.clear_caches()  # programs of other cells are not needed
    return None


def _random(study: Study, out: Path) -> dict[str, np.ndarray]:
    """Returns of random actions in each environment, measured once and kept in `random.json`."""
    import envs
    from fdg.training.evaluation import random_returns

    if not study.random_episodes:
        return {}
    file = out / "random.json"
    known = read_json(file) if file.exists() else {}
    for name in dict.fromkeys(cell.env for cell in study.cells):
        values = known.get(name)
        numbers = [one for one in values if isinstance(one, int | float)] if isinstance(values, list) else []
        if numbers != values or len(numbers) != study.random_episodes:
            own, overrides = envs.parse(name)
            returns = random_returns(envs.make(own, **overrides), study.random_episodes)
            known[name] = [float(one) for one in returns]
            files.write(file, (json.dumps(known) + "\n").encode())
    return {name: np.asarray(values) for name, values in known.items()}


def _compare(study: Study, budget: str, out: Path, random: dict[str, np.ndarray]) -> None:
    """Writes and prints the comparison of one budget's cells."""
    from fdg.training.comparison import compare

    runs, labels, notes = [], [], []
    for cell in (one for one in study.cells if one.budget == budget):
        for run, _ in _runs(out / "cells" / cell.name, study.seeds):
            if (run / "failed.json").exists():
                notes.append(f"{cell.side} on {cell.env}: {read_json(run / 'failed.json').get('failed')}")
            elif not (run / "metrics.jsonl").exists():
                notes.append(f"{cell.side} on {cell.env} is left out: {run} has lost its metrics.jsonl")
            if (run / "metrics.jsonl").exists():
                runs.append(run)
                labels.append(cell.side)
    if not runs:
        print("\n".join(["nothing to compare:", *notes]), flush=True)
        return
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
