"""`python -m fdg.launch`: runs `fdg.train` in several processes, on this machine or on a Ray cluster."""

from fdg.commands.launch_processes import main
from fdg.process_exit import exit_with

if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
