"""`python -m fdg.launch --num-processes N`: runs `fdg.train` as several processes on this machine."""

from fdg.commands.launch_processes import main
from fdg.process_exit import exit_with

if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
