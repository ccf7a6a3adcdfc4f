"""`python -m fdg.calibrate`: measures this machine's rates for `--policy auto` and predictions."""

from fdg.commands.calibrate_machine import main
from fdg.process_exit import exit_with

if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
