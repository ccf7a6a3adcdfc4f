"""`python -m fdg.evaluate`: plays whole episodes with trained agents."""

from fdg.commands.using import COMMANDS
from fdg.process_exit import exit_with

main = COMMANDS["evaluate"]
if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
