"""`python -m fdg.plot`: plots a metric of runs, with intervals over seeds."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["plot"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
