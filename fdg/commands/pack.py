"""`fdg pack`: packs a run into a folder to share, with a card, and puts it on Hugging Face's hub."""

from pathlib import Path
from typing import Any

from fdg.commands.command import RUN, Command
from fdg.commands.flags import Flag
from fdg.running.program_cache import keep_programs

FLAGS = (
    Flag("out", str | None, None, "the folder, new or empty (None: RUN-packed, next to the run)"),
    Flag("checkpoint", str, "last", "which: last, best (of --eval-every), or an iteration"),
    Flag("episodes", int | None, None, "of each agent, for the card (None: as many as after training)"),
    Flag("push", str | None, None, "USER/NAME, a repository of Hugging Face's hub (None: nowhere)"),
    Flag("trust", bool, False, "import modules of your own that the run names"),
)
_ABOUT = (
    "Packs a run: one checkpoint, its figures, curve and video, and a card (README.md) for Hugging Face's"
    " hub. fdg.load takes the folder, and hf://USER/NAME."
)


def _pack(given: dict[str, Any]) -> None:
    from fdg.training import hub
    from fdg.training.packing import pack

    keep_programs(None)
    if given["push"] is not None:
        hub.check(given["push"])  # before anything that takes long
    out = given["out"] or f"{given['run'].rstrip('/')}-packed"
    how = {name: given[name] for name in ("checkpoint", "episodes", "trust")}
    print(pack(given["run"], out, **how))
    if given["push"] is not None:
        print(hub.upload(Path(out), given["push"]))


main = Command("fdg pack", _ABOUT, FLAGS, _pack, RUN)
