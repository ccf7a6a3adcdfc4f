"""`python -m fdg.export`: writes a trained policy for programs that know nothing of its run."""

from fdg.commands.using import export_main as main
from fdg.ending import ends_with

if __name__ == "__main__":
    raise SystemExit(ends_with(main()))
