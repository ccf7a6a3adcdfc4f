"""`python -m fdg.launch --num-processes N`: `fdg.train` as several processes on this machine."""

from fdg.commands.launch import main

if __name__ == "__main__":
    raise SystemExit(main())
