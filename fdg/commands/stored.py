"""The configuration of an earlier run: read back, checked, and what a resumed run may change of it."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdg.commands.flags import Flag, from_json, shown, to_json
from fdg.errors import FdgError
from fdg.training import run_directory


def earlier_run(early: Mapping[str, Any], flags: Sequence[Flag]) -> tuple[Path | None, dict[str, Any]]:
    """The run directory that was asked for, and its configuration if it is to be resumed (else empty).

    Args:
      early: what the command line gives, as far as it is read.
      flags: those whose values stand at the top of `config.json`; they come back as Python values.

    Raises:
      FdgError: there is no such run, or its configuration is none.
    """
    out = Path(early["out"]) if early.get("out") else None
    if "out" in early and not early["out"]:
        raise FdgError("--out: give a directory")
    if "resume" not in early:
        return out, {}
    resume = Path(early["resume"]) if early["resume"] else out
    if resume is None:
        raise FdgError("--resume: say which run: --resume runs/NAME")
    if out is not None and out.absolute() != resume.absolute():
        raise FdgError(f"--resume {resume} and --out {out} are two directories: leave out --out")
    config = run_directory.read_config(resume)
    return resume, checked(resume / "config.json", config, flags)


def checked(path: Path, config: Any, flags: Sequence[Flag]) -> dict[str, Any]:
    """What a configuration's file holds, with the values of `flags` as Python has them.

    Raises:
      FdgError: it is no configuration of a run, or has a value that its flag cannot have.
    """
    run_directory.checked_config(path, config)
    if not {"algo", "policy", "policy_fields", "hyperparameters"} <= config.keys():
        raise FdgError(f"{path} is no configuration of a run: give the config.json of a run directory")
    return {**config, **values(path, config, [flag for flag in flags if flag.name in config])}


def values(path: Path, stored: Mapping[str, Any], flags: Sequence[Flag]) -> dict[str, Any]:
    """Values of flags, from JSON.

    Args:
      path: of the file, for messages.
      stored: from it, by the names of flags.
      flags: those that are wanted; each is there.

    Raises:
      FdgError: a value that its flag cannot have.
    """
    found = {}
    for flag in flags:
        value = stored[flag.name]
        try:
            # The environment of an algorithm that has its own is null.
            found[flag.name] = None if value is None and flag.name == "env" else from_json(flag, value)
        except ValueError as error:
            raise FdgError(f"{path} has {flag.name} = {value!r:.60}, which is not {error}") from None
    return found


def part(
    path: Path, name: str, stored: Mapping[str, Any], flags: Sequence[Flag], owner: str
) -> dict[str, Any]:
    """`policy_fields` or `hyperparameters`, as Python values.

    Args:
      path: of the file, for messages.
      name: of the part.
      stored: the configuration.
      flags: all that the part may hold.
      owner: the algorithm or policy that has these flags.

    Raises:
      FdgError: a value that its flag cannot have, or one of no flag.
    """
    kept = stored.get(name, {})
    strange = [key for key in kept if key not in {flag.name for flag in flags}]
    if strange:
        raise FdgError(f"{path} has {strange[0]!r:.60} in {name}, which {owner} has not")
    return values(path, kept, [flag for flag in flags if flag.name in kept])


def check_agrees(given: Mapping[str, Any], stored: Mapping[str, Any], free: Collection[str]) -> None:
    """A resumed run computes what it would have computed: only what is `free` may change.

    Raises:
      FdgError: names a flag that contradicts the run.
    """
    for name, value in given.items():
        if name in free:
            continue
        before = {**stored, **stored["hyperparameters"]}.get(name)
        if to_json(value) != to_json(before):
            option = "--" + name.replace("_", "-")
            raise FdgError(
                f"--resume: {option} {shown(value)} contradicts the run's {shown(before)}:"
                f" leave it out, or start a new run"
            )
