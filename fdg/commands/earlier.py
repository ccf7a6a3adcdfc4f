"""What a command line takes from earlier runs, and what `config.json` keeps of the command line."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.commands.flags import Flag, to_json
from fdg.commands.stored import checked
from fdg.errors import FdgError
from fdg.reading import read_json
from fdg.training.loggers import MLFLOW, TENSORBOARD, WANDB
from fdg.training.run_directory import read_config

_NOT_TAKEN = (
    "id",
    "devices_chosen",
    "command",
    "preset",
    "preset_name",
    "follows",
    "versions",
    "git_commit",
    "resumes",
    "from",
)


def template_of(early: Mapping[str, Any], flags: Sequence[Flag]) -> tuple[dict[str, Any], Path]:
    """The values that a new run begins with: those of `--from RUN` or `--config FILE`; empty without either.

    Args:
      early: what the command line gives, as far as it is read.
      flags: those whose values come back as Python values.

    Returns:
      The values, and the file that they are from.

    Raises:
      FdgError: there is no such run or file, it is no configuration, or the flags do not go together.
    """
    start, file = early.get("start_from"), early.get("config")
    if "resume" in early and (start is not None or file is not None):
        other = "--from" if start is not None else "--config"
        raise FdgError(f"--resume goes on with a run as it is, and {other} starts a new one: leave one out")
    if start is None and file is None:
        return {}, Path()
    if file is not None:
        path = Path(file) / "config.json" if os.path.isdir(file) else Path(file)
        said = checked(path, _read(path), flags)
    else:
        path = Path(str(start), "config.json")
        said = checked(path, read_config(path.parent, prefix="--from: "), flags)
    if said.get("rebuilds") is False:
        raise FdgError(
            f"{path} is of a run that was trained from Python with what a file cannot say: use fdg.fit"
        )
    return {name: value for name, value in said.items() if name not in _NOT_TAKEN}, path


def record_of(
    program: str,
    argv: Sequence[str],
    preset: Mapping[str, Any],
    preset_name: str | None,
    early: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """What `config.json` keeps beside values: the command, the preset, and the run that this began from."""
    record: dict[str, Any] = {
        "command": shlex.join([*program.split(), *argv]),
        "preset": {name: to_json(value) for name, value in preset.items()},
        "preset_name": preset_name,
    }
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
    try:
        return read_json(path)
    except FdgError as error:
        raise FdgError(f"--config {error}: give the config.json of a run directory") from None
