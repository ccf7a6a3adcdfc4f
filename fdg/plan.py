"""`python -m fdg.plan`: prints graph and plan for the same flags as `fdg.train`, and runs nothing."""

from fdg.commands.cli import plan_main as main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
