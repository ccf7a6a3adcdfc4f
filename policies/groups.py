"""Divides devices into the groups of a policy. `devices` are their platforms, such as "cpu" or "gpu"."""

from collections.abc import Sequence
from typing import Any

from fdg.arguments import quoted
from fdg.errors import PlanError
from fdg.placing.policy import Group


def accelerators_and_hosts(devices: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of the accelerators and of the CPUs; CPUs count as accelerators if there are no others.

    >>> accelerators_and_hosts(["cpu", "gpu", "gpu"])
    ([1, 2], [0])
    >>> accelerators_and_hosts(["cpu", "cpu"])
    ([0, 1], [])
    """
    hosts = [i for i, platform in enumerate(devices) if platform == "cpu"]
    if len(hosts) == len(devices):
        return hosts, []
    return [i for i, platform in enumerate(devices) if platform != "cpu"], hosts


def divide(policy: Any, devices: Sequence[str], **sizes: int | None) -> list[Group]:
    """One group for each keyword argument, with that number of devices; None, for at most one: all others.

    Groups take devices in order. If there are accelerators, the CPUs come first, because the first group
    holds the environments. A single device is shared by all groups.

    Raises:
      PlanError: a number of devices is not an integer of at least 1, or the groups need more devices than
        there are (and there are several).

    >>> divide("P", ["cpu"] * 4, actors=None, learners=1)
    [Group(name='actors', devices=(0, 1, 2), exact=False), Group(name='learners', devices=(3,), exact=True)]
    """
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise PlanError(f"{policy}: {name}={quoted(size)}: give a whole number of at least 1")
    count = len(devices)
    if count == 1:
        return [Group(name, (0,)) for name in sizes]
    num_fixed = sum(size or 0 for size in sizes.values())
    num_without_size = sum(size is None for size in sizes.values())
    if num_fixed + num_without_size > count:
        text = " + ".join(f"{size or 1} {name}" for name, size in sizes.items())
        raise PlanError(
            f"{policy} needs {text} = {num_fixed + num_without_size} devices, but there are {count}: use more"
            " devices, or smaller groups"
        )
    accelerators, hosts = accelerators_and_hosts(devices)
    order = [*hosts, *accelerators]
    groups = []
    for name, size in sizes.items():
        length = count - num_fixed if size is None else size
        groups.append(Group(name, tuple(order[:length]), exact=size is not None))
        order = order[length:]
    return groups
