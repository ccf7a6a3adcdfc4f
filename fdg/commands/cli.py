"""`python -m fdg.train`, `python -m fdg.plan`, and what all commands share: errors become one line."""

import contextlib
import dataclasses
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fdg import ctrl_c, files
from fdg.arguments import as_flags
from fdg.commands.flags import Flag, Parser, add_flags, normalise
from fdg.errors import FdgError, FdgWarning, RunError, escape_unprintable, host_errors, one_line, shortened
from fdg.garbage import infrequent_gc
from fdg.process_exit import CLOSED_PIPE
from fdg.processes import distributed
from fdg.processes.peers import LostError
from fdg.running.program_cache import remove_corrupt_entry
from fdg.shadowing import shadowed_package, unimportable_folder

# `Command.positionals` of commands that take one run, and of those that take several.
RUN: Mapping[str, Any] = {"run": {"metavar": "RUN_DIR", "help": "a run directory"}}
RUNS: Mapping[str, Any] = {"runs": {"nargs": "+", "metavar": "RUN_DIR", "help": "run directories"}}
_SLOW_S = 5.0  # time after which a slow step prints a notice
_CAUSE_TIMEOUT_S = 5.0  # seconds to wait after a failed collective until the dead process is known


def train_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.train`: trains; returns the exit status."""

    def run(argv: Sequence[str]) -> int:
        from fdg.commands.parse import CommandLine
        from fdg.training import run_directory

        command_line = CommandLine(argv)
        command_line.join()
        if not distributed.is_first():  # only process 0 prints; gloo writes to the file descriptor directly
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        job, start = command_line.job(
            "python -m fdg.train", "Trains an algorithm on an environment, under a distribution policy."
        )
        if job.out is not None and not job.resumes and distributed.is_first():
            run_directory.check_free(job.out)  # before slow work
        from fdg.commands import preset_flags
        from fdg.training import loop  # may start JAX

        if job.described["env"] is not None and not job.resumes:
            record, algo, env_name = job.record, job.described["algo"], job.described["env"]
            name, preset, follows = record["preset_name"], record["preset"], record.get("follows")
            steps = getattr(job.algorithm, "total_steps", None)
            loop.say(preset_flags.preset_line(name, preset, algo, env_name, follows, steps))
        if job.rounding_message is not None:
            loop.say(job.rounding_message)
        for line in job.unused_setting_messages if distributed.is_first() else ():
            warnings.warn(line, FdgWarning, stacklevel=2)
        if job.optuna is not None:
            from fdg.commands.flags import flags_of
            from fdg.commands.search_flags import space_of
            from fdg.training.search import carry_out_search
            from fdg.training.sweep import unwrap_sweep

            space = space_of(job.search, flags_of(type(unwrap_sweep(job.algorithm))))
            _, _, caught = carry_out_search(job, space, start)
        else:
            caught = loop.carry_out(job, start).caught
        return 0 if caught is None else 128 + caught  # `caught` is a signal

    return guarded(run, argv)


def plan_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.plan`: prints graph and plan of a job of `fdg.train`, and runs nothing.

    The devices of `--devices` need not exist.
    """

    def run(argv: Sequence[str]) -> int:
        import fdg
        from fdg.commands import cluster, stream_simulation
        from fdg.commands.parse import CommandLine
        from fdg.costs.machine import calibration_problem, cluster_for
        from fdg.training.settling import prepare, too_small_micro_batch

        command_line = CommandLine(argv, (stream_simulation.FLAG, *cluster.FLAGS))
        lengths = stream_simulation.take_lengths(command_line.flags)
        cluster_flags = cluster.take_flags(command_line.flags)
        job, _ = command_line.job(
            "python -m fdg.plan", f"{cluster.ABOUT} {stream_simulation.ABOUT}", runs=False
        )
        if cluster_flags:
            with _notice_if_slow("tracing ..."):
                reports = cluster.report_paragraphs(job, cluster_flags)
            reports += [stream_simulation.report_of(job.algorithm, job.policy, lengths)] if lengths else []
            print(*reports, sep="\n\n", flush=True)
            return 0
        with _notice_if_slow("tracing ..."):
            settled = prepare(job, plans_only=True)
        job, devices = settled.job, settled.devices
        plan = fdg.place(settled.graph, job.policy, devices, job.agents)
        sections = [*([settled.message] if settled.message else []), settled.graph, plan]
        if hint := too_small_micro_batch(job.algorithm, plan):
            sections.append(f"hint: {hint}")
        if problem := calibration_problem("cpu" if isinstance(devices, int) else devices[0].device_kind):
            sections.append(f"calibration: {problem}")
        if lengths:
            stream_report = stream_simulation.report_of(job.algorithm, job.policy, lengths)
            sections.append(f"{stream_report}\n{stream_simulation.idle_line(plan, cluster_for(devices))}")
        if settled.devices_reason:
            sections.append(f"devices: {settled.devices_reason}")
        print(*sections, sep="\n\n", flush=True)
        return 0

    return guarded(run, argv)


@contextlib.contextmanager
def _notice_if_slow(line: str) -> Iterator[None]:
    """Prints `line` on standard error if the block takes longer than five seconds."""
    timer = threading.Timer(_SLOW_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def guarded(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command. An `FdgError` becomes one line on standard error and exit status 2.

    A failure on the host during a run becomes one line and exit status 1. If one of several processes fails,
    the others end too.
    """
    try:
        sys.path.insert(0, os.getcwd())  # for --algo module:Class
    except OSError as error:
        return _fail(f"the current folder cannot be used ({error.strerror}): change to another folder")
    ctrl_c.set_peer_notifier(lambda problem: distributed.abandon(problem, ctrl_c.STATUS, "was interrupted"))
    try:
        if problem := shadowed_package():
            return _fail(problem)
        with _one_line_warnings(), infrequent_gc(), host_errors():
            if problem := unimportable_folder():
                warnings.warn(problem, FdgWarning, stacklevel=2)
            status = _exit_status(run, sys.argv[1:] if argv is None else argv)
            print(end="", flush=True)  # so that lost output is an error
        distributed.leave()
        if status == ctrl_c.STATUS and ctrl_c.is_installed():
            ctrl_c.exit_interrupted("")
        return status
    except LostError as error:
        return _fail(str(error), error.status)
    except FdgError as error:
        return _fail(str(error), 1 if isinstance(error, RunError) else 2)
    except KeyboardInterrupt:
        distributed.abandon("interrupted", 130, "was interrupted")
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        distributed.abandon("", CLOSED_PIPE, "lost its standard output")
        return CLOSED_PIPE
    except Exception as error:
        is_xla_error = isinstance(error, jax.errors.JaxRuntimeError)
        if isinstance(error, MemoryError) or (is_xla_error and "RESOURCE_EXHAUSTED" in str(error)):
            first_line = (str(error) or "no memory").splitlines()[0]
            return _fail(f"out of memory ({first_line}): use a smaller batch, or more devices")
        if isinstance(error, OverflowError):
            return _fail(f"a number is too large ({one_line(error)}): use smaller sizes, or fewer steps")
        if isinstance(error, OSError) and error.strerror:
            where = error.filename or ("standard output" if error.errno in files.FULL else None)
            return _fail(error.strerror if where is None else f"{where}: {error.strerror}", 1)
        if is_xla_error and "MLIR failure" in str(error):
            fix = "try other sizes, or --xla-options xla_cpu_use_fusion_emitters=false"
            return _fail(f"XLA cannot compile this program ({one_line(error)}): {fix}", 1)
        if lost := distributed.lost(_CAUSE_TIMEOUT_S):
            return _fail(str(lost), lost.status)
        if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("/jax/_src/xla_bridge.py"):
            platforms = os.environ.get("JAX_PLATFORMS", "")
            fix = "set JAX_PLATFORMS=cpu for CPUs, or repair JAX's installation for the other devices"
            return _fail(f"JAX finds no devices ({one_line(error)}; JAX_PLATFORMS={platforms!r}): {fix}")
        distributed.abandon(traceback.format_exc().rstrip(), 1, f"failed: {type(error).__name__}: {error}")
        raise
    finally:
        sys.path.pop(0)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command. Called with the words after its name (None: `sys.argv[1:]`), it returns the exit status."""

    name: str  # program and command, for `--help`: "fdg pack"
    description: str  # the description for `--help`
    flags: Sequence[Flag]  # the command's flags
    # Called with the values of all flags and positional arguments by name. Returns the exit status (None: 0).
    # If it raises an `FdgError` that names an argument, the command prints the name as a flag.
    handler: Callable[[dict[str, Any]], int | None]
    # positional arguments by name, with keywords for `argparse.ArgumentParser.add_argument`
    positionals: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parses the words and runs the command."""
        return guarded(self._run, argv)

    def _run(self, argv: Sequence[str]) -> int:
        parser = Parser(prog=self.name, description=self.description, allow_abbrev=False)
        for name, keywords in self.positionals.items():
            parser.add_argument(name, **keywords)
        add_flags(parser, self.flags)
        values = parser.parse_strictly(normalise(argv))
        try:
            return self.handler({**{flag.name: flag.default for flag in self.flags}, **values}) or 0
        except FdgError as error:
            raise type(error)(as_flags(str(error), [flag.name for flag in self.flags])) from error


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Prints each warning of fdg on one line; escapes characters that the output's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("always", FdgWarning)
        default_show = warnings.showwarning

        def show_warning(message: Any, category: type[Warning], *positional: Any, **keywords: Any) -> None:
            if issubclass(category, FdgWarning):
                lines = [escape_unprintable(" ".join(line.split())) for line in str(message).splitlines()]
                print("warning:", "\n  ".join(lines), file=sys.stderr, flush=True)
            elif line := remove_corrupt_entry(str(message)):
                print("warning:", line, file=sys.stderr, flush=True)
            else:
                default_show(message, category, *positional, **keywords)

        warnings.showwarning = show_warning
        yield


def _exit_status(run: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command; returns its exit status, even if it raises SystemExit."""
    try:
        return run(argv)
    except SystemExit as exit:  # --help
        if isinstance(exit.code, str):  # Python prints a text and exits with status 1
            print(exit.code, file=sys.stderr)
            return 1
        return int(exit.code or 0)


def _fail(message: str, status: int = 2) -> int:
    """Prints an error on one line, ends the run's other processes, and returns the exit status."""
    message = shortened(" ".join(message.split()))
    distributed.abandon(f"error: {message}", status, f"failed: {message}")
    print("error:", message, file=sys.stderr)
    return status
