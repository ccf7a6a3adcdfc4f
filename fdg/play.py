"""`python -m fdg.play`: films trained agents."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["play"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
