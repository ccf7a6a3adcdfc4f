"""`python -m fdg.play`: films trained agents."""

from fdg.commands.using import play_main as main

if __name__ == "__main__":
    raise SystemExit(main())
