"""What a command line takes from earlier runs, and what `config.json` keeps of the command line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.errors import FdgError
from fdg.training.loggers import MLFLOW, TENSORBOARD, WANDB
from fdg.training.run_directory import read_config

_NOT_TAKEN = ("devices_chosen", "command", "preset", "versions", "git_commit", "resumes", "from")


def template_of(early: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a new run begins with: those of `--from RUN` or `--config FILE`; empty without either.

    Raises:
      FdgError: there is no such run or file, it is no configuration, or the flags do not go together.
    """
    start, file = early.get("start_from"), early.get("config")
    if "resume" in early and (start is not None or file is not None):
        other = "--from" if start is not None else "--config"
        raise FdgError(f"--resume goes on with a run as it is, and {other} starts a new one: leave one out")
    if start is None and file is None:
        return {}
    if file is not None:
        said, where = _read(Path(file)), f"--config {file}"
    else:
        said, where = read_config(Path(str(start)), prefix="--from: "), f"--from {start}"
    if not isinstance(said, dict) or not {"algo", "policy_fields", "hyperparameters"} <= said.keys():
        raise FdgError(f"{where} is no configuration of a run: give the config.json of a run directory")
    if said.get("rebuilds") is False:
        raise FdgError(
            f"{where} is of a run that was trained from Python with what a file cannot say: use fdg.fit"
        )
    return {name: value for name, value in said.items() if name not in _NOT_TAKEN}


def record_of(
    program: str,
    argv: Sequence[str],
    preset: Mapping[str, Any],
    early: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """What `config.json` keeps beside values: the command, the preset, and the run that this began from."""
    record: dict[str, Any] = {"command": shlex.join([*program.split(), *argv]), "preset": dict(preset)}
    if early.get("start_from") is not None:
        hyperparameters = base.get("hyperparameters", {})
        before = {**base, **hyperparameters}
        changed = {
            name: [before[name], value]
            for name, value in early.items()
            if name in before and before[name] != value
        }
        record["from"] = {"run": str(early["start_from"]), "changes": changed}
    return record


def loggers_of(run: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
    """The trackers that flags ask for, for `Job.loggers`."""
    asked = [(TENSORBOARD, None)] if run[TENSORBOARD] else []
    return (*asked, *((name, run[name]) for name in (WANDB, MLFLOW) if run[name] is not None))


def _read(path: Path) -> Any:
    if path.is_dir():
        path = path / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FdgError(f"--config {path} cannot be read: {error}") from error
