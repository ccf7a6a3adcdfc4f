"""The commands `python -m fdg.train` and `python -m fdg.plan`: errors become one line and an exit status."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

import jax

from fdg.errors import FdgError, HostError, host_error
from fdg.processes import distributed
from fdg.processes.peers import LostError

_CAUSE_SECONDS = 5.0  # a collective fails a moment before the process that broke it is known


def train_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.train`: trains, and returns the exit status.

    Args:
      argv: the flags; those of the process if None.
    """

    def run(argv: Sequence[str]) -> int:
        from fdg.commands.parse import join, parse
        from fdg.training import run_directory

        join(argv)
        if not distributed.is_first():  # here, not in Python alone: gloo prints as well
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        job = parse(
            argv, "python -m fdg.train", "Trains an algorithm on an environment, under a distribution policy."
        )
        if job.out is not None and not job.resumes and distributed.is_first():
            run_directory.check_free(job.out)  # before anything that takes long
        from fdg.training import loop  # knows algorithms, whose import may start JAX: `parse` goes first

        return loop.train(job)

    return guarded(run, argv)


def plan_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.plan`: prints graph and plan for the same flags, and runs nothing.

    The devices that `--devices` counts need not exist.
    """

    def run(argv: Sequence[str]) -> int:
        import fdg
        from fdg.commands.parse import parse
        from fdg.training.devices import devices_of

        job = parse(argv, "python -m fdg.plan", "Prints the dataflow graph and the plan, and runs nothing.")
        graph = fdg.trace(job.algorithm)
        devices, choice = (job.devices, None) if job.devices is not None else devices_of(job, graph)
        said = [graph, fdg.place(graph, job.policy, devices, job.num_seeds)]
        print(*said, *([f"devices: {choice.reason}"] if choice else []), sep="\n\n", flush=True)
        return 0

    return guarded(run, argv)


def guarded(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command: what a user can mend is one line on standard error and exit status 2.

    So is what fails on the host in the middle of a run, with status 1. Where there are several processes,
    one that fails takes the others along.
    """
    sys.path.insert(0, os.getcwd())  # for --algo module:Class, whichever way the command was started
    try:
        status = _status(run, sys.argv[1:] if argv is None else argv)
        distributed.leave()
        return status
    except LostError as error:
        return _fail(str(error), error.status)
    except FdgError as error:
        return _fail(str(error), 1 if isinstance(error, HostError) else 2)
    except KeyboardInterrupt:
        distributed.abandon("interrupted", 130, "was interrupted")
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        distributed.abandon("", 141, "lost its standard output")
        return 141
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            first = str(error).splitlines()[0]
            return _fail(f"out of memory ({first}): use fewer environments, or more devices")
        if isinstance(error, jax.errors.JaxRuntimeError) and (cause := host_error(error)):
            return _fail(str(cause), 1)
        if lost := distributed.lost(_CAUSE_SECONDS):
            return _fail(str(lost), lost.status)
        distributed.abandon(traceback.format_exc().rstrip(), 1, f"failed: {type(error).__name__}: {error}")
        raise
    finally:
        sys.path.pop(0)


def _status(run: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return run(argv)
    except SystemExit as exit:  # --help
        return int(exit.code or 0)


def _fail(message: str, status: int = 2) -> int:
    message = " ".join(message.split())
    distributed.abandon(f"error: {message}", status, f"failed: {message}")
    print("error:", message, file=sys.stderr)
    return status
