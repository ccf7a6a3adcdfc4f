"""`python -m fdg.plan --lengths RUN|DISTRIBUTION`: simulates a stream for given lengths of responses."""

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
    "lengths of responses in tokens: a run directory, or lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST,"
    " constant:LENGTH",
)
ABOUT = (
    f"With {FLAG.option}: the share of a stream's slots that is busy, and the age of its tokens. {FLAG.help}."
)


def take(given: dict[str, Any]) -> str | None:
    """Removes this flag from `given` and returns its value.

    Raises:
      FdgError: the value is neither a run directory nor a distribution.
    """
    drawn = given.pop(FLAG.name, None)
    if drawn is not None and not Path(drawn).is_dir():
        replay.distribution(drawn)  # fails early, before tracing
    return drawn


def report(algorithm: Any, policy: Any, given: str) -> str:
    """A report of the simulated stream of an algorithm under a policy.

    Raises:
      FdgError: the algorithm has no stream, or the value is neither a run directory nor a distribution.
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
