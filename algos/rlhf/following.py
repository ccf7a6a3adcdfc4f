"""Sizes that have to divide each other: what a user did not name follows what they named."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from algos.rlhf import updates

_SIZES = ("num_prompts", "num_minibatches", "micro_batch")


class Rows(NamedTuple):
    """What the updates of an iteration are of."""

    size: int
    groups: int  # that are spread evenly over minibatches
    what: str


def fits(values: Mapping[str, Any], rows_of: Callable[[Mapping[str, Any]], Rows], drawn: int) -> bool:
    """Whether the rows of an iteration divide into minibatches, and those into micro-batches.

    Args:
      values: fields of an algorithm by name, `num_prompts`, `num_minibatches`, `micro_batch` and
        `dataset_size` among them.
      rows_of: what its updates are of.
      drawn: times as many prompts are drawn as are learned from.
    """
    (count, groups, _), number = rows_of(values), values["num_minibatches"]
    if count % number or not updates.divides(count, groups, number):
        return False
    micro, size = values["micro_batch"], values["dataset_size"]
    enough = size is None or size >= drawn * values["num_prompts"]
    return enough and (micro is None or micro >= count // number or count // number % micro == 0)


def followed(
    values: Mapping[str, Any],
    named: Collection[str],
    rows_of: Callable[[Mapping[str, Any]], Rows],
    drawn: int = 1,
) -> dict[str, int]:
    """What has to change of the sizes that were not named, so that all fit; empty where nothing does.

    The least that it takes: smaller micro-batches, which change no number; else fewer minibatches; else a few
    prompts fewer, or more. Empty too where nothing helps, for what is named does not fit together.

    Args:
      values: as for `fits`.
      named: those that stay as they are.
      rows_of, drawn: as for `fits`.

    >>> grpo = lambda v: Rows(v["num_prompts"] * v["group_size"], v["num_prompts"], "responses")
    >>> preset = {"num_prompts": 64, "num_minibatches": 4, "micro_batch": 32, "dataset_size": None}
    >>> followed({**preset, "group_size": 5}, ["group_size"], grpo)
    {'micro_batch': 20}
    >>> followed({**preset, "group_size": 8, "num_minibatches": 3}, ["num_minibatches"], grpo)
    {'num_prompts': 63, 'micro_batch': 28}
    >>> followed({**preset, "group_size": 8, "dataset_size": 50}, ["dataset_size"], grpo)
    {'num_prompts': 50, 'micro_batch': 25}
    """
    if fits(values, rows_of, drawn):
        return {}
    free = [name for name in _SIZES if name not in named]
    for number, prompts in _candidates(values, free):
        tried = {**values, "num_minibatches": number, "num_prompts": prompts}
        micro = values["micro_batch"]
        if "micro_batch" in free and micro is not None:
            size = max(1, rows_of(tried).size // number)
            if micro < size:
                tried["micro_batch"] = next(part for part in range(micro, 0, -1) if size % part == 0)
        if fits(tried, rows_of, drawn):
            return {name: tried[name] for name in _SIZES if tried[name] != values[name]}
    return {}


def _candidates(values: Mapping[str, Any], free: Collection[str]) -> Iterator[tuple[int, int]]:
    """Numbers of minibatches and of prompts, those that change least first."""
    number, prompts = values["num_minibatches"], values["num_prompts"]
    fewer = range(number - 1, 0, -1) if "num_minibatches" in free else ()
    others = (*range(prompts - 1, 0, -1), *range(prompts + 1, 2 * prompts + 1))
    others = others if "num_prompts" in free else ()
    yield number, prompts
    yield from ((less, prompts) for less in fewer)
    yield from ((number, other) for other in others)
    yield from ((less, other) for less in fewer for other in others)
