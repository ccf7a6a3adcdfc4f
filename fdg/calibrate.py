"""`python -m fdg.calibrate`: measures this machine's rates, which `--policy auto` and predictions go by."""

from fdg.commands.calibrate import main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
