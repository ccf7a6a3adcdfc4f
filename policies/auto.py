"""`auto`: chooses the policy, and the sizes of its groups, with the shortest predicted time."""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax

from fdg.agents import of_seeds, split_agents
from fdg.arguments import checked, quoted
from fdg.costs.choosing import Candidate, Choice, Row, choose
from fdg.costs.hardware import Cluster
from fdg.costs.machine import cluster_for
from fdg.errors import FdgError
from fdg.kinds import as_python
from fdg.placing.place import MAX_STALENESS
from fdg.placing.policy import check_policy, checked_devices
from fdg.tracing.graph import FDG
from fdg.tracing.trace import side_by_side, trace
from policies.central import Central
from policies.environments import Environments
from policies.gpu_only import GPUOnly
from policies.multi_learner import MultiLearner
from policies.single_learner_coarse import SingleLearnerCoarse
from policies.single_learner_fine import SingleLearnerFine

POLICIES: tuple[type, ...] = (  # the policies that `auto` tries by default
    GPUOnly,
    MultiLearner,
    SingleLearnerCoarse,
    SingleLearnerFine,
    Environments,
    Central,
)
_CHANGEABLE = ("shuffle", "precision")  # fields that slightly change results
_WITH_MORE_STALENESS = 2  # number of best candidates for which one more iteration of staleness is tried


@dataclasses.dataclass(frozen=True)
class Auto:
    """Chooses a policy by predicted time (`policies.auto`).

    Attributes:
      max_staleness: the largest staleness to consider; above 0, results change.
      may_change: further fields of the algorithm to choose, such as "shuffle,precision"; results change.
      measure: whether to compile and time the best three candidates.
    """

    max_staleness: int = dataclasses.field(
        default=0,
        metadata={
            "help": "the largest staleness that --policy auto may choose; staleness changes the results"
        },
    )
    may_change: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "fields that --policy auto may also change, though results change: shuffle, precision, or"
            " both, joined by a comma (None: no fields)"
        },
    )
    # No flag: `--policy auto:measure` sets it.
    measure: bool = dataclasses.field(default=False, metadata={"flag": None})

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_staleness", as_python(self.max_staleness))
        is_whole = isinstance(self.max_staleness, int) and not isinstance(self.max_staleness, bool)
        if not is_whole or not 0 <= self.max_staleness <= MAX_STALENESS:
            raise FdgError(
                f"policy auto: max_staleness={quoted(self.max_staleness)}: give a whole number of"
                f" iterations, 0 to {MAX_STALENESS}"
            )
        if not isinstance(self.measure, bool):
            raise FdgError(f"policy auto: measure={quoted(self.measure)}: give True or False")
        if not isinstance(self.may_change, str | None):
            raise FdgError(
                f"policy auto: may_change={quoted(self.may_change)}: give a string of names, or None"
            )
        unknown = [name for name in self.changeable if name not in _CHANGEABLE]
        if unknown:
            raise FdgError(f"policy auto: may_change: '{unknown[0]}' must be one of {', '.join(_CHANGEABLE)}")

    @property
    def changeable(self) -> tuple[str, ...]:
        """The fields named by `may_change`."""
        return tuple(name.strip() for name in (self.may_change or "").split(",") if name.strip())

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments of `auto` that keep its choice within these limits."""
        return {"max_staleness": self.max_staleness, "may_change": self.changeable}


@checked
def auto(
    algorithm: Any,
    devices: int | Sequence[jax.Device] | Cluster | None = None,
    *,
    max_staleness: int = 0,
    may_change: Sequence[str] = (),
    num_seeds: int | None = None,
    policies: Iterable[Any] = POLICIES,
    graph: FDG | None = None,
    all_devices: bool = False,
    further: bool = True,
) -> Choice:
    """Predicts the time of each policy with several sizes of its groups; returns the fastest.

    Fields of a policy with `metadata={"devices": True}` are the sizes of its groups. Your own policy takes
    part if it is in `policies`. Nothing is compiled or run.

    Args:
      algorithm: any algorithm.
      devices: the devices to choose from: a number of host devices, a list, or a cluster; None for all
        devices of JAX. The result may use fewer.
      max_staleness: the largest staleness to consider.
      may_change: further fields of the algorithm to choose: "shuffle" and "precision".
      num_seeds: as for `fdg.compile`.
      policies: policy classes to try, or instances with fixed groups. If there is only one
        policy, more numbers of devices are tried.
      graph: the algorithm's graph, if already traced.
      all_devices: the policy must get all devices.
      further: whether to predict candidates that `max_staleness` and `may_change` forbid, for the table.

    Returns:
      A value with `policy`, `devices` (their number), `algorithm`, `seconds` (predicted, per iteration),
      `prediction` and `table` (to print).

    Raises:
      FdgError: the rates of these devices are unknown, or no policy is possible.
    """
    allowed, target = Auto(max_staleness, ",".join(may_change)), _checked_devices(devices)
    cluster = target if isinstance(target, Cluster) else cluster_for(target)
    original, (algorithm, num_seeds) = algorithm, split_agents(algorithm, num_seeds)
    graphs: dict[Any, tuple[Any, FDG]] = {}  # the changed algorithm and its graph, by `Candidate.variant`
    if graph is not None:
        graphs[()] = algorithm, dataclasses.replace(graph, agents=None)

    def graph_of(variant: tuple[tuple[str, Any], ...]) -> tuple[Any, FDG]:
        if variant not in graphs:
            changed = dataclasses.replace(algorithm, **dict(variant)) if variant else algorithm
            graphs[variant] = changed, trace(changed)
        return graphs[variant]

    def graph_of_agents(variant: tuple[tuple[str, Any], ...]) -> tuple[Any, FDG]:
        changed, graph = graph_of(variant)
        return changed, side_by_side(graph, num_seeds)

    classes = tuple(policies)
    for policy in classes:
        if not isinstance(policy, type):
            check_policy(policy)
    counts = [cluster.devices]
    if not all_devices:
        counts = device_counts(*counts) if len(classes) > 1 else [*group_sizes(*counts), *counts]
    variants = [(), *_variants(algorithm, allowed.changeable)]
    candidates = [
        Candidate(policy, count, variant)
        for variant in variants
        for count in counts
        for policy in policies_of(classes, count, range(allowed.max_staleness + 1))
    ]
    forbidden = [name for name in _CHANGEABLE if name not in allowed.changeable]
    further_candidates = functools.partial(_forbidden_candidates, algorithm, forbidden, allowed.max_staleness)
    to_place = functools.partial(_devices_to_place, target)
    choice = choose(candidates, cluster, graph_of_agents, to_place, further_candidates if further else None)
    if original is not algorithm:  # several agents
        return dataclasses.replace(choice, algorithm=of_seeds(choice.algorithm, num_seeds))
    return dataclasses.replace(choice, graph=graphs[choice.rows[0].candidate.variant][1])


def _checked_devices(devices: int | Sequence[jax.Device] | Cluster | None) -> Any:
    """The argument `devices` of `auto`, with a list of devices in place of None or another sequence."""
    devices = as_python(devices)
    if not isinstance(devices, int | Cluster):
        devices = checked_devices(jax.devices() if devices is None else devices)
    if devices == [] or (isinstance(devices, int) and devices < 1):
        raise FdgError(f"devices={devices}: give at least 1")
    return devices


def _devices_to_place(devices: int | list[jax.Device] | Cluster, count: int) -> Any:
    """The argument `devices` of `place`: the first `count` devices, or `count` if there are no devices."""
    if isinstance(devices, Cluster):
        return devices.to_place(count)
    return count if isinstance(devices, int) else devices[:count]


def device_counts(count: int) -> list[int]:
    """Numbers of devices to try: all, half, a quarter, and one.

    >>> device_counts(8), device_counts(3)
    ([8, 4, 2, 1], [3, 1])
    """
    return list(dict.fromkeys([*(count // divisor for divisor in (1, 2, 4) if count % divisor == 0), 1]))


def group_sizes(count: int) -> list[int]:
    """Group sizes to try for two groups or more on `count` devices: 2^i, 3 * 2^i, two thirds, all but one.

    >>> group_sizes(8), group_sizes(1)
    ([1, 2, 3, 4, 6, 7], [])
    """
    sizes = {2**i * k for i in range(count.bit_length()) for k in (1, 3)} | {count - 1, count - count // 3}
    return sorted(size for size in sizes if 0 < size < count)


def policies_of(classes: Iterable[Any], count: int, staleness: Iterable[int]) -> list[Any]:
    """Policies for `count` devices: classes with all group sizes and staleness; instances unchanged."""
    policies: list[Any] = []
    for cls in classes:
        if not isinstance(cls, type):
            policies.append(cls)
            continue
        fields = {field.name: field for field in dataclasses.fields(cls)}
        groups = [
            name
            for name, field in fields.items()
            if field.metadata.get("devices") and field.default is not None
        ]
        combinations = itertools.product(group_sizes(count) or [1], repeat=len(groups))
        possible = [sizes for sizes in combinations if sum(sizes) < count or count == 1]
        ages = [{"staleness": age} for age in staleness] if "staleness" in fields else [{}]
        for age, sizes in itertools.product(ages, possible):
            policies.append(cls(**dict(zip(groups, sizes, strict=True)), **age))
    return policies


def _variants(algorithm: Any, names: Iterable[str]) -> list[tuple[tuple[str, Any], ...]]:
    """Other combinations of values of these fields, each as the fields that differ from the algorithm."""
    if not dataclasses.is_dataclass(algorithm):
        return []
    hints = typing.get_type_hints(type(algorithm))
    choices = [
        [(name, value) for value in typing.get_args(hints[name])]
        for name in dict.fromkeys(names)
        if typing.get_origin(hints.get(name)) is Literal
    ]
    variants = (
        tuple((name, value) for name, value in fields if getattr(algorithm, name) != value)
        for fields in itertools.product(*choices)
    )
    return list(dict.fromkeys(variant for variant in variants if variant))


def _forbidden_candidates(
    algorithm: Any, names: Sequence[str], max_staleness: int, rows: Sequence[Row]
) -> list[Candidate]:
    """Candidates that the limits forbid: the best one with other values of fields, or with more staleness."""
    candidates = []
    for row in rows[:1]:
        for name in names:
            for variant in _variants(algorithm, [name]):
                changes = (*row.candidate.variant, *variant)
                flag = f"only with --may-change {name}"
                candidates.append(Candidate(row.candidate.policy, row.candidate.devices, changes, flag))
    rows_at_limit = [row for row in rows if getattr(row.candidate.policy, "staleness", None) == max_staleness]
    for row in rows_at_limit[:_WITH_MORE_STALENESS] if max_staleness < MAX_STALENESS else ():
        policy = dataclasses.replace(row.candidate.policy, staleness=max_staleness + 1)
        flag = f"only with --max-staleness {max_staleness + 1}"
        candidates.append(Candidate(policy, row.candidate.devices, row.candidate.variant, flag))
    return candidates
