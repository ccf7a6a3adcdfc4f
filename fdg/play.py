"""`python -m fdg.play`: films trained agents."""

from fdg.commands.using import COMMANDS
from fdg.ending import ends_with

main = COMMANDS["play"]
if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
