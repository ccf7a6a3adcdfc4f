"""`python -m fdg.evaluate`: plays whole episodes with trained agents."""

from fdg.commands.using import COMMANDS
from fdg.ending import ends_with

main = COMMANDS["evaluate"]
if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
