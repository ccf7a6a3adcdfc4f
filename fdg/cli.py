"""The commands `python -m fdg.train` and `python -m fdg.plan`: errors become one line and an exit status."""

import os
import sys
from collections.abc import Callable, Sequence

import jax

from fdg.errors import FdgError


def train_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.train`: trains, and returns the exit status.

    Args:
      argv: the flags; those of the process if None.
    """

    def run(argv: Sequence[str]) -> int:
        from fdg import run_directory, train
        from fdg.job import parse

        job = parse(
            argv, "python -m fdg.train", "Trains an algorithm on an environment, under a distribution policy."
        )
        if job.out is not None and not job.resumes:
            run_directory.check_free(job.out)  # before anything that takes long
        return train.train(job)

    return _guarded(run, argv)


def plan_main(argv: Sequence[str] | None = None) -> int:
    """`python -m fdg.plan`: prints graph and plan for the same flags, and runs nothing.

    The devices that `--devices` counts need not exist.
    """

    def run(argv: Sequence[str]) -> int:
        import fdg
        from fdg.job import parse

        job = parse(argv, "python -m fdg.plan", "Prints the dataflow graph and the plan, and runs nothing.")
        graph = fdg.trace(job.algorithm)
        print(graph, fdg.place(graph, job.policy, job.devices, job.num_seeds), sep="\n\n", flush=True)
        return 0

    return _guarded(run, argv)


def _guarded(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command: what a user can mend is one line on standard error and exit status 2."""
    sys.path.insert(0, os.getcwd())  # for --algo module:Class, whichever way the command was started
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except FdgError as error:
        return _fail(str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(f"out of memory ({str(error).splitlines()[0]}): use fewer environments, or more devices")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as exit:  # --help
        return int(exit.code or 0)
    finally:
        sys.path.pop(0)


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2
