"""`python -m fdg.export`: writes a trained policy for programs that know nothing of its run."""

from fdg.commands.using import export_main as main

if __name__ == "__main__":
    raise SystemExit(main())
