"""`python -m fdg.launching.tied MODULE WORDS`: a module that ends with whoever started it, however that ends.

Standard input is a pipe that nobody writes to. The operating system closes it when the process at its other
end is gone, be it killed; then this one is killed too, for nobody would see what it says or stop it.
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Runs the module as `python -m` would."""
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # Ray's processes block it, and their children
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_watch, args=(pipe,), daemon=True, name="tied").start()
    module = sys.argv[1]
    sys.argv[1:2] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
