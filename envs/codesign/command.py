"""The command `fdg codesign FILE.toml`: searches for networks and an accelerator that meet specs."""

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import envs
from envs.codesign import reading
from fdg.commands.cli import guarded
from fdg.commands.flags import Flag, Parser, add_flags, normalise
from fdg.errors import FdgError

INFEASIBLE = 3  # exit status where no design meets the specs
_ABOUT = """Searches networks and an accelerator together, so that latency, energy and area meet their specs.
FILE.toml states the problem; w1, w2 and w3 are built in. It prints the best design and the specs, and
writes report.md, best.json, designs.csv, pictures, and files for ZigZag and MAESTRO into the run directory.
Other flags of `fdg train` can be given: --algo, --policy, --devices, --seed, --out, --resume RUN (without a
FILE), ..., and the algorithm's own. Exit status 3: no design meets the specs."""
FLAGS = (  # of `fdg codesign`, besides those of `fdg train`
    Flag("samples", int | None, None, "designs to evaluate, rounded up to whole iterations (None: 5000)"),
    Flag("specs", str | None, None, "level of the file's specs: tight, medium or loose (None: [specs])"),
    *(
        Flag(key, float | None, None, "a spec in place of the one in [specs] (None: that one)")
        for key in reading.UNITS
    ),
    Flag("accuracy", str | None, None, "table, train, supernet or surrogate (None: as the file says)"),
    Flag("module", tuple[str, ...], (), "MODULE:NAME of networks of your own that the file names, to import"),
)
_PROGRAM = "fdg codesign"
# flags of `fdg train` that a search sets itself, or for which it has flags of its own
_REFUSED_FLAGS = ("env", "sweep", "optuna", "num-seeds", "eval-episodes", "total-steps")


def main(argv: Sequence[str] | None = None) -> int:
    """`fdg codesign FILE.toml [flags]`: searches, prints and writes; returns the exit status.

    Args:
      argv: the words after the command's name; None for the process's.

    Returns:
      0, or 3 if no design meets the specs, or 128 plus the number of the signal that ended the search.
    """
    return guarded(_run, argv)


def _run(argv: Sequence[str]) -> int:
    """Reads the command line, and searches; returns the exit status."""
    if "-h" in argv or "--help" in argv:
        _parser().print_help()
        return 0
    words = normalise(argv)
    file = words.pop(0) if words and not words[0].startswith("-") else None
    if words and not words[0].startswith("-"):
        raise FdgError(f"'{words[0]}' after '{file}': give one problem, and flags after it")
    options, others = _parser().parse_known_args(words)
    parameters = vars(options)
    parameters.pop("file", None)
    for word in others:
        name = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and name in _REFUSED_FLAGS:
            fix = {"env": "give the file first", "total-steps": "give --samples"}.get(name, "use fdg train")
            raise FdgError(f"--{name} is not a flag of {_PROGRAM}: {fix}")
    resumes = any(word == "--resume" or word.startswith("--resume=") for word in others)
    if file is None and not resumes:
        raise FdgError(f"name the problem first: {_PROGRAM} FILE.toml [flags], or {_PROGRAM} w1")
    samples = parameters.pop("samples", None)
    if samples is not None and samples < 1:
        raise FdgError(f"--samples {samples}: it must be at least 1")
    env = _old_env(parameters, others) if file is None else _new_env(file, parameters, "--trust" in others)
    try:
        return _search(env, samples, resumes, others)
    except FdgError as error:
        raise type(error)(_with_own_flags(str(error))) from error


def _with_own_flags(message: str) -> str:
    """A message about flags of `fdg train`, reworded for the flags of `fdg codesign`."""
    message = re.sub(r"--env codesign:[^?\s]*\?(?:\S*?&)?module=([^&\s]+)\S*", r"--module \1", message)
    return message.replace("--env codesign:", "").replace("--total-steps", "--samples")


def _search(env: list[str], samples: int | None, resumes: bool, others: list[str]) -> int:
    """Searches, prints the results and writes their files; returns the exit status.

    `env` is `--env` with its value, or empty; `others` are the flags of `fdg train`.
    """
    from fdg.commands.parse import CommandLine
    from fdg.processes import distributed

    CommandLine(others).join()
    if not distributed.is_first():  # only the first process prints
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from envs.codesign import searching  # imports algorithms, which may start JAX

    steps: list[str] = []
    if samples is not None or not resumes:
        words = [*env, *others, "--eval-episodes", "0"]
        job, _ = CommandLine(words).job(_PROGRAM, _ABOUT, runs=False)
        searching.check(job)
        steps = ["--total-steps", str(searching.total_steps_of(samples or searching.SAMPLES, job.algorithm))]
    words = [*env, *others, *steps, "--eval-episodes", "0"]
    job, start = CommandLine(words).job(_PROGRAM, _ABOUT)
    outcome = searching.run(job, start)
    if not distributed.is_first():
        return 0 if outcome.is_feasible else INFEASIBLE
    print(f"\n{outcome}\n", flush=True)
    if outcome.caught is None or math.isfinite(outcome.best.violation):
        for path in outcome.write():
            print(path)
    if outcome.caught is not None:
        print(f"interrupted: continue with {_PROGRAM} --resume {outcome.path}", file=sys.stderr)
        return 128 + outcome.caught
    return 0 if outcome.is_feasible else INFEASIBLE


def _old_env(parameters: Mapping[str, Any], others: Sequence[str]) -> list[str]:
    """`--env` of a resumed run if the command line names the modules that the run imports; else no flag."""
    if not parameters:
        return []
    from fdg.commands.parse import CommandLine
    from fdg.training.run_directory import read_config

    if parameters.keys() == {"module"}:
        env = str(read_config(Path(CommandLine(others).flags["resume"])).get("env"))
        configured = envs.parse(env)[1].get("module", ())
        if parameters["module"] == ((configured,) if isinstance(configured, str) else tuple(configured)):
            return ["--env", env]
    name, value = next(iter(parameters.items()))
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    raise FdgError(f"--{name} {text}: a resumed search keeps its settings: leave it out")


def _new_env(file: str, parameters: dict[str, Any], is_trusted: bool) -> list[str]:
    """The flags `--env codesign:FILE?PARAMETER=VALUE` of `fdg train`."""
    name, _, options = file.partition("?")
    if is_trusted and name.endswith(".toml") and (modules := reading.modules(name)):
        parameters = {**parameters, "module": modules}
    if len(modules := parameters.get("module", ())) == 1:
        parameters = {**parameters, "module": modules[0]}
    query = "&".join(filter(None, [options, *(f"{key}={value}" for key, value in parameters.items())]))
    return ["--env", f"codesign:{name}" + (f"?{query}" if query else "")]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROGRAM, usage=f"{_PROGRAM} FILE.toml [flags]", description=_ABOUT, allow_abbrev=False
    )
    add_flags(parser, FLAGS)
    return parser
