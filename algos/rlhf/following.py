"""Adjusts sizes that the user did not name, so that sizes divide each other."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from algos.rlhf import updates

_SIZES = ("num_prompts", "num_minibatches", "micro_batch")


class Rows(NamedTuple):
    """The rows of an iteration's updates."""

    size: int
    groups: int  # that are spread evenly over minibatches
    what: str


def fits(values: Mapping[str, Any], rows_of: Callable[[Mapping[str, Any]], Rows], drawn: int) -> bool:
    """Whether an iteration's rows divide into minibatches, and those into micro-batches.

    Args:
      values: an algorithm's fields by name: `num_prompts`, `num_minibatches`, `micro_batch`, `dataset_size`
        and others.
      rows_of: the rows of its updates.
      drawn: ratio of sampled to learned prompts.
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
    """The smallest changes of unnamed sizes so that all divide; empty if none are needed.

    Prefers smaller micro-batches, which change no number, then fewer minibatches, then slightly fewer or more
    prompts. Empty too if nothing helps, because named sizes do not fit together.

    Args:
      values: as for `fits`.
      named: fields that must not change.
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
    """Numbers of minibatches and of prompts, the smallest changes first."""
    number, prompts = values["num_minibatches"], values["num_prompts"]
    fewer = range(number - 1, 0, -1) if "num_minibatches" in free else ()
    others = (*range(prompts - 1, 0, -1), *range(prompts + 1, 2 * prompts + 1))
    others = others if "num_prompts" in free else ()
    yield number, prompts
    yield from ((less, prompts) for less in fewer)
    yield from ((number, other) for other in others)
    yield from ((less, other) for less in fewer for other in others)
