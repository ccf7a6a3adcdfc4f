"""`python -m fdg.export`: writes a trained policy for programs without fdg."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["export"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
