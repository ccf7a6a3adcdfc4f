"""Fields that policies share: sharding of parameters, and staleness in micro-batches."""

import dataclasses
from typing import Any

from fdg.arguments import check_call, checked_names, quoted
from fdg.errors import PlanError
from fdg.kinds import dataclass_fields, make_fields_python
from fdg.placing.policy import DECLARED, Group, Rules, parameter_rules


@checked_names
def fsdp(axis: str = "batch") -> Rules:
    """Splits every leaf over the devices of a mesh axis, along its largest divisible dimension.

    Fully sharded data parallelism (Rajbhandari et al., arXiv 1910.02054).

    Args:
      axis: the mesh axes: "batch", "model" or "batch+model".

    >>> fsdp()
    (('.*', 'batch'),)
    """
    rules = parameter_rules([(".*", axis)])
    assert not isinstance(rules, str)
    return rules


def group_size(default: int | None, text: str) -> Any:
    """A field of a policy for the number of devices of a group; `text` is its help."""
    return dataclasses.field(default=default, metadata={"devices": True, "help": text})


def device_count(default: int | None, text: str, least: int | None = None, **options: Any) -> Any:
    """Like `group_size`, for any other number of devices; `ShardsParameters` checks it against `least`."""
    return dataclasses.field(default=default, metadata={"help": text, "least": least}, **options)


@dataclasses.dataclass(frozen=True, repr=False)
class ShardsParameters:
    """The fields of a policy that can shard the parameters of one of its groups.

    Attributes:
      model_parallel: number of devices that hold the same part of the batch (size of the mesh axis `model`).
      parameters: rules on the paths of leaves; or "fsdp"; or "declared" for the rules of the algorithm's
        network, which is the default if `model_parallel` is more than 1.
    """

    model_parallel: int = device_count(
        1, "devices that share a part of the batch and split parameters", least=1, kw_only=True
    )
    parameters: Any = dataclasses.field(
        default=None,
        kw_only=True,
        metadata={"help": "fsdp or declared: how parameters are split; None: whole", "flag": str | None},
    )

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Raises an error for unknown fields, and if a subclass lacks an annotation or the decorator."""
        dataclass_fields(cls)
        if args or fields:  # `copy` and `pickle` call without arguments
            check_call(cls, args, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        make_fields_python(self)
        for field in dataclasses.fields(self):
            if (least := field.metadata.get("least")) is None:
                continue
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < least:
                fix = "give a whole number of at least 1" if least else "give a number of devices, 0 for none"
                raise PlanError(f"{type(self).__name__}: {field.name}={quoted(size)}: {fix}")
        if not isinstance(self.parameters, str | None):
            object.__setattr__(self, "parameters", parameter_rules(self.parameters))
        # raises an error here, not when the plan is made, if a string is neither "fsdp" nor "declared"
        parameter_rules(self.parameters)

    def __repr__(self) -> str:
        """The `repr` of a dataclass, without keyword-only fields that have their defaults."""
        fields = sorted(dataclasses.fields(self), key=lambda field: bool(field.kw_only))
        values = [(f, getattr(self, f.name)) for f in fields if f.repr]
        text = ", ".join(f"{f.name}={x!r}" for f, x in values if not (f.kw_only and x == f.default))
        return f"{type(self).__qualname__}({text})"

    def with_sharding(self, group: Group) -> Group:
        """The group, with the size of its mesh axis `model` and its sharding rules from these fields."""
        rules = self.parameters
        if rules is None:
            rules = DECLARED if self.model_parallel > 1 else ()
        return dataclasses.replace(group, model=self.model_parallel, parameters=parameter_rules(rules))


@dataclasses.dataclass(frozen=True, repr=False)
class Lags(ShardsParameters):
    """The field of a policy whose actors may use parameters that are some micro-batches old.

    Attributes:
      lag: the staleness in micro-batches. If an iteration has `M` micro-batches, `lag=k*M` equals
        `staleness=k`: micro-batch `n` of a run uses the parameters after `(n - lag) // M` updates, or the
        initial ones. `M` is the length of the scan that calls the actors; without such a scan, only
        `staleness` is possible. Set only one of the two.
    """

    lag: int = dataclasses.field(
        default=0,
        kw_only=True,
        metadata={"help": "staleness in micro-batches"},
    )


def generation_group(group: Group, name: str, width: int) -> Group:
    """A group for generation on the same devices, with parameters split over groups of `width` devices.

    Devices are reordered so that each device's training shard lies within its generation shard, and shards
    that are merged are neighbours (Sheng et al., arXiv 2409.19256, section 5.3).

    Args:
      name: name of the new group.
      width: number of devices over which parameters are split in generation.

    >>> generation_group(Group("all", tuple(range(8)), model=4), "generation", 2).devices
    (0, 2, 1, 3, 4, 6, 5, 7)
    """
    parts = max(group.model // width, 1)  # the number of generation groups in a training replica
    replica_size, order = parts * width, []
    for start in range(0, len(group.devices) - replica_size + 1, replica_size):
        order += [start + member * parts + part for part in range(parts) for member in range(width)]
    order += range(len(order), len(group.devices))
    return dataclasses.replace(
        group,
        name=name,
        devices=tuple(group.devices[i] for i in order),
        model=width,
        whole_along_batch=True,
        apart=True,
    )
