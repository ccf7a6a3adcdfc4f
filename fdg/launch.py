"""`python -m fdg.launch --num-processes N`: `fdg.train` as several processes on this machine."""

from fdg.commands.launch import main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
