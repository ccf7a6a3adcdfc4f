"""`python -m fdg.play`: films trained agents."""

from fdg.commands.using import play_main as main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
