"""`python -m fdg.plot`: compares runs."""

from fdg.commands.using import COMMANDS
from fdg.ending import ends_with

main = COMMANDS["plot"]
if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
