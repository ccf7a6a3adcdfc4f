"""`python -m fdg.plot`: compares runs."""

from fdg.commands.using import plot_main as main

if __name__ == "__main__":
    raise SystemExit(main())
