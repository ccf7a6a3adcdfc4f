"""`python -m fdg.plan`: prints graph and plan for the same flags as `fdg.train`, and runs nothing."""

from fdg.commands.cli import plan_main as main
from fdg.process_exit import exit_with

if __name__ == "__main__":
    raise SystemExit(exit_with(main()))
