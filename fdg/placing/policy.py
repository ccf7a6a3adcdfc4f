"""The interface of distribution policies: values that map roles to groups of devices."""

import dataclasses
import importlib
import inspect
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fdg import aliases
from fdg.arguments import check_fields, check_takes, explain_frozen, quoted
from fdg.errors import FdgError, PlanError
from fdg.placing.layout import BATCH, MODEL

DECLARED = "declared"  # use the sharding rules that the algorithm declares for its network

# A regular expression for paths of leaves of the state, and how matching leaves are split. A string ("batch",
# "model", "batch+model") splits the largest divisible dimension over these mesh axes. A tuple names the mesh
# axes of each dimension, as a `PartitionSpec` does (None: not split).
Rule: TypeAlias = tuple[str, str | tuple[Any, ...]]
Rules: TypeAlias = tuple[Rule, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that run the same fragments and split the batch.

    They form a mesh with the axes `batch` and `model`. The batch is split over `batch`; sharding rules split
    parameters over either axis or both. A row of the mesh has one part of the batch. Here, three rows have
    two devices each, and devices 0 and 1 form the first row:

    >>> Group("learners", (0, 1, 2, 3, 4, 5), model=2).mesh
    (('batch', 3), ('model', 2))

    Attributes:
      name: the policy's name for the group ("workers", "learners").
      devices: positions in the engine's list of devices.
      exact: True if the user set this number of devices, which then must divide the batch.
      model: the size of the mesh's `model` axis.
      parameters: sharding rules for leaves of the state (`parameter_rules`); `DECLARED` for the algorithm's
        rules.
      whole_along_batch: True if parameters are replicated over `batch`, so that only the `model` part of each
        rule applies; for devices that generate text.
      apart: True if this group must not be merged with groups on the same devices, because its parameters
        have another layout.
      optional: True if the devices may stay idle when the algorithm has no fragment for this group; False if
        that is an error.
    """

    name: str
    devices: tuple[int, ...]
    exact: bool = False
    model: int = dataclasses.field(default=1, repr=False)
    parameters: Rules | str = dataclasses.field(default=(), repr=False)
    whole_along_batch: bool = dataclasses.field(default=False, repr=False)
    apart: bool = dataclasses.field(default=False, repr=False)
    optional: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, "name", "devices", "exact", "model", "whole_along_batch", "apart", "optional")
        if self.model < 1:
            raise PlanError(f"Group(model={self.model}): give an integer of at least 1")
        rules = parameter_rules(self.parameters)
        if self.whole_along_batch and not isinstance(rules, str):
            rules = without_batch_axis(rules)
        object.__setattr__(self, "parameters", rules)

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def num_batch_parts(self) -> int:
        """The number of parts into which a batch is split; also the size of the mesh's `batch` axis."""
        return len(self.devices) // self.model

    @property
    def rows(self) -> int:
        """The old name of `num_batch_parts`."""
        warnings.warn("Group.rows is deprecated: write num_batch_parts", DeprecationWarning, 2)
        return self.num_batch_parts

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The name and size of each mesh axis; only the batch axis if no parameters are sharded."""
        if self.model == 1 and not self.parameters:
            return ((BATCH, len(self.devices)),)
        return (BATCH, self.num_batch_parts), (MODEL, self.model)

    @property
    def shards(self) -> bool:
        """Whether the group splits parameters, not only the batch."""
        return len(self.devices) > 1 and bool(self.parameters)


explain_frozen(Group, "group")


def parameter_rules(parameters: Any) -> Rules | str:
    """Checks sharding rules for parameters, and converts them to tuples, which are hashable.

    Args:
      parameters: pairs of a regular expression and a sharding, as a sequence or a dict; "fsdp" to split every
        leaf over "batch"; "declared"; None for no rules. A sharding is a `PartitionSpec`, a tuple with the
        mesh axes of each dimension, mesh axes for the largest divisible dimension ("batch", "model",
        "batch+model"), or None for replicated.

    >>> parameter_rules({"kernel": PartitionSpec(None, "model"), "bias": None})
    (('kernel', (None, 'model')), ('bias', ()))
    >>> parameter_rules("fsdp")
    (('.*', 'batch'),)
    """
    if parameters is None:
        return ()
    if isinstance(parameters, str):
        if parameters == DECLARED:
            return DECLARED
        if parameters == "fsdp":
            return ((".*", BATCH),)
        raise PlanError(f"parameters={quoted(parameters)}: give rules, 'fsdp' or '{DECLARED}'")
    if not isinstance(parameters, Iterable) or hasattr(parameters, "dtype"):
        raise PlanError(
            f"parameters={quoted(parameters)}: give 'fsdp', or a PartitionSpec by regular expression"
        )
    rules = []
    for rule in parameters.items() if isinstance(parameters, Mapping) else parameters:
        if not (isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2):
            raise PlanError(
                f"parameters: {quoted(rule)} is not a pair of a regular expression and a sharding"
            )
        pattern, spec = rule
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise PlanError(f"parameters: {quoted(pattern)} is not a regular expression: {error}") from None
        rules.append((pattern, _checked_sharding(pattern, spec)))
    return tuple(rules)


def without_batch_axis(rules: Rules) -> Rules:
    """The rules without the axis `batch`: leaves are split over `model` only.

    >>> without_batch_axis((("a", "batch+model"), ("b", ("batch", "model")), ("c", "batch")))
    (('a', 'model'), ('b', (None, 'model')), ('c', ()))
    """

    def model_axes(entry: Any) -> Any:
        names = [name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != BATCH]
        return None if not names else names[0] if len(names) == 1 else tuple(names)

    def sharding_without_batch(spec: Any) -> Any:
        if isinstance(spec, str):
            return "+".join(name for name in spec.split("+") if name != BATCH) or ()
        return tuple(map(model_axes, spec))

    return tuple((pattern, sharding_without_batch(spec)) for pattern, spec in rules)


def _checked_sharding(pattern: str, spec: Any) -> str | tuple[Any, ...]:
    """Checks a rule's sharding, and converts it to a hashable value."""
    if spec is None:
        return ()
    if not isinstance(spec, str | tuple | list | PartitionSpec):
        raise PlanError(
            f"parameters: rule '{pattern}' has the sharding {quoted(spec)}: give '{BATCH}', '{MODEL}', or a"
            " PartitionSpec"
        )
    entries = spec if isinstance(spec, str) else tuple(tuple(e) if isinstance(e, list) else e for e in spec)
    names: list[Any] = []
    for entry in spec.split("+") if isinstance(spec, str) else entries:
        names += entry if isinstance(entry, tuple) else [] if entry is None else [entry]
    unknown = next((name for name in names if name not in (BATCH, MODEL)), None)
    if unknown is not None:
        raise PlanError(
            f"parameters: rule '{pattern}' splits over {str(unknown)!r}: a group's mesh has the axes"
            f" '{BATCH}' and '{MODEL}'"
        )
    if len(set(names)) < len(names):
        raise PlanError(f"parameters: rule '{pattern}' names an axis twice, {spec!r}: name it once")
    return entries


class Policy(Protocol):
    """A distribution policy: a frozen, hashable dataclass.

    It may have one of two further fields, `staleness` or `lag`: the age of the actors' parameters in
    iterations or in micro-batches (`policies.parameters.Lags`). A class attribute `uses_host = True` requests
    the host's CPU in addition to accelerators (`with_host`).
    """

    def place(self, devices: Sequence[str]) -> Mapping[str, Group]:
        """The group of each role; fragments of other roles are placed with their inputs' producers.

        Args:
          devices: the platform of each device, such as "cpu" or "gpu".

        Raises:
          PlanError: the policy does not fit these devices.
        """


def check_policy(policy: Any) -> None:
    """Raises `PlanError` unless a value is a policy."""
    if isinstance(policy, type):
        raise PlanError(
            f"{policy.__name__} is a class, but a policy is an instance: write {policy.__name__}()"
        )
    if inspect.ismodule(policy):
        raise PlanError(
            f"{policy.__name__} is a module, not a policy: use a value such as policies.GPUOnly()"
        )
    if reason := aliases.not_a_policy(policy):
        raise PlanError(f"policy {reason} (a policy says which devices each fragment runs on)")
    if isinstance(policy, str):
        try:
            importlib.import_module("fdg.policies").get(policy)
        except FdgError as error:  # no policy has this name
            raise PlanError(str(error)) from None
        raise PlanError(f"{policy!r} is the name of a policy, not a policy: write policies.get({policy!r})()")
    if not callable(getattr(policy, "place", None)):
        by_name = (
            f"; name other arguments, as in total_steps={policy}" if isinstance(policy, int | float) else ""
        )
        if callable(getattr(policy, "iterate", None)):
            raise PlanError(f"{quoted(policy)} is an algorithm, not a policy: exchange the two arguments")
        raise PlanError(
            f"{quoted(policy)} is not a policy: use a value such as policies.GPUOnly(), which has"
            f" place(devices){by_name}"
        )
    check_takes(policy.place, ("devices",), f"{type(policy).__name__}.place")
    # Only fields of fdg's policies are checked: annotations in a user's policy may be imprecise. A float as a
    # number of devices, staleness or lag passes here; a later check rejects it and suggests numbers.
    if dataclasses.is_dataclass(policy) and type(policy).__module__.split(".")[0] == "policies":
        fields = dataclasses.fields(policy)
        counts = {f.name for f in fields if f.metadata.get("devices")} | {"staleness", "lag"}
        checked = [
            f.name for f in fields if not (f.name in counts and isinstance(getattr(policy, f.name), float))
        ]
        try:
            check_fields(policy, *checked)
        except FdgError as error:
            raise PlanError(str(error)) from None


def checked_devices(devices: Any) -> list[Any]:
    """Checks and returns a list of distinct devices; a number `n` means the first `n` of `jax.devices()`.

    Any object with an attribute `platform` counts as a device, because planning needs nothing else.
    """
    if isinstance(devices, int | np.integer) and not isinstance(devices, bool):
        available = jax.devices()
        if devices < 1:
            raise PlanError(f"devices={devices}: give a number from 1 to {len(available)}")
        if devices > len(available):
            raise PlanError(
                f"devices={devices}: there are {len(available)}: to have more on a CPU, call"
                f" fdg.host_devices({devices}) before JAX starts"
            )
        return available[:devices]
    if isinstance(devices, str | bytes | os.PathLike) or not np.iterable(devices):
        extension = isinstance(devices, str | os.PathLike) and os.path.splitext(devices)[1]
        fix = "; a cluster file is for fdg plan --cluster FILE" if extension else ""
        raise PlanError(
            f"devices={quoted(devices)}: give a number (8) or a list of devices, such as jax.devices(){fix}"
        )
    device_list = list(devices)
    positions: dict[int, int] = {}  # by the identity of the device
    for position, device in enumerate(device_list):
        if not isinstance(getattr(device, "platform", None), str):  # of an array, `platform` is a method
            raise PlanError(
                f"devices[{position}] is {quoted(device)}, which is not a device: give a list such as"
                " jax.devices()[:2]"
            )
        if (earlier := positions.setdefault(id(device), position)) != position:
            raise PlanError(
                f"devices contains {device} twice, at {earlier} and {position}: list each device once"
            )
    return device_list


def with_host(policy: Policy, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Puts the host's CPU before the accelerators if the policy uses it and there is only one process.

    With several processes, each would add its own CPU.
    """
    has_accelerators = bool(devices) and devices[0].platform != "cpu"
    if not (getattr(policy, "uses_host", False) and has_accelerators and jax.process_count() == 1):
        return list(devices)
    return [*jax.local_devices(backend="cpu")[:1], *devices]
