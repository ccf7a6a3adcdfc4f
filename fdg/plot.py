"""`python -m fdg.plot`: compares runs."""

from fdg.commands.using import plot_main as main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
