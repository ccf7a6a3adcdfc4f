"""Chooses the settings that a job leaves open: policy, lag, number of devices, threads of host devices.

The chosen values replace `auto` in the job and in its `config.json`.

The default policy is `auto`, which uses predictions only. The choice for a job on a machine is cached next to
its compiled programs, so a second start reads it.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import fdg
import policies
from fdg import costs, files, jaxprs
from fdg.cores import usable_cores
from fdg.costs.candidate_times import choose_by_timing
from fdg.costs.choosing import TIE, Choice, lags
from fdg.costs.machine import cluster_for
from fdg.errors import FdgError, listed
from fdg.lowering.host_calls import calls_host
from fdg.placing.policy import with_host
from fdg.placing.staleness import micro_batches
from fdg.processes import distributed
from fdg.running.host_devices import make_host_devices, restart_cpu_backend, threads_for
from fdg.running.program_cache import cache_directory
from fdg.tracing.trace import side_by_side
from fdg.training.job import Job
from fdg.training.settings import AUTO_LAG, nearest_multiples
from fdg.training.sweep import unwrap_sweep

ONE_THREAD_FLOPS = 12_000_000  # an operation with fewer FLOPs gains nothing from a second thread


def quickest_count(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Sequence[jax.Device], agents: int | None
) -> tuple[int, str]:
    """The number of host devices on which a policy is predicted to be fastest, and the reason to print."""
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
        return 1, "1: a program that calls Python functions on the host runs on one device"
    choice = policies.auto(
        algorithm, devices, policies=[policy], num_seeds=agents, graph=graph, further=False
    )
    return choice.devices, choice.reason


def thread_count(graph: fdg.FDG, policy: Any, devices: int) -> int | None:
    """Size of XLA's thread pool for a job on host devices; None to leave the pool as it is.

    A program with one group is lowered so that each device waits in one collective at a time
    (`lowering.ordering`); then one thread per device is enough.

    A single device with small operations gets one thread: passing operations between threads takes longer
    than running them in parallel saves. Milliseconds per iteration of PPO on CartPole-v1, with one thread and
    with four: 1.9 and 2.4 with 4 environments, 10.5 and 12.2 with 32, 22 and 20 with 64.
    """
    jaxpr = jaxprs.open_jaxpr(graph.jaxpr)
    if calls_host(jaxpr.eqns):
        return None
    if devices > 1:
        placed = {} if graph.agents is not None else policy.place(["cpu"] * devices)
        groups = {placed[f.role] for f in graph.fragments if f.role in placed}
        # Collectives of several programs, and those of sharded parameters, have no known order.
        in_order = len(groups) <= 1 and not any(group.shards for group in groups)
        return threads_for(devices, in_order)
    return 1 if (graph.agents or 1) * jaxprs.largest_cost(jaxpr) < ONE_THREAD_FLOPS else usable_cores()


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices (None: all); with several processes, equally many from each.

    On a CPU, configures `count` host devices, unless JAX has started already.
    """
    processes = distributed.count()
    if count is not None:
        make_host_devices(count // processes)
    devices = jax.devices()
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
        raise FdgError(f"{plan.policy} uses {busy} of {count} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} is not divisible by --devices {count} under {plan.policy}:"
        f" use --num-envs {nearest_multiples(num_envs, count)}, or --devices {busy}"
    )


@dataclasses.dataclass(frozen=True)
class Settled:
    """A job after all choices, and its devices: the result of `prepare`."""

    job: Job  # the job with the chosen policy, devices and algorithm
    graph: fdg.FDG  # the graph of its algorithm
    message: str  # the candidates or the reason, to print; "" if nothing was chosen
    devices: Any = ()  # the devices, or a number of devices that need not exist
    devices_reason: str = ""  # the reason for the number of devices, to print; "" if `--devices` gave it


def prepare(job: Job, devices: Sequence[jax.Device] | None = None, plans_only: bool = False) -> Settled:
    """Traces a job's algorithm and chooses all settings that the job leaves open. A collective.

    `devices` replace `--devices`. With `plans_only`, the devices of `--devices` need not exist. Host devices
    share one thread pool, whose size is set here, before the first compilation (`running.host_devices`).
    """
    settled = settle(job, fdg.trace(job.algorithm), plans_only)
    job, graph, message, reason = settled.job, settled.graph, settled.message, ""
    policy, algorithm, agents = job.policy, job.algorithm, job.agents
    target: Any = job.devices if devices is None and plans_only else devices
    if target is None:
        # The chosen number counts devices of one process: several processes use all of their devices.
        chosen = job.devices_chosen if distributed.count() == 1 else None
        target, count = available_devices(job.devices), job.devices or chosen
        on_cpu = target[0].platform == "cpu"
        if count is None and job.cores is not None and on_cpu:
            count, reason = quickest_count(policy, algorithm, graph, target[: job.cores], agents)
        if count is not None and on_cpu and distributed.count() == 1:
            if threads := thread_count(side_by_side(graph, agents), policy, count):
                restart_cpu_backend(count, threads)
            target = available_devices(None)
        target = with_host(policy, target[:count])
    if reason:  # stored in the job, so that a resumed run uses the same number
        job = dataclasses.replace(job, devices_chosen=len(target))
    if job.described.get("lag") == AUTO_LAG:
        lag, message = _choose_lag(policy, algorithm, graph, target, agents)
        job = job.changed(policy=dataclasses.replace(policy, lag=lag))
    return Settled(job, graph, message, target, reason)


def settle(job: Job, graph: fdg.FDG, plans_only: bool = False) -> Settled:
    """Chooses a job's policy if it is `auto`. A collective: process 0 chooses for all.

    With `plans_only`, the devices of `--devices` need not exist.
    """
    limits, algorithm, agents = job.policy, job.algorithm, job.agents
    if not isinstance(limits, policies.Auto):
        return Settled(job, graph, "")
    devices: Any = job.devices if plans_only and job.devices else available_devices(job.devices)
    may_use_fewer = job.devices is None and job.cores is not None
    if may_use_fewer:
        devices = devices[: job.cores]
    changed_algorithm = None
    if not job.explains:
        policy, count, message = _choose_default(limits, algorithm, graph, devices, agents, may_use_fewer)
    else:
        all_devices = job.devices is not None or distributed.count() > 1
        choice = choose_policy(limits, algorithm, graph, devices, agents, all_devices=all_devices)
        if limits.measure and not plans_only:
            choice = choose_by_timing(choice, devices, num_seeds=agents)
        changes = {name: getattr(choice.algorithm, name) for name in limits.changeable}
        entries, changes = distributed.exchange([_choice_json(choice.policy, choice.devices, ""), changes])[0]
        policy, count, message = _chosen_policy(entries), entries["devices"], choice.table
        if any(getattr(algorithm, name) != value for name, value in changes.items()):
            algorithm = changed_algorithm = dataclasses.replace(algorithm, **changes)
        graph = choice.graph if algorithm == choice.algorithm else fdg.trace(algorithm)
    if count is None or job.devices is not None or distributed.count() > 1:
        count = job.devices_chosen
    config_entries = {"policy_asked": job.described["policy"]}
    return Settled(
        job.changed(changed_algorithm, policy, config_entries, devices_chosen=count), graph, message
    )


def _choose_lag(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None
) -> tuple[int, str]:
    """The smallest lag within 5% of the best prediction, and the candidates as text; process 0 chooses."""
    if policy.staleness:
        raise FdgError(
            f"--lag {AUTO_LAG} and --staleness {policy.staleness}: both set the age of actors' parameters:"
            " give one of them"
        )
    choice = choose_quickest_lag(policy, algorithm, graph, devices, agents)
    lag, text = distributed.exchange([choice.policy.lag, choice.table])[0]
    text += (
        f"\nlag: {lag} of {micro_batches(graph)} micro-batches per iteration, the smallest within"
        f" {TIE - 1:.0%} of the best prediction"
    )
    return lag, text


def choose_policy(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None, **options: Any
) -> Choice:
    """`policies.auto` with the limits of `policy` if it is an `Auto`, else with the default limits."""
    limits = policy if isinstance(policy, policies.Auto) else policies.Auto()
    options |= {"max_staleness": limits.max_staleness, "may_change": limits.changeable}
    return policies.auto(algorithm, devices, num_seeds=agents, graph=graph, **options)


def choose_quickest_lag(
    policy: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None
) -> Choice:
    """The `Choice` of a lag; `choice.policy` is the policy with this lag."""
    options: dict[str, Any] = {"policies": lags(graph, policy), "all_devices": True, "further": False}
    return policies.auto(algorithm, devices, num_seeds=agents, graph=graph, **options)


def _choose_default(
    limits: Any, algorithm: Any, graph: fdg.FDG, devices: Any, agents: int | None, may_use_fewer: bool
) -> tuple[Any, int | None, str]:
    """The policy of a job without `--policy`, the number of its devices (None: all), and the reason.

    The policy is `GPUOnly`, unless another one is predicted to be `GAIN` times as fast on the same devices.
    Without predictions it is `GPUOnly`. If `may_use_fewer`, the number of devices is also chosen, on a CPU.
    """
    default = policies.GPUOnly(), None, ""
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):  # the time of host functions cannot be predicted
        return default
    if devices == 1 or (not isinstance(devices, int) and len(devices) == 1):
        return default
    entries: dict[str, Any] | None = None
    try:
        file = _cache_file(graph, devices, limits, agents, may_use_fewer)
        entries = None if file is None else _read_choice(file)
        if entries is None:
            count = None
            if may_use_fewer and devices[0].platform == "cpu":
                count, reason = quickest_count(default[0], algorithm, graph, devices, agents)
                devices = devices[:count]
            if count == 1:
                entries = _choice_json(default[0], count, reason)
            else:
                options = {"all_devices": True, "further": False}
                choice = choose_policy(limits, algorithm, graph, devices, agents, **options)
                entries = _choice_json(*_best_or_default(choice))
            if file is not None and distributed.is_first():
                with contextlib.suppress(OSError):
                    file.parent.mkdir(mode=0o700, exist_ok=True)
                    files.write(file, json.dumps(entries).encode())
    except FdgError:  # for example, the rates of the devices are unknown
        pass
    entries = distributed.exchange(entries)[0]
    if entries is None:
        return default
    policy = _chosen_policy(entries)
    # `GPUOnly` uses all accelerators, also when a run is resumed on another machine.
    is_cpu = not isinstance(devices, int) and devices[0].platform == "cpu"
    keeps_count = is_cpu or not isinstance(policy, policies.GPUOnly)
    return policy, entries["devices"] if keeps_count else None, f"policy: {entries['reason']}"


def _read_choice(file: Path) -> dict[str, Any] | None:
    """A cached choice as JSON; None if there is none, or if the file is invalid."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FdgError):
        content = json.loads(file.read_text())
        return _choice_json(_chosen_policy(content), int(content["devices"]), str(content["reason"]))
    return None


# Predicted speed-up for which another policy replaces `GPUOnly`; predictions usually err by less.
GAIN = 1.3


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


def _choice_json(policy: Any, devices: int, reason: str) -> dict[str, Any]:
    """A choice as JSON, for the cache and for other processes; its policy is one of fdg's."""
    values = ((f.name, getattr(policy, f.name), f.default) for f in dataclasses.fields(policy))
    changed = {name: value for name, value, default in values if value != default}
    return {"policy": type(policy).__name__, "fields": changed, "devices": devices, "reason": reason}


def _chosen_policy(choice: Mapping[str, Any]) -> Any:
    return policies.get(choice["policy"])(**choice["fields"])
