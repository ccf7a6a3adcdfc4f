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
from fdg.training.settings import changes, check_config, contradiction, flatten_config

# Entries of an earlier run's configuration that a new run does not inherit.
_NOT_INHERITED = (
    *("id", "devices_chosen", "command", "preset", "preset_name", "follows", "versions", "git_commit"),
    *("resumes", "from", "tokenizer_digest"),
)
# Entries that stop a run before its end (by evaluations or time), which `--from` does not inherit either.
_STOPPING_ENTRIES = ("eval_every", "stop_at", "stop_after")


def base_of(flags: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The configuration that a job starts from, by `--resume RUN`, `--from RUN` or `--config FILE`.

    Returns its path and content: `(Path(), {})` if the command line names no configuration.
    """
    start_run, config = flags.get("start_from"), flags.get("config")
    if flags.get("out") == "":
        raise FdgError("--out '': the value is empty: give a directory, or leave out --out")
    if "resume" in flags:
        return _resume_base(flags)
    if config is not None:
        file = Path(config) / "config.json" if os.path.isdir(config) else Path(config)
        try:
            content = read_json(file)
        except FdgError as error:
            raise FdgError(f"--config {error}: give the config.json of a run directory") from None
        stored = check_config(file, content)
    elif start_run is not None:
        file = Path(str(start_run), "config.json")
        stored = run_directory.read_config(file.parent, prefix="--from: ")
        stored = {**stored, **dict.fromkeys(_STOPPING_ENTRIES)}
    else:
        return Path(), {}
    if stored.get("rebuilds") is False:
        raise FdgError(
            f"{file} belongs to a run that was trained from Python with values that a file cannot hold: use"
            " fdg.fit"
        )
    return file, {name: value for name, value in stored.items() if name not in _NOT_INHERITED}


def _resume_base(flags: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The result of `base_of` for `--resume`."""
    out, resume = flags.get("out"), flags["resume"] or flags.get("out")
    if resume is None:
        raise FdgError("--resume needs a run directory: --resume runs/NAME")
    if out is not None and os.path.abspath(out) != os.path.abspath(resume):
        raise FdgError(f"--resume {resume} and --out {out} are two directories: leave out --out")
    if "start_from" in flags or "config" in flags:
        option = "--from" if "start_from" in flags else "--config"
        raise FdgError(
            f"--resume continues a run unchanged, but {option} starts a new run: leave out one of them"
        )
    run = Path(resume)
    stored = run_directory.read_config(run)
    if stored.get("rebuilds") is False:
        raise FdgError(
            f"--resume {run}: this run was trained from Python, with values that a file cannot hold: resume"
            f" it in Python, with fdg.fit(..., out={str(run)!r}, resume=True)"
        )
    return run / "config.json", stored


def check_agrees(flags: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Checks that flags do not contradict the resumed run."""
    conflict = contradiction(config, flags)
    if conflict is not None:
        name, stored, value = conflict
        stored_text = (
            "the run, which was trained without it" if stored is None else f"the run's {shown(stored)}"
        )
        raise FdgError(
            f"--resume: --{name.replace('_', '-')} {shown(value)} contradicts {stored_text}: leave out the"
            " flag, or start a new run"
        )


def record_of(
    program: str,
    argv: Sequence[str],
    preset: Any,
    follows: Mapping[str, Any],
    flags: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """The entries of `config.json` that are not settings.

    `program` and `argv` are the command line, and `base` the starting configuration. `follows` has settings
    derived from flags.
    """
    record: dict[str, Any] = {
        "command": shlex.join([*program.split(), *argv]),
        "preset": {} if preset is None else {name: to_json(value) for name, value in preset.values.items()},
        "preset_name": None if preset is None else preset.name,
    }
    if follows:
        record["follows"] = follows
    if flags.get("start_from") is not None:
        base_settings = flatten_config(base)
        base_flags = {name: value for name, value in flags.items() if name in base_settings}
        origin = os.path.abspath(flags["start_from"])
        record["from"] = {"run": origin, "changes": changes(base, base_flags)}
    return record
