"""`python -m fdg.plan --cluster FILE`: predicts a job on a cluster that need not exist."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fdg
import policies
from fdg.commands.cluster_file import read_cluster
from fdg.commands.cluster_report import Point, draw_sweep, point, points_report
from fdg.commands.flags import Flag
from fdg.costs.choosing import Choice, check_memory
from fdg.costs.hardware import RATES, SIZES, TIMES, Cluster, Figure
from fdg.costs.prediction import predict
from fdg.errors import FdgError, PlanError
from fdg.showing.words import table
from fdg.training.job import Job, steps_of
from fdg.training.settings import AUTO_LAG
from fdg.training.settling import choose_within, with_quickest_lag


@dataclasses.dataclass(frozen=True)
class Halved:
    """The prediction with one rate of the cluster halved."""

    rate: str  # the rate's name; "" for none
    seconds: float  # of an iteration of the policy that was chosen with the original rates
    chosen: str  # the policy that is chosen now, and its number of devices
    best_seconds: float  # of an iteration of the new choice

    @property
    def loses(self) -> float:
        """How much slower the original choice is than the new one; 0 if they are equal."""
        return self.seconds / self.best_seconds - 1


def sensitivity(choose: Callable[[Cluster], Choice], cluster: Cluster) -> tuple[Halved, ...]:
    """Repeats the choice with each rate halved."""
    first = choose(cluster)
    plan = fdg.place(first.graph, first.policy, first.devices)
    rates = [name for name, value in _rates(cluster).items() if name not in SIZES and value > 0]
    found = [Halved("", first.seconds, _as_chosen(first), first.seconds)]
    for rate in rates:
        halved = _with_half_rate(cluster, rate)
        choice = choose(halved)
        found.append(Halved(rate, predict(plan, halved).seconds, _as_chosen(choice), choice.seconds))
    return tuple(found)


_LINKS = ("inside", "between")


def _rates(cluster: Cluster) -> dict[str, float]:
    """The rates of a cluster by name, assumed ones included; those of links as "inside/latency" etc."""
    known = dict.fromkeys([name for name in RATES if not name.startswith("product/")])
    found = {name: cluster.kind.rate(name) for name in {**known, **cluster.kind.figures}}
    for word in _LINKS:
        for name in ("latency", "bandwidth", "call"):
            found[f"{word}/{name}"] = getattr(getattr(cluster, word), name).value
    return found


def _with_half_rate(cluster: Cluster, name: str) -> Cluster:
    """The cluster with one rate halved, or one time doubled."""
    word, _, part = name.partition("/")
    factor = 2 if name in TIMES or part in ("latency", "call") else 0.5
    if word in _LINKS:
        link = getattr(cluster, word)
        slower = dataclasses.replace(link, **{part: Figure(factor * getattr(link, part).value)})
        return dataclasses.replace(cluster, **{word: slower})
    figures = {**cluster.kind.figures, name: Figure(factor * cluster.kind.rate(name))}
    return dataclasses.replace(cluster, kind=dataclasses.replace(cluster.kind, figures=figures))


def _as_chosen(choice: Choice) -> str:
    return f"{choice.policy} on {choice.devices}"


def sensitivity_table(halved: Sequence[Halved]) -> str:
    """The table of halved rates, the most influential first."""
    first, *others = halved
    others.sort(key=lambda one: (-one.loses, -one.seconds))
    rows = [("as they are", f"{first.seconds * 1e3:.4g} ms", "", first.chosen, "")]
    for one in others:
        change = f"{one.seconds / first.seconds - 1:+.1%}"
        loses = f"{one.loses:.1%}" if one.chosen != first.chosen else "stays"
        rows.append((one.rate, f"{one.seconds * 1e3:.4g} ms", change, one.chosen, loses))
    header = ["half the rate", "first choice takes", "change", "chosen then", "first choice loses"]
    return "\n".join(table(header, rows, numeric=(1, 2)))


FLAGS = (
    Flag("cluster", str | None, None, "a TOML file: hosts, devices, links, prices (docs/scale.md)"),
    Flag("scale", tuple[int, ...] | None, None, "numbers of devices to look at, as in 8,64,512 (None: all)"),
    Flag(
        "envs_per_device",
        int | None,
        None,
        "environments, or prompts, of a device, so that the job grows (None: as given)",
    ),
    Flag(
        "compare",
        tuple[str, ...] | None,
        None,
        "policies to look at, as in gpu_only,central (None: that of --policy)",
    ),
    Flag("pictures", str | None, None, "a directory for plots of the sweep (None: none)"),
    Flag("sensitivity", bool, False, "also halve each rate, and say what would be chosen then"),
)
ABOUT = (
    "Prints the dataflow graph and the plan, and runs nothing. With --cluster FILE: what the job would"
    " do on that cluster. " + " ".join(f"{flag.option}: {flag.help}." for flag in FLAGS)
)


def take_flags(given: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags of this module, and --devices, from the given flags; returns their values."""
    mine = {flag.name: given.pop(flag.name) for flag in FLAGS if flag.name in given}
    if mine and "cluster" not in mine:
        raise FdgError(
            f"--{next(iter(mine)).replace('_', '-')} is a flag of --cluster FILE: give the cluster's file"
        )
    if "cluster" in mine and "devices" in given:
        mine["devices"] = given.pop("devices")
    return mine


def lines(job: Job, given: Mapping[str, Any]) -> list[str]:
    """The lines to print about a job on a cluster."""
    cluster = read_cluster(Path(given["cluster"]))
    counts = given.get("scale") or (given.get("devices") or cluster.devices,)
    wrong = next((count for count in counts if not 1 <= count <= cluster.devices), None)
    if wrong is not None:
        raise FdgError(
            f"--scale {wrong}: the cluster has {cluster.devices} devices: use 1 to {cluster.devices}"
            + f", or hosts = {-(-wrong // cluster.devices_per_host)} in {given['cluster']}" * (wrong > 0)
        )
    names = given.get("compare")
    wanted = [_policy(name, job.policy) for name in names] if names else [job.policy]
    if given.get("sensitivity") and not isinstance(job.policy, policies.Auto) and _changes(job.policy):
        raise FdgError(
            f"--sensitivity chooses the policy with its fields: leave out {_flags(_changes(job.policy))},"
            " or --sensitivity"
        )
    each = given.get("envs_per_device")
    grown = functools.cache(functools.partial(_grown, job.algorithm, each))
    points: list[Point] = []
    said: list[str] = [
        f"{cluster.kind.name}: {cluster.hosts} hosts of {cluster.devices_per_host} devices;"
        f" steps are {steps_of(job.algorithm)}"
    ]
    refused: list[str] = []
    for policy in wanted:
        for count in counts:
            try:
                points.append(_point(job, policy, cluster.of(count), *grown(each and each * count)))
            except PlanError as error:
                refused.append(f"on {count}: {error}")
    if not points:
        raise FdgError(refused[0])
    said.append(points_report(points, cluster.price > 0))
    said += [f"not feasible {line}" for line in refused]
    if given.get("pictures"):
        path = Path(given["pictures"], "sweep.png")
        draw_sweep(points, path, f"{type(job.algorithm).__name__} on {cluster.kind.name}")
        said.append(f"picture {path}")
    if given.get("sensitivity"):
        count = counts[-1]
        algorithm, graph = grown(each and each * count)

        def choose(one: Cluster) -> Any:
            return choose_within(job.policy, algorithm, graph, one, job.agents, all_devices=True)

        if not isinstance(job.policy, policies.Auto):
            said.append(f"the choice among all policies, of which {job.policy} is one:")
        said.append(sensitivity_table(sensitivity(choose, cluster.of(count))))
    return said


def _policy(name: str, asked: Any) -> Any:
    """The policy of a name, with the fields that the command line gives for `asked`."""
    cls, named = policies.Auto if name == "auto" else policies.get(name), _changes(asked)
    if lacks := named.keys() - {field.name for field in dataclasses.fields(cls)}:
        raise FdgError(
            f"--compare {name}: it has no {_flags(lacks)}: leave one out, or compare policies that have it"
        )
    return cls(**named)


def _changes(policy: Any) -> dict[str, Any]:
    """A policy's fields that differ from their defaults."""
    fields = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    values = {field.name: (getattr(policy, field.name), field.default) for field in fields}
    return {name: value for name, (value, default) in values.items() if value != default}


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


def _grown(algorithm: Any, each: int | None, number: int | None) -> tuple[Any, fdg.FDG]:
    """The algorithm with this number of environments, `each` on a device (None: its own), and its graph."""
    if number is not None:
        fields = {field.name for field in dataclasses.fields(algorithm)}
        batch = next((name for name in ("num_envs", "num_prompts") if name in fields), None)
        if batch is None:
            raise FdgError(
                f"--envs-per-device {each}: {type(algorithm).__name__} has no field num_envs or num_prompts:"
                " leave it out"
            )
        algorithm = dataclasses.replace(algorithm, **{batch: number})
    return algorithm, fdg.trace(algorithm)


def _point(job: Job, policy: Any, cluster: Cluster, algorithm: Any, graph: fdg.FDG) -> Point:
    if isinstance(policy, policies.Auto):
        policy = choose_within(policy, algorithm, graph, cluster, job.agents, all_devices=True).policy
    elif job.described.get("lag") == AUTO_LAG:
        policy = with_quickest_lag(policy, algorithm, graph, cluster, job.agents).policy
    plan = fdg.place(graph, policy, cluster.devices, job.agents)
    check_memory(plan, cluster)
    steps = getattr(algorithm, "steps_per_iteration", job.steps_per_iteration)
    return point(plan, cluster, steps * (job.agents or 1))
