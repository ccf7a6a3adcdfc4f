"""`python -m fdg.plan --lengths RUN|DISTRIBUTION`: what a stream would do with responses of such lengths."""

from collections.abc import Sequence
from pathlib import Path

from algos.rlhf import streaming as sizes_of
from fdg.commands.flags import Flag, Parser, add_flag
from fdg.costs import streaming
from fdg.errors import FdgError
from fdg.training.job import Job
from fdg.training.run_directory import read_metrics

FLAG = Flag(
    "lengths",
    str | None,
    None,
    "tokens of responses: a run's directory, or lognormal:MEAN,LONGEST, uniform:SHORTEST,LONGEST,"
    " constant:LENGTH",
)
ABOUT = f"With {FLAG.option}: which share of a stream's slots is busy, how old its tokens are. {FLAG.help}."


def take(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """This flag, and the words that are left.

    Raises:
      FdgError: the lengths are none.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    add_flag(parser, FLAG)
    known, rest = parser.parse_known_args(words)
    given = vars(known).get("lengths")
    if given is not None and not Path(given).is_dir():
        streaming.distribution(given)  # before anything that takes long
    return given, rest


def said(job: Job, given: str) -> str:
    """What the job's stream would do.

    Raises:
      FdgError: there is no stream, or the lengths are none.
    """
    algorithm = job.algorithm
    if not hasattr(algorithm, "ahead"):
        raise FdgError(
            f"--lengths {given:.60}: {type(algorithm).__name__} generates no responses: use --algo grpo,"
            " ppo_rlhf or dpo"
        )
    folder = Path(given)
    drawn = (
        streaming.of_run(list(read_metrics(folder / "metrics.jsonl")), given)
        if folder.is_dir()
        else streaming.distribution(given)
    )
    sizes = sizes_of.sizes(algorithm, algorithm._candidates)
    return streaming.report(drawn, sizes, getattr(job.policy, "staleness", 0) or 0, algorithm.max_age)
