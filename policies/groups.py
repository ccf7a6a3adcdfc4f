"""Divides devices into the groups of a policy."""

from collections.abc import Sequence
from typing import Any

from fdg.errors import PlanError
from fdg.placing.policy import Group


def accelerators_and_hosts(devices: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of the accelerators and of the CPUs; if all are CPUs, these and none.

    >>> accelerators_and_hosts(["cpu", "gpu", "gpu"])
    ([1, 2], [0])
    >>> accelerators_and_hosts(["cpu", "cpu"])
    ([0, 1], [])
    """
    hosts = [i for i, platform in enumerate(devices) if platform == "cpu"]
    if len(hosts) == len(devices):
        return hosts, []
    return [i for i, platform in enumerate(devices) if platform != "cpu"], hosts


def divide(policy: Any, devices: Sequence[str], **wanted: int | None) -> list[Group]:
    """One group of the given size for each keyword, in order; None takes the remaining devices.

    CPUs among accelerators come first: the first group holds the environments. A single device is shared by
    all groups.

    Raises:
      PlanError: an empty group, or more devices than there are.

    >>> divide("P", ["cpu"] * 4, actors=None, learners=1)
    [Group(name='actors', devices=(0, 1, 2), exact=False), Group(name='learners', devices=(3,), exact=True)]
    """
    for name, number in wanted.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise PlanError(f"{policy}: {name}={number!r}: at least one device is needed")
    count = len(devices)
    if count == 1:
        return [Group(name, (0,)) for name in wanted]
    fixed = sum(number or 0 for number in wanted.values())
    open_ended = sum(number is None for number in wanted.values())
    if fixed + open_ended > count:
        parts = " + ".join(f"{number or 1} {name}" for name, number in wanted.items())
        raise PlanError(
            f"{policy} needs {parts} = {fixed + open_ended} devices, and there are {count}:"
            f" give it more devices, or fewer of these"
        )
    accelerators, hosts = accelerators_and_hosts(devices)
    order = [*hosts, *accelerators]
    groups = []
    for name, number in wanted.items():
        size = count - fixed if number is None else number
        groups.append(Group(name, tuple(order[:size]), exact=number is not None))
        order = order[size:]
    return groups
