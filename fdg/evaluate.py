"""`python -m fdg.evaluate`: plays whole episodes with trained agents."""

from fdg.commands.using import evaluate_main as main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
