"""Settles what a job leaves open, in a fixed order: its policy, the number of host devices, its lag.

The chosen values replace `auto` in the job and in its `config.json`.

The default policy is `auto`, which uses predictions only. The choice for a job on a machine is cached next to
its compiled programs, so a second start reads it. At the end are checks that all devices of a plan have work.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import fdg
import policies
from fdg import costs, files, jaxprs
from fdg.costs.candidate_times import choose_by_timing
from fdg.costs.choosing import TIE, Choice, lags
from fdg.costs.machine import cluster_for
from fdg.errors import FdgError, listed
from fdg.lowering.host_calls import calls_host
from fdg.placing.policy import with_host
from fdg.placing.staleness import micro_batches
from fdg.processes import distributed
from fdg.running.host_devices import restart_cpu_backend, thread_count
from fdg.running.program_cache import cache_directory
from fdg.training.job import Job
from fdg.training.settings import AUTO_LAG, nearest_multiples
from fdg.training.sweep import unwrap_sweep

GAIN = 1.3  # predicted speed-up for which another policy replaces `GPUOnly`; predictions usually err by less
Search = Callable[..., Choice]  # `policies.auto` for one algorithm: takes devices and options


@dataclasses.dataclass(frozen=True)
class Settled:
    """A job after all choices, and its devices: the result of `prepare`."""

    job: Job  # the job with the chosen policy, devices and algorithm
    graph: fdg.FDG  # the graph of its algorithm
    devices: Any  # the devices, or a number of devices that need not exist
    message: str  # the candidates or the reason, to print; "" if nothing was chosen
    devices_reason: str  # the reason for the number of devices, to print; "" if `--devices` gave it


def prepare(job: Job, devices: Sequence[jax.Device] | None = None, plans_only: bool = False) -> Settled:
    """Traces a job's algorithm and chooses all settings that the job leaves open. A collective.

    `devices` replace `--devices`. With `plans_only`, the devices of `--devices` need not exist. Host devices
    share one thread pool, whose size is set here, before the first compilation (`running.host_devices`).
    """
    if devices is not None and not len(devices):
        raise FdgError("devices=[]: give at least one device")
    algorithm = job.algorithm
    policy = job.policy
    agents = job.agents
    graph = fdg.trace(algorithm)
    search = functools.partial(policies.auto, algorithm, num_seeds=agents, graph=graph)
    target: Any = devices
    if devices is None:
        target = job.devices if plans_only and job.devices else available_devices(job.devices)
    on_cpu = isinstance(target, int) or target[0].platform == "cpu"
    on_host = calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns)  # the time of host functions is not predicted
    is_alone = distributed.count() == 1
    takes_all = job.devices is not None or not is_alone
    # None: the number of host devices is fixed
    max_host_devices = job.max_host_devices if on_cpu and not takes_all else None
    candidates = target if max_host_devices is None else target[:max_host_devices]
    num_chosen, message, reason = job.devices_chosen, "", ""
    described: dict[str, Any] = {}

    if isinstance(policy, policies.Auto):
        described["policy_asked"] = job.described["policy"]
        if job.explains:
            choice = _explained_choice(policy, search, candidates, takes_all, agents, not plans_only)
        elif on_host:
            choice = _choice_json(policies.GPUOnly(), None, "")
        else:
            choice = _default_choice(search, graph, agents, candidates, max_host_devices is not None)
        choice = distributed.exchange(choice)[0]  # the choice of process 0
        policy, message = _chosen_policy(choice), choice["reason"]
        if any(getattr(algorithm, name) != value for name, value in choice["changes"].items()):
            algorithm = dataclasses.replace(algorithm, **choice["changes"])
            graph = fdg.trace(algorithm)
        num_chosen = num_chosen if takes_all else choice["devices"] or num_chosen

    # The chosen number counts devices of one process: several processes use all of their devices.
    count = job.devices or (num_chosen if is_alone else None)
    if count is None and max_host_devices is not None:
        if on_host:
            count, reason = 1, "1: a program that calls Python functions on the host runs on one device"
        else:
            quickest = search(candidates, policies=[policy], further=False)
            count, reason = quickest.devices, quickest.reason
        num_chosen = count  # stored in the job, so that a resumed run uses the same number
    if devices is None and not isinstance(target, int):
        if count is not None and on_cpu and is_alone:
            if not on_host:
                restart_cpu_backend(count, thread_count(graph, agents, policy, count))
            target = available_devices(None)
        target = with_host(policy, target[:count])

    if job.described.get("lag") == AUTO_LAG:
        lag, message = _choose_lag(policy, search, graph, target)
        policy = dataclasses.replace(policy, lag=lag)
    return Settled(
        job.changed(algorithm, policy, described, devices_chosen=num_chosen), graph, target, message, reason
    )


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices (None: all); with several processes, equally many from each."""
    processes, devices = distributed.count(), jax.devices()
    if count is None:
        return devices
    if count > len(devices):
        platform = devices[0].platform
        fix = "" if platform == "cpu" else ", or set JAX_PLATFORMS=cpu for host devices"
        raise FdgError(
            f"--devices {count}: there {'is' if len(devices) == 1 else 'are'} {len(devices)} of kind"
            f" {platform}: use --devices {len(devices)}{fix}"
        )
    if processes == 1:
        return devices[:count]
    groups = [[d for d in devices if d.process_index == i][: count // processes] for i in range(processes)]
    if min(map(len, groups)) < count // processes:
        raise FdgError(
            f"--devices {count}: each of {processes} processes needs {count // processes} devices, but one"
            f" has only {min(map(len, groups))}: use --devices {processes * min(map(len, groups))}"
        )
    return [device for group in groups for device in group]


def _explained_choice(
    policy: policies.Auto, search: Search, devices: Any, all_devices: bool, agents: int | None, may_time: bool
) -> dict[str, Any]:
    """The choice of `--policy auto`, as JSON; its reason is the table of candidates."""
    choice = search(devices, all_devices=all_devices, **policy.limits)
    if policy.measure and may_time:
        choice = choose_by_timing(choice, devices, num_seeds=agents)
    changes = {name: getattr(choice.algorithm, name) for name in policy.changeable}
    return {**_choice_json(choice.policy, choice.devices, choice.table), "changes": changes}


def _default_choice(
    search: Search, graph: fdg.FDG, agents: int | None, devices: Any, may_use_fewer: bool
) -> dict[str, Any]:
    """The choice for a job without `--policy`, as JSON; its number of devices is None for all of them.

    If `may_use_fewer` (host devices), it is `GPUOnly` on the number of devices for which the prediction is
    the fastest; without staleness, groups of devices take turns, so another policy would gain little.
    Otherwise it is `GPUOnly` on all devices, unless another policy is predicted to be `GAIN` times as fast.
    Without predictions it is `GPUOnly`.
    """
    default = policies.GPUOnly()
    if devices == 1 or (not isinstance(devices, int) and len(devices) == 1):
        return _choice_json(default, None, "")
    try:
        file = _cache_file(graph, devices, agents, may_use_fewer)
        choice = None if file is None else _read_choice(file)
        if choice is None:
            if may_use_fewer:
                best = search(devices, policies=[default], further=False)
                choice = _choice_json(default, best.devices, best.reason)
            else:
                best = search(devices, all_devices=True, further=False)
                choice = _choice_json(*_best_or_default(best))
            if file is not None and distributed.is_first():
                with contextlib.suppress(OSError):
                    file.parent.mkdir(mode=0o700, exist_ok=True)
                    files.write(file, json.dumps(choice).encode())
    except FdgError:  # for example, the rates of the devices are unknown
        return _choice_json(default, None, "")
    choice["reason"] = f"policy: {choice['reason']}"
    if not isinstance(devices, int) and devices[0].platform != "cpu" and _chosen_policy(choice) == default:
        choice["devices"] = None  # all accelerators, also when a run is resumed on another machine
    return choice


def _best_or_default(choice: Choice) -> tuple[Any, int, str]:
    """The policy, number of devices and reason of the fastest candidate.

    Takes `GPUOnly` instead if it needs at most `GAIN` times as long.
    """
    rows = [row for row in choice.rows if row.prediction is not None]
    default = next((row for row in rows if isinstance(row.candidate.policy, policies.GPUOnly)), None)
    if default is None or default.seconds > GAIN * choice.seconds:
        return choice.policy, choice.devices, choice.reason
    candidate = default.candidate
    fastest = next((row for row in rows if row is not default), None)
    if fastest is None:
        reason = "nothing else can be carried out"
    elif fastest.seconds > default.seconds:
        ratio = fastest.seconds / default.seconds
        reason = f"predicted to be {ratio:.2f} times as quick as {fastest.candidate}, the next"
    else:
        reason = f"no other is predicted to be {GAIN} times as quick"
    return candidate.policy, candidate.devices, f"{candidate.policy}: {reason}"


def _cache_file(graph: fdg.FDG, devices: int | Sequence[jax.Device], *further: Any) -> Path | None:
    """The cache file for a graph, devices, `further` conditions of the choice, this machine, and this version
    of the cost model; None without a cache.
    """
    directory = cache_directory()
    if directory is None:
        return None
    rates = dataclasses.replace(cluster_for(devices), note="")  # the note depends on the current load
    jaxpr = re.sub("0x[0-9a-f]+", "", str(graph.jaxpr))  # without addresses of memory
    inputs = [jaxpr, *map(repr, (rates, devices, *further)), jax.__version__]
    digest = hashlib.sha256("\n".join(inputs).encode())
    for file in sorted(Path(costs.__file__).parent.glob("*.py")):  # a changed cost model chooses again
        digest.update(file.read_bytes())
    return directory / "choices" / f"{digest.hexdigest()[:32]}.json"


def _read_choice(file: Path) -> dict[str, Any] | None:
    """A cached choice as JSON; None if there is none, or if the file is invalid."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FdgError):
        content = json.loads(file.read_text())
        return _choice_json(_chosen_policy(content), int(content["devices"]), str(content["reason"]))
    return None


def _choice_json(policy: Any, devices: int | None, reason: str) -> dict[str, Any]:
    """A choice as JSON, for the cache and for other processes; its policy is one of fdg's."""
    values = ((f.name, getattr(policy, f.name), f.default) for f in dataclasses.fields(policy))
    fields = {name: value for name, value, default in values if value != default}
    name = type(policy).__name__
    return {"policy": name, "fields": fields, "devices": devices, "reason": reason, "changes": {}}


def _chosen_policy(choice: Mapping[str, Any]) -> Any:
    return policies.get(choice["policy"])(**choice["fields"])


def _choose_lag(policy: Any, search: Search, graph: fdg.FDG, devices: Any) -> tuple[int, str]:
    """The smallest lag within 5% of the best prediction, and the candidates as text; process 0 chooses."""
    if staleness := getattr(policy, "staleness", 0):
        raise FdgError(
            f"--lag {AUTO_LAG} and --staleness {staleness}: both set the age of actors' parameters:"
            " give one of them"
        )
    choice = search(devices, policies=lags(graph, policy), all_devices=True, further=False)
    lag, text = distributed.exchange([choice.policy.lag, choice.table])[0]
    text += (
        f"\nlag: {lag} of {micro_batches(graph)} micro-batches per iteration, the smallest within"
        f" {TIE - 1:.0%} of the best prediction"
    )
    return lag, text


def too_small_micro_batch(algorithm: Any, plan: fdg.Plan) -> str | None:
    """A message with a better size if a micro-batch is too small for its group's devices; else None."""
    algorithm = unwrap_sweep(algorithm)
    micro_batch = getattr(algorithm, "micro_batch", None)
    if micro_batch is None:
        return None
    for name, idle in plan.unfit:
        group = next(group for group in plan.groups if group.name == name)
        num_devices = len(group) + len(idle)
        multiple = num_devices // group.model
        fragments = [f for f in plan.graph.fragments if f.batch_size and plan.group_of(f.name) == group]
        names = [f"`{f.name}`" for f in fragments if f.batch_size == micro_batch]
        if not (idle and names and micro_batch % multiple):
            continue
        size = -(-micro_batch // multiple) * multiple
        try:
            dataclasses.replace(algorithm, micro_batch=size)
            sizes = [f.batch_size for f in fragments if f.batch_size not in (None, micro_batch)]
            fits = all(batch_size % multiple == 0 for batch_size in sizes)
        except FdgError:
            fits = False
        suffix = "" if fits else f", and a --num-prompts that makes all batches multiples of {size}"
        return (
            f"{len(group)} of {num_devices} devices work in {listed(names, 'and')}, whose batch is the"
            f" micro-batch of {micro_batch}: give --micro-batch {size}{suffix}"
        )
    return None


def check_all_busy(algorithm: Any, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Raises an `FdgError` if a device of the plan would be idle; the message suggests other settings."""
    if not plan.idle:
        return
    count, agents = plan.num_devices, plan.graph.agents
    busy = count - len(plan.idle)
    if agents is not None:
        raise FdgError(
            f"--num-seeds {agents} is not divisible by --devices {count}:"
            f" use --num-seeds {nearest_multiples(agents, count)}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # a group may leave devices out to split its batch equally; the plan shows it
        if (process := plan.idle_process(devices)) is not None:
            raise FdgError(
                f"{plan.policy} leaves process {process} without work: it uses {busy} of {count} devices;"
                f" use other numbers of devices, or --num-envs that divide by them"
            )
        return
    if line := too_small_micro_batch(algorithm, plan):
        raise FdgError(f"{line}, or --devices {busy}")
    num_envs = getattr(algorithm, "num_envs", None)
    if num_envs is None or num_envs % count == 0:
        raise FdgError(
            f"{plan.policy} divides the batch over {busy} of {count} devices, so that each has as many rows:"
            f" use --devices {busy}"
        )
    raise FdgError(
        f"--num-envs {num_envs} is not divisible by --devices {count} under {plan.policy}:"
        f" use --num-envs {nearest_multiples(num_envs, count)}, or --devices {busy}"
    )
