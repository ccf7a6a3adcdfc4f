"""`python -m fdg.export`: writes a trained policy for programs that know nothing of its run."""

from fdg.commands.using import COMMANDS
from fdg.ending import ends_with

main = COMMANDS["export"]
if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
