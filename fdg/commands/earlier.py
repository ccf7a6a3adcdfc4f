"""The configuration that a command line starts from (`--resume`, `--from`, `--config`)."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.errors import FdgError
from fdg.kinds import shown, to_json
from fdg.reading import read_json
from fdg.training import run_directory
from fdg.training.settings import changes, contradiction, flat

# Entries of an earlier run's configuration that the new run does not inherit.
_NOT_TAKEN = (
    *("id", "devices_chosen", "command", "preset", "preset_name", "follows", "versions", "git_commit"),
    *("resumes", "from"),
)
# Not inherited by `--from`: these refer to iterations and returns of the earlier run.
_OF_EARLIER_RUN = ("eval_every", "stop_at")


def base_of(given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The configuration that a job starts from: of `--resume RUN`, `--from RUN` or `--config FILE`.

    Returns its path and content: `(Path(), {})` if the command line names no configuration.
    """
    start, config = given.get("start_from"), given.get("config")
    if given.get("out") == "":
        raise FdgError("--out: give a directory")
    if "resume" in given:
        return _resumed(given)
    if config is not None:
        file = Path(config) / "config.json" if os.path.isdir(config) else Path(config)
        try:
            content = read_json(file)
        except FdgError as error:
            raise FdgError(f"--config {error}: give the config.json of a run directory") from None
        said = run_directory.checked_config(file, content)
    elif start is not None:
        file = Path(str(start), "config.json")
        said = run_directory.read_config(file.parent, prefix="--from: ")
        said = {**said, **dict.fromkeys(_OF_EARLIER_RUN)}
    else:
        return Path(), {}
    if said.get("rebuilds") is False:
        raise FdgError(
            f"{file} is of a run that was trained from Python with values that a file cannot hold: use"
            " fdg.fit"
        )
    return file, {name: value for name, value in said.items() if name not in _NOT_TAKEN}


def _resumed(given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    out, resume = given.get("out"), given["resume"] or given.get("out")
    if resume is None:
        raise FdgError("--resume needs a run directory: --resume runs/NAME")
    if out is not None and os.path.abspath(out) != os.path.abspath(resume):
        raise FdgError(f"--resume {resume} and --out {out} are two directories: leave out --out")
    if "start_from" in given or "config" in given:
        other = "--from" if "start_from" in given else "--config"
        raise FdgError(f"--resume goes on with a run as it is, and {other} starts a new one: leave one out")
    run = Path(resume)
    said = run_directory.read_config(run)
    if said.get("rebuilds") is False:
        raise FdgError(
            f"--resume {run} was trained from Python, with values that a file cannot hold: resume there,"
            f" with fdg.fit(..., out={str(run)!r}, resume=True)"
        )
    return run / "config.json", said


def check_agrees(given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Checks that flags do not contradict the resumed run."""
    found = contradiction(config, given)
    if found is not None:
        name, before, now = found
        raise FdgError(
            f"--resume: --{name.replace('_', '-')} {shown(now)} contradicts the run's {shown(before)}:"
            f" leave it out, or start a new run"
        )


def record_of(
    program: str,
    argv: Sequence[str],
    preset: Any,
    follows: Mapping[str, Any],
    given: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """The entries of `config.json` besides settings."""
    record: dict[str, Any] = {
        "command": shlex.join([*program.split(), *argv]),
        "preset": {} if preset is None else {name: to_json(value) for name, value in preset.values.items()},
        "preset_name": None if preset is None else preset.name,
    }
    if follows:
        record["follows"] = follows
    if given.get("start_from") is not None:
        known = flat(base)
        changed = changes(base, {name: value for name, value in given.items() if name in known})
        record["from"] = {"run": str(given["start_from"]), "changes": changed}
    return record
