"""`python -m fdg.plan --cluster FILE`: predicts a job on a cluster that need not exist."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fdg
import policies
from fdg.commands.cluster_file import read_cluster
from fdg.commands.cluster_report import Point, draw_sweep, points_report, predict_point
from fdg.commands.flags import Flag
from fdg.costs.choosing import Choice, check_memory, lags
from fdg.costs.hardware import RATES, SIZES, TIMES, Cluster, Figure
from fdg.costs.prediction import predict
from fdg.errors import FdgError, PlanError
from fdg.showing.words import table
from fdg.training.curves import plot_label
from fdg.training.job import Job, steps_unit
from fdg.training.settings import AUTO_LAG


@dataclasses.dataclass(frozen=True)
class HalvedRate:
    """What happens if one rate of the cluster is halved: the original choice's time, and the new choice."""

    rate: str  # the rate's name; "" if no rate was halved
    seconds: float  # per iteration, of the original choice
    chosen: str  # the new choice: a policy and its number of devices
    best_seconds: float  # per iteration, of the new choice

    @property
    def slowdown(self) -> float:
        """The fraction by which the original choice is slower than the new one."""
        return self.seconds / self.best_seconds - 1


def sensitivity(
    choose: Callable[[Cluster], Choice], cluster: Cluster, agents: int | None = None
) -> tuple[HalvedRate, ...]:
    """Chooses a plan again with each rate halved. The first entry has the original rates.

    `choose` maps a cluster to its choice; `agents` is the number of agents (None: no axis of agents).
    """
    original = choose(cluster)
    plan = fdg.place(original.graph, original.policy, cluster.to_place(original.devices), agents)
    results = [HalvedRate("", original.seconds, _describe(original), original.seconds)]
    for rate, value in _rates(cluster).items():
        if rate not in SIZES and value > 0:
            halved = _with_half_rate(cluster, rate)
            choice = choose(halved)
            results.append(HalvedRate(rate, predict(plan, halved).seconds, _describe(choice), choice.seconds))
    return tuple(results)


_LINKS = ("inside", "between")  # the links of a `Cluster`: between devices of a host, and between hosts


def _rates(cluster: Cluster) -> dict[str, float]:
    """The rates of a cluster by name, assumed ones included. A rate of a link is named "inside/latency"."""
    names = [name for name in RATES if not name.startswith("product/")]
    rates = {name: cluster.kind.rate(name) for name in (*names, *cluster.kind.figures)}
    for place in _LINKS:
        for name in ("latency", "bandwidth", "call"):
            rates[f"{place}/{name}"] = getattr(getattr(cluster, place), name).value
    return rates


def _with_half_rate(cluster: Cluster, name: str) -> Cluster:
    """The cluster with one rate halved, or one time doubled."""
    place, _, field = name.partition("/")
    factor = 2 if name in TIMES or field in ("latency", "call") else 0.5
    if place in _LINKS:
        link = getattr(cluster, place)
        slower = dataclasses.replace(link, **{field: Figure(factor * getattr(link, field).value)})
        return dataclasses.replace(cluster, **{place: slower})
    figures = {**cluster.kind.figures, name: Figure(factor * cluster.kind.rate(name))}
    return dataclasses.replace(cluster, kind=dataclasses.replace(cluster.kind, figures=figures))


def _describe(choice: Choice) -> str:
    return f"{choice.policy} on {choice.devices}"


def sensitivity_table(halved: Sequence[HalvedRate]) -> str:
    """A table of the halved rates, those with the largest influence first."""
    original, *changed = halved
    changed.sort(key=lambda result: (-result.slowdown, -result.seconds))
    rows = [("as they are", f"{original.seconds * 1e3:.4g} ms", "", original.chosen, "")]
    for result in changed:
        change = f"{result.seconds / original.seconds - 1:+.1%}"
        slowdown = f"{result.slowdown:.1%}" if result.chosen != original.chosen else "stays"
        rows.append((result.rate, f"{result.seconds * 1e3:.4g} ms", change, result.chosen, slowdown))
    header = ["halved rate", "first choice takes", "change", "new choice", "first choice loses"]
    return "\n".join(table(header, rows, numeric=(1, 2)))


FLAGS = (
    Flag("cluster", str | None, None, "a TOML file: hosts, devices, links, prices (docs/scale.md)"),
    Flag("scale", tuple[int, ...] | None, None, "numbers of devices to predict, as in 8,64,512 (None: all)"),
    Flag(
        "envs_per_device",
        int | None,
        None,
        "environments, or prompts, per device, so that the job grows with --scale (None: a fixed number)",
    ),
    Flag(
        "compare",
        tuple[str, ...] | None,
        None,
        "policies to predict, such as gpu_only,central (None: the value of --policy)",
    ),
    Flag("pictures", str | None, None, "a directory for plots of the sweep (None: none)"),
    Flag("sensitivity", bool, False, "also halve each rate, and print the choice with it"),
)
ABOUT = (
    "Prints the dataflow graph and the plan, and runs nothing. With --cluster FILE: predicts the job on"
    " that cluster. " + " ".join(f"{flag.option}: {flag.help}." for flag in FLAGS)
)


def take_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags of this module, and --devices with --cluster; returns their values."""
    given = {flag.name: flags.pop(flag.name) for flag in FLAGS if flag.name in flags}
    values = {name: value for name, value in given.items() if value is not None}
    if values and "cluster" not in values:
        raise FdgError(
            f"--{next(iter(values)).replace('_', '-')} needs --cluster FILE: give the cluster's file"
        )
    if "cluster" in values and flags.get("devices") is not None:
        values["devices"] = flags.pop("devices")
    return values


def report_paragraphs(job: Job, flags: Mapping[str, Any]) -> list[str]:
    """The paragraphs to print about a job on a cluster."""
    cluster = read_cluster(Path(flags["cluster"]))
    counts = flags.get("scale") or (flags.get("devices", cluster.devices),)
    wrong = next((count for count in counts if not 1 <= count <= cluster.devices), None)
    if wrong is not None:
        flag = "--scale" if flags.get("scale") else "--devices"
        hosts = cluster.hosts - (cluster.devices - wrong) // cluster.devices_per_host
        raise FdgError(
            f"{flag} {wrong}: the cluster has {cluster.devices} devices: use 1 to {cluster.devices}"
            + f", or set hosts = {hosts} in {flags['cluster']}" * (wrong > 0)
        )
    names = flags.get("compare")
    compared = [_policy_named(name, job.policy) for name in names] if names else [job.policy]
    changed_fields = _changed_fields(job.policy)
    is_auto = isinstance(job.policy, policies.Auto)
    if flags.get("sensitivity") and not is_auto and changed_fields:
        raise FdgError(
            f"--sensitivity chooses the fields of the policy: leave out {_flags_text(changed_fields)},"
            " or leave out --sensitivity"
        )
    envs_per_device, is_auto_lag = flags.get("envs_per_device"), job.described.get("lag") == AUTO_LAG
    scale_batch = functools.cache(functools.partial(_scale_batch, job.algorithm, envs_per_device))
    points: list[Point] = []
    paragraphs: list[str] = [
        "; ".join(
            f"{part.kind.name}: {part.hosts} hosts of {part.devices_per_host} devices"
            for part in cluster.parts
        )
        + f"; steps are {steps_unit(job.algorithm)}"
    ]
    infeasible: list[str] = []
    for policy in compared:
        for count in counts:
            try:
                algorithm, graph = scale_batch(envs_per_device and envs_per_device * count)
                resized = cluster.of(count)
                points.append(_choose_and_predict(policy, resized, algorithm, graph, job.agents, is_auto_lag))
            except PlanError as error:
                infeasible.append(f"on {count}: {error}")
    if not points:
        raise FdgError(infeasible[0])
    paragraphs.append(points_report(points, cluster.per_hour("price", range(cluster.devices)) > 0))
    paragraphs += [f"not feasible {line}" for line in infeasible]
    if flags.get("pictures"):
        path = Path(flags["pictures"], "sweep.png")
        kinds = " and ".join(plot_label(part.kind.name) for part in cluster.parts)
        draw_sweep(points, path, f"{type(job.algorithm).__name__} on {kinds}")
        paragraphs.append(f"picture {path}")
    if flags.get("sensitivity"):
        count = counts[-1]
        algorithm, graph = scale_batch(envs_per_device and envs_per_device * count)

        def choose(cluster: Cluster) -> Any:
            limits = (job.policy if is_auto else policies.Auto()).limits
            return policies.auto(
                algorithm, cluster, num_seeds=job.agents, graph=graph, all_devices=True, **limits
            )

        if not is_auto:
            paragraphs.append(f"the choice among all policies, of which {job.policy} is one:")
        paragraphs.append(sensitivity_table(sensitivity(choose, cluster.of(count), job.agents)))
    return paragraphs


def _policy_named(name: str, template: Any) -> Any:
    """The policy with this name, and with the fields that `template` changes from their defaults."""
    cls, fields = policies.Auto if name == "auto" else policies.get(name), _changed_fields(template)
    if missing := fields.keys() - {field.name for field in dataclasses.fields(cls)}:
        raise FdgError(
            f"--compare {name}: this policy has no {_flags_text(missing)}: leave out the flag, or compare"
            " policies that have it"
        )
    return cls(**fields)


def _changed_fields(policy: Any) -> dict[str, Any]:
    """A policy's fields that differ from their defaults."""
    fields = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    values = {field.name: (getattr(policy, field.name), field.default) for field in fields}
    return {name: value for name, (value, default) in values.items() if value != default}


def _flags_text(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


def _scale_batch(algorithm: Any, per_device: int | None, count: int | None) -> tuple[Any, fdg.FDG]:
    """The algorithm with `count` environments or prompts (None: unchanged), and its graph."""
    if count is not None:
        fields = {field.name for field in dataclasses.fields(algorithm)}
        batch_field = next((name for name in ("num_envs", "num_prompts") if name in fields), None)
        if batch_field is None:
            raise FdgError(
                f"--envs-per-device {per_device}: {type(algorithm).__name__} has no num_envs or num_prompts:"
                " leave out the flag"
            )
        algorithm = dataclasses.replace(algorithm, **{batch_field: count})
    return algorithm, fdg.trace(algorithm)


def _choose_and_predict(
    policy: Any, cluster: Cluster, algorithm: Any, graph: fdg.FDG, agents: int | None, is_auto_lag: bool
) -> Point:
    """The `Point` of a policy; an `Auto` policy and an automatic lag are chosen for this cluster first."""
    search = functools.partial(
        policies.auto, algorithm, cluster, num_seeds=agents, graph=graph, all_devices=True
    )
    if isinstance(policy, policies.Auto):
        policy = search(**policy.limits).policy
    elif is_auto_lag:
        policy = search(policies=lags(graph, policy), further=False).policy
    plan = fdg.place(graph, policy, cluster.to_place(cluster.devices), agents)
    check_memory(plan, cluster)
    return predict_point(plan, cluster, algorithm.steps_per_iteration * (agents or 1))
