"""`python -m fdg.train`: trains an algorithm into a run directory."""

from fdg.commands.cli import train_main as main
from fdg.process_exit import exit_with

if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
