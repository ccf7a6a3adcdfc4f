"""`python -m fdg.plan --lengths RUN|DISTRIBUTION`: what a stream would do with responses of such lengths."""

from pathlib import Path
from typing import Any

from algos.rlhf import streaming as sizes_of
from fdg.commands import replay
from fdg.commands.flags import Flag
from fdg.errors import FdgError
from fdg.training.run_directory import read_metrics

FLAG = Flag(
    "lengths",
    str | None,
    None,
    "tokens of responses: a run's directory, or lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST,"
    " constant:LENGTH",
)
ABOUT = f"With {FLAG.option}: which share of a stream's slots is busy, how old its tokens are. {FLAG.help}."


def take(given: dict[str, Any]) -> str | None:
    """Takes the value of this flag out of all that are given.

    Raises:
      FdgError: the lengths are none.
    """
    drawn = given.pop(FLAG.name, None)
    if drawn is not None and not Path(drawn).is_dir():
        replay.distribution(drawn)  # before anything that takes long
    return drawn


def said(algorithm: Any, policy: Any, given: str) -> str:
    """What the stream of an algorithm under a policy would do.

    Raises:
      FdgError: there is no stream, or the lengths are none.
    """
    if not hasattr(algorithm, "ahead"):
        raise FdgError(
            f"--lengths {given:.60}: {type(algorithm).__name__} generates no responses: use --algo grpo,"
            " ppo_rlhf or dpo"
        )
    folder = Path(given)
    drawn = (
        replay.of_run(list(read_metrics(folder / "metrics.jsonl")), given)
        if folder.is_dir()
        else replay.distribution(given)
    )
    sizes = sizes_of.sizes(algorithm, algorithm._candidates)
    return replay.report(drawn, sizes, getattr(policy, "staleness", 0) or 0, algorithm.max_age)
