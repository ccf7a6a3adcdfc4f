"""`fdg study`: trains algorithms x environments x settings x seeds from one file, and compares them.

algorithms = ["ppo", "a2c"]      # or "all": all that can act in the environment without a data set
environments = ["CartPole-v1", "Acrobot-v1"]
total_steps = 100_000            # or {short = 100_000, long = 1_000_000}: one comparison per budget
seeds = 10
first_seed = 0
random_episodes = 128            # episodes of random actions as a baseline; 0: no baseline

[settings]                       # flags of `fdg train` for all cells
eval_episodes = 32

[variants.default]               # further flags; each variant is compared
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
from fdg.aliases import ours
from fdg.commands.cli import Command
from fdg.commands.flags import Flag
from fdg.errors import FdgError, RunError, UnwritableError, unknown_name
from fdg.kinds import matches
from fdg.reading import read_json, read_toml
from fdg.training.run_directory import read_summary

_SETTINGS = tuple(  # the keys of a study file
    "algorithms environments total_steps seeds first_seed random_episodes settings variants".split()
)
_SET_BY_STUDY = {  # flags that a study sets itself, and what to write instead
    "algo": "algorithms",
    "env": "environments",
    "total_steps": "total_steps",
    "seed": "first_seed",
    "num_seeds": "seeds",
    "out": "--out of fdg study",
    "resume": "--out of fdg study",
    **dict.fromkeys(("help", "h", "show_preset"), "fdg train --help"),
    **dict.fromkeys(("sweep", "optuna", "search", "config", "from"), "fdg train instead of a study"),
}
_MAX_CELLS = 100_000


@dataclasses.dataclass(frozen=True)
class StudyCell:
    """One algorithm with its settings in one environment, with one budget and all seeds."""

    algo: str  # the name on the command line
    env: str
    side: str  # the label in the comparison
    budget: str  # the name of its budget; "" if there is one budget
    total_steps: int  # steps per seed
    words: tuple[str, ...]  # further flags of `fdg train`

    @property
    def name(self) -> str:
        """The name of its run directory."""
        parts = (self.budget, self.env, self.side)
        return "-".join(re.sub(r"[^\w.]+", "_", part).strip("_") for part in parts if part)

    def command(self, seeds: range) -> list[str]:
        """The flags of `fdg train` for these seeds, without `--out`."""
        words = ["--algo", self.algo, "--env", self.env, "--total-steps", str(self.total_steps)]
        several = ["--num-seeds", str(len(seeds))] if len(seeds) > 1 else []
        return [*words, "--seed", str(seeds[0]), *several, *self.words]


@dataclasses.dataclass(frozen=True)
class Study:
    """The content of a study file."""

    cells: Sequence[StudyCell]  # all cells
    seeds: range  # the seeds of each cell
    random_episodes: int  # episodes of random actions per environment; 0: no baseline


def read_study(path: Path) -> Study:
    """Reads a study from a TOML file."""
    content = read_toml(path, "docs/how-to/compare.md has a file to start from")
    try:
        return study_of(content)
    except FdgError as error:
        raise FdgError(f"{path}: {error}") from None


def study_of(content: Mapping[str, Any]) -> Study:
    """The study that the content of a study file describes."""
    for name in content:
        if name not in _SETTINGS:
            raise unknown_name("setting of a study", name, _SETTINGS)
    environments = _name_list(content, "environments", "CartPole-v1")
    is_all = content.get("algorithms") == "all"
    algorithms = None if is_all else _name_list(content, "algorithms", "ppo")
    budgets = _read_budgets(content)
    seeds = _whole_number("seeds", content.get("seeds", 1), 1)
    first_seed = _whole_number("first_seed", content.get("first_seed", 0), 0)
    shared = _flag_words("settings", content.get("settings", {}))
    variants = content.get("variants", {"": {}})
    if not isinstance(variants, dict) or not variants:
        raise FdgError("variants must be tables, such as [variants.wide] with hidden = [128, 128]")
    words = {name: (*shared, *_flag_words(f"variants.{name}", table)) for name, table in variants.items()}
    cells = [
        StudyCell(algo, env, f"{algo} {name}".strip(), budget, steps, flags)
        for budget, steps in budgets.items()
        for env in environments
        for algo in (_usable_algorithms(env) if algorithms is None else algorithms)
        for name, flags in words.items()
    ]
    if len(cells) > _MAX_CELLS:
        raise FdgError(
            f"the study has {len(cells):,} cells (budgets x environments x algorithms x variants), more than"
            f" {_MAX_CELLS:,}: list fewer of them"
        )
    cells_by_name: dict[str, StudyCell] = {}
    for cell in cells:
        if cell.name in cells_by_name:
            other = cells_by_name[cell.name]
            raise FdgError(
                f"{cell.side} on {cell.env} and {other.side} on {other.env} would both be in {cell.name}:"
                " rename one of them"
            )
        cells_by_name[cell.name] = cell
    episodes = _whole_number("random_episodes", content.get("random_episodes", 128), 0)
    return Study(cells, range(first_seed, first_seed + seeds), episodes)


def _usable_algorithms(env: str) -> list[str]:
    """The algorithms that can act in an environment, and whose budget is in environment steps.

    Algorithms that learn from a data set take gradient steps: the study file must name them, with
    `dataset` in `[settings]`.
    """
    import algos
    import envs
    from fdg.training.job import steps_unit

    name, overrides = envs.parse(env)
    names = algos.able_in(envs.make(name, **overrides))
    return [algo for algo in names if steps_unit(algos.get(algo)) == "environment steps"]


def _name_list(content: Mapping[str, Any], name: str, example: str) -> list[str]:
    names = content.get(name)
    if not isinstance(names, list) or not names or not all(isinstance(item, str) and item for item in names):
        problem = "is missing" if names is None else f"= {names!r:.60}"
        raise FdgError(f'{name} {problem}: give a list of names, such as {name} = ["{example}"]')
    duplicate = next((item for i, item in enumerate(names) if item in names[:i]), None)
    if duplicate is not None:
        raise FdgError(f"{name} contains {duplicate} twice: name it once")
    return names


def _read_budgets(content: Mapping[str, Any]) -> dict[str, int]:
    budgets = content.get("total_steps")
    if budgets is None:
        raise FdgError("total_steps is missing: give the steps per seed, such as total_steps = 100_000")
    if not isinstance(budgets, dict):
        return {"": _whole_number("total_steps", budgets, 1)}
    if not budgets:
        raise FdgError("total_steps has no budget: give budgets such as {short = 100_000, long = 1_000_000}")
    for name in budgets:
        if not re.fullmatch(r"\w+", name):
            raise FdgError(
                f"total_steps has a budget {name!r}: use letters and digits for the name, such as short"
            )
    return {name: _whole_number(f"total_steps.{name}", steps, 1) for name, steps in budgets.items()}


def _whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise FdgError(f"{name} = {value!r:.60}: give a whole number of at least {least}")
    return value


def _flag_words(where: str, settings: Any) -> tuple[str, ...]:
    """A table of settings as flags of `fdg train`."""
    if not isinstance(settings, dict):
        raise FdgError(
            f"{where} = {settings!r:.60}: it must be a table of flags, such as learning_rate = 1e-3"
        )
    words: list[str] = []
    spellings: dict[str, str] = {}
    for written, value in settings.items():
        name = written.replace("-", "_")
        if (first := spellings.setdefault(name, written)) != written:
            raise FdgError(f"{where} has {first} and {written}, which are one setting: leave out one of them")
        if fix := _SET_BY_STUDY.get(ours(name) or name):
            raise FdgError(f"{where} has {name}, which is not a setting of a cell: use {fix}")
        if isinstance(value, bool):
            value = str(value).lower()
        elif value and matches(value, list[int | float]):
            value = ",".join(map(str, value))
        elif not isinstance(value, str | int | float):
            raise FdgError(
                f"{where}.{name} = {value!r:.60}: give a number, a text, true or false, or a list of numbers"
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

    Each cell is a run directory in `out/cells`, and `study.json` records the settings of each cell. A cell
    whose run fails (for example because losses are not finite) is marked as failed, and the others continue.
    """
    _check_cells(study, out)
    cells = files.make_folder(out / "cells")
    ctrl_c.set_resume_hint("the same command resumes it")
    for index, cell in enumerate(study.cells, 1):
        print(
            f"cell {index} of {len(study.cells)}: {cell.side} on {cell.env}, {cell.total_steps:,} steps",
            flush=True,
        )
        signal = _train(cell, study.seeds, cells)
        if signal is not None:
            print("interrupted, and saved: the same command resumes it", flush=True)
            return 128 + signal
    random_returns = _random_returns(study, out)
    for budget in dict.fromkeys(cell.budget for cell in study.cells):
        _write_comparison(study, budget, out, random_returns)
    return 0


def _check_cells(study: Study, out: Path) -> None:
    """Checks all cells before any training; writes `study.json`."""
    files.check_results(out, ["study.json"], " for the study")
    recorded = read_json(out / "study.json").get("cells") if (out / "study.json").exists() else {}
    if not isinstance(recorded, dict):
        fix = "remove it; runs in cells/ are then not checked against the study"
        raise FdgError(f"{out / 'study.json'} lists no cells: {fix}")
    content = {cell.name: cell.command(study.seeds) for cell in study.cells}
    for cell in study.cells:
        words = content[cell.name]
        earlier_names = [name for name in recorded if name not in content and recorded[name] == words]
        if cell.name not in recorded and earlier_names:  # its variant has another name now
            _rename(out / "cells", earlier_names[0], cell.name, study.seeds)
            recorded[cell.name] = recorded.pop(earlier_names[0])
        if recorded.get(cell.name, words) != words:
            difference = _changed_settings(recorded[cell.name], words)
            raise FdgError(
                f"--out {out} has {cell.side} on {cell.env} from another study, with {difference}:"
                " give another folder"
            )
        if not _is_done(out / "cells" / cell.name, study.seeds):
            _make_job(cell, study.seeds, out / "cells" / cell.name)
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "study.json", (json.dumps({"cells": recorded | content}, indent=1) + "\n").encode())


def _rename(cells: Path, old: str, new: str, seeds: range) -> None:
    """Renames the run directories of a cell; `old` is from a file, and must be a plain name."""
    for suffix in ("", *(f"-seed-{seed}" for seed in seeds)):
        path = cells / f"{new}{suffix}"
        if re.fullmatch(r"\.*\w[\w.-]*", old) and (cells / f"{old}{suffix}").is_dir() and not path.exists():
            (cells / f"{old}{suffix}").rename(path)


def _changed_settings(recorded: Any, current: Sequence[str]) -> str:
    """The recorded settings of a cell that differ from the current ones."""
    words = recorded if isinstance(recorded, list) else []
    pairs = [f"{flag} {value}" for flag, value in zip(words[::2], words[1::2], strict=False)]
    current_pairs = {f"{flag} {value}" for flag, value in zip(current[::2], current[1::2], strict=False)}
    return ", ".join(pair for pair in pairs if pair not in current_pairs)[:200] or "fewer flags"


def _make_job(cell: StudyCell, seeds: range, path: Path) -> tuple[Any, Any]:
    """The job that starts a cell's run, or resumes the run in `path`; see `CommandLine.job`."""
    from fdg.commands.parse import CommandLine

    words = [*cell.command(seeds), "--out", str(path)]
    if (path / "config.json").exists():  # the study file names algorithm and environment: they are trusted
        words = ["--resume", str(path), "--algo", cell.algo, "--env", cell.env]
    try:
        return CommandLine(words).job("fdg study", _ABOUT)
    except FdgError as error:
        raise type(error)(f"{cell.side} on {cell.env}: {error}") from None


def _run_paths(path: Path, seeds: range, env: Any = None) -> list[tuple[Path, range]]:
    """A cell's run directories and their seeds: one for all seeds; with a host environment, one per seed."""
    from envs.host import HostEnvironment
    from envs.wrappers import unwrapped

    on_host = isinstance(unwrapped(env)[0], HostEnvironment)
    if not on_host and not path.with_name(f"{path.name}-seed-{seeds[0]}").exists():
        return [(path, seeds)]
    return [(path.with_name(f"{path.name}-seed-{seed}"), range(seed, seed + 1)) for seed in seeds]


def _is_done(path: Path, seeds: range) -> bool:
    """Whether all runs of a cell have ended or failed."""
    return all(
        read_summary(run) is not None or (run / "failed.json").exists() for run, _ in _run_paths(path, seeds)
    )


def _train(cell: StudyCell, seeds: range, cells: Path) -> int | None:
    """Trains the remaining runs of a cell; returns the signal that interrupted it, or None."""
    path = cells / cell.name
    if _is_done(path, seeds):
        failed = [run for run, _ in _run_paths(path, seeds) if (run / "failed.json").exists()]
        print(f"  failed before: remove {failed[0]} to try again" if failed else "  already done", flush=True)
        return None
    import jax

    from fdg.training.loop import carry_out

    job, _ = _make_job(cell, seeds, path)
    env = getattr(job.algorithm, "env", None)
    for run, run_seeds in _run_paths(path, seeds, env):
        if _is_done(run, run_seeds):
            continue
        start_time = time.perf_counter()
        try:
            job, start = _make_job(cell, run_seeds, run)
            outcome = carry_out(job, start, quiet=True)
        except FdgError as error:
            if isinstance(error, UnwritableError) or isinstance(error.__cause__, OSError):
                raise  # the same error would stop every other cell
            if isinstance(error, RunError) and run.is_dir():  # other errors are found again before training
                files.write(run / "failed.json", json.dumps({"failed": str(error)}).encode())
            print(f"  failed: {error}", flush=True)
            continue
        if outcome.caught is not None:
            return outcome.caught
        result = "" if outcome.evaluation is None else f"{outcome.evaluation}, "
        print(f"  {result}{time.perf_counter() - start_time:.0f} s", flush=True)
        jax.clear_caches()  # programs of other cells are not needed
    return None


def _random_returns(study: Study, out: Path) -> dict[str, np.ndarray]:
    """Returns of random actions by environment, measured once and stored in `random.json`."""
    import envs
    from fdg.training.evaluation import random_returns

    if not study.random_episodes:
        return {}
    file = out / "random.json"
    returns_by_env = read_json(file) if file.exists() else {}
    for name in dict.fromkeys(cell.env for cell in study.cells):
        returns = returns_by_env.get(name, [])
        if not matches(returns, list[float]) or len(returns) != study.random_episodes:
            env_name, overrides = envs.parse(name)
            returns = random_returns(envs.make(env_name, **overrides), study.random_episodes)
            returns_by_env[name] = [float(number) for number in returns]
            files.write(file, (json.dumps(returns_by_env) + "\n").encode())
    return {name: np.asarray(values) for name, values in returns_by_env.items()}


def _write_comparison(study: Study, budget: str, out: Path, random_returns: dict[str, np.ndarray]) -> None:
    """Writes and prints the comparison of one budget's cells."""
    from fdg.training.comparison import compare

    runs, labels, notes = [], [], []
    for cell in (cell for cell in study.cells if cell.budget == budget):
        for run, _ in _run_paths(out / "cells" / cell.name, study.seeds):
            has_metrics = (run / "metrics.jsonl").exists()
            if has_metrics:
                runs.append(run)
                labels.append(cell.side)
            if (run / "failed.json").exists():
                notes.append(f"{cell.side} on {cell.env}: {read_json(run / 'failed.json').get('failed')}")
            elif not has_metrics:
                notes.append(f"{cell.side} on {cell.env} is left out: {run} lacks metrics.jsonl")
    if not runs:
        print("\n".join(["nothing to compare:", *notes]), flush=True)
        return
    comparison = compare(runs, labels=labels, random=random_returns)
    comparison = dataclasses.replace(comparison, notes=[*comparison.notes, *notes])
    paths = comparison.write(out / budget)
    print(*([f"budget {budget}:\n"] if budget else []), comparison, *paths, sep="\n", flush=True)


def _study(flags: dict[str, Any]) -> int:
    file = Path(flags["file"])
    return carry_out_study(read_study(file), Path(flags["out"] or Path("runs") / file.stem))


main = Command(
    "fdg study", _ABOUT, FLAGS, _study, {"file": {"metavar": "FILE", "help": "a study file, in TOML"}}
)
