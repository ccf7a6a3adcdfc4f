"""`fdg collect`: makes a data set of what a trained agent does, in Minari's format."""

from typing import Any

from fdg.commands.command import RUN, Command
from fdg.commands.flags import Flag
from fdg.errors import FdgError
from fdg.running.program_cache import keep_programs

FLAGS = (
    Flag("steps", int | None, None, "environment steps, of all environments together"),
    Flag("out", str | None, None, "the folder: new, or a data set to add episodes to"),
    Flag("greedy", bool, False, "the most probable actions, in place of actions drawn as in training"),
    Flag("labels", str | None, None, "a run whose actions are written in place of those taken (DAgger)"),
    Flag("seed", int, 0, "of the episodes"),
    Flag("num_envs", int, 8, "environments stepped together"),
    Flag("agent", int, 0, "which, of several seeds"),
    Flag("checkpoint", str, "last", "which: last, best (of --eval-every), or an iteration"),
    Flag("trust", bool, False, "import modules of your own that the run names"),
)
_ABOUT = (
    "Lets a trained agent act, and writes its episodes as a data set in Minari's format. Algorithms learn"
    " from it with --dataset: fdg train --algo iql --dataset DIR."
)


def _collect(given: dict[str, Any]) -> None:
    import fdg
    from fdg.training.collecting import collect

    for name in ("steps", "out"):
        if given[name] is None:
            raise FdgError(f"--{name} is missing: fdg collect RUN --steps 100000 --out DIR")
    keep_programs(None)
    chosen, trust = given["checkpoint"], given["trust"]
    run = fdg.load(given["run"], checkpoint=int(chosen) if chosen.isdigit() else chosen, trust=trust)
    labels = None if given["labels"] is None else fdg.load(given["labels"], trust=trust)
    how = {name: given[name] for name in ("greedy", "seed", "num_envs", "agent")}
    print(collect(run, given["out"], given["steps"], labels=labels, **how))


main = Command("fdg collect", _ABOUT, FLAGS, _collect, RUN)
