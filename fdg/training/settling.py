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
from collections.abc import Sequence
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
from fdg.training.description import describe_policy, rebuild_policy
from fdg.training.job import Job
from fdg.training.name_resolver import CALLER
from fdg.training.settings import AUTO_LAG, nearest_multiples
from fdg.training.sweep import unwrap_sweep

ONE_THREAD_FLOPS = 12_000_000  # an operation with fewer FLOPs gains nothing from a second thread


def choose_devices(job: Job, graph: fdg.FDG) -> tuple[list[jax.Device], str]:
    """A job's devices, and the reason for their number if `--devices` is absent (else "").

    Host devices share one thread pool, whose size is set here, before the first compilation
    (`running.host_devices`).
    """
    devices, count, reason = available_devices(job.devices), job.devices_chosen or job.devices, ""
    on_cpu = devices[0].platform == "cpu"
    if count is None and job.cores is not None and on_cpu:
        count, reason = quickest_count(job, graph, devices[: job.cores])
    if count is not None and on_cpu and distributed.count() == 1:
        if threads := thread_count(side_by_side(graph, job.agents), job.policy, count):
            restart_cpu_backend(count, threads)
        devices = available_devices(None)
    return with_host(job.policy, devices[:count]), reason


def quickest_count(job: Job, graph: fdg.FDG, devices: Sequence[jax.Device]) -> tuple[int, str]:
    """The number of host devices that is predicted to be fastest, and the reason."""
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
        return 1, "1: a program that calls Python functions on the host runs on one device"
    choice = policies.auto(
        job.algorithm, devices, policies=[job.policy], num_seeds=job.agents, graph=graph, further=False
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
        # Collectives of several programs are unordered; with sharded parameters, their order is unknown.
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
            f"--devices {count}: that is {count // processes} in each of {processes} processes,"
            f" and one has only {min(map(len, groups))}"
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
        suffix = "" if fits else f", and --num-prompts whose batches are multiples of {size}"
        return (
            f"{len(group)} of {num_devices} devices work in {listed(names, 'and')}, whose batch is the"
            f" micro-batch of {micro_batch}: give --micro-batch {size}{suffix}"
        )
    return None


def check_all_busy(job: Job, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Raises an `FdgError` if a device of `--devices` would be idle; the message suggests other numbers."""
    if not plan.idle or (job.devices is None and distributed.count() == 1):
        return  # several processes: an idle device is an error even without --devices
    count = plan.num_devices
    busy = count - len(plan.idle)
    if job.agents is not None and plan.graph.agents is not None:
        nearest = nearest_multiples(job.agents, count)
        raise FdgError(
            f"--num-seeds {job.agents} is not divisible by --devices {count}:"
            f" use --num-seeds {nearest}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # a group may leave devices out to split its batch equally; the plan shows it
        if (process := plan.idle_process(devices)) is not None:
            raise FdgError(
                f"{job.policy} leaves process {process} without work: it uses {busy} of {count} devices;"
                f" use other numbers of devices, or --num-envs that divide by them"
            )
        return
    if line := too_small_micro_batch(job.algorithm, plan):
        raise FdgError(f"{line}, or --devices {busy}")
    num_envs = getattr(job.algorithm, "num_envs", None)
    if num_envs is None or num_envs % count == 0:
        raise FdgError(f"{job.policy} uses {busy} of {count} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} is not divisible by --devices {count} under {job.policy}:"
        f" use --num-envs {nearest_multiples(num_envs, count)}, or --devices {busy}"
    )


_Choice = tuple[Any, int, str]  # policy, number of devices, reason


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

    `devices` replace `--devices`. With `plans_only`, the devices of `--devices` need not exist.
    """
    settled = settle(job, fdg.trace(job.algorithm), plans_only)
    job, text, reason = settled.job, settled.message, ""
    target: Any = job.devices if devices is None and plans_only else devices
    if target is None:
        target, reason = choose_devices(job, settled.graph)
    if reason:  # stored, so that a resumed run uses the same number
        job = dataclasses.replace(job, devices_chosen=len(target))
    if job.described.get("lag") == AUTO_LAG:
        job, text = _choose_lag(job, settled.graph, target)
    return Settled(job, settled.graph, text, target, reason)


def settle(job: Job, graph: fdg.FDG, plans_only: bool = False) -> Settled:
    """Chooses a job's policy if it is `auto`. A collective: process 0 chooses for all.

    With `plans_only`, the devices of `--devices` need not exist.
    """
    if not isinstance(job.policy, policies.Auto):
        return Settled(job, graph, "")
    devices: Any = job.devices if plans_only and job.devices else available_devices(job.devices)
    if job.devices is None and job.cores is not None:
        devices = devices[: job.cores]
    if not job.explains:
        return _choose_default(job, graph, devices)
    all_devices = job.devices is not None or distributed.count() > 1
    choice = choose_policy(job.policy, job.algorithm, graph, devices, job.agents, all_devices=all_devices)
    if job.policy.measure and not plans_only:
        choice = choose_by_timing(choice, devices, num_seeds=job.agents)
    changes = {name: getattr(choice.algorithm, name) for name in job.policy.changeable}
    entries, changes = distributed.exchange([_choice_json(choice.policy, choice.devices, ""), changes])[0]
    has_changes = any(getattr(job.algorithm, name) != value for name, value in changes.items())
    algorithm = dataclasses.replace(job.algorithm, **changes) if has_changes else None
    job = _set_policy(job, rebuild_policy(entries, CALLER), entries["devices"], algorithm)
    is_traced = job.algorithm == choice.algorithm
    return Settled(job, choice.graph if is_traced else fdg.trace(job.algorithm), choice.table)


def _choose_lag(job: Job, graph: fdg.FDG, devices: Any) -> tuple[Job, str]:
    """The job with the smallest lag within 5% of the best prediction, and the candidates as text.

    Process 0 chooses for all processes.
    """
    if job.policy.staleness:
        raise FdgError(
            f"--lag {AUTO_LAG} and --staleness {job.policy.staleness}: both say how old actors' parameters"
            " are: give one of them"
        )
    choice = choose_quickest_lag(job.policy, job.algorithm, graph, devices, job.agents)
    lag, text = distributed.exchange([choice.policy.lag, choice.table])[0]
    text += (
        f"\nlag: {lag} of {micro_batches(graph)} micro-batches per iteration, the smallest within"
        f" {TIE - 1:.0%} of the best prediction"
    )
    return job.changed(policy=dataclasses.replace(job.policy, lag=lag)), text


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
    """Chooses the lag of a policy: the result's policy has it."""
    options: dict[str, Any] = {"policies": lags(graph, policy), "all_devices": True, "further": False}
    return policies.auto(algorithm, devices, num_seeds=agents, graph=graph, **options)


def _choose_default(job: Job, graph: fdg.FDG, devices: Any) -> Settled:
    """Chooses the policy of a job without `--policy`: `GPUOnly`, unless another policy is predicted to be
    `GAIN` times as fast on the same devices. Without predictions it is `GPUOnly`.
    """
    default = Settled(_set_policy(job, policies.GPUOnly(), None), graph, "")
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):  # the time of host functions cannot be predicted
        return default
    if devices == 1 or (not isinstance(devices, int) and len(devices) == 1):
        return default
    entries = distributed.exchange(_load_or_choose(job, graph, devices))[0]
    if entries is None:
        return default
    policy = rebuild_policy(entries, CALLER)
    # `GPUOnly` uses all accelerators, also when a run is resumed on another machine.
    is_cpu = not isinstance(devices, int) and devices[0].platform == "cpu"
    count = entries["devices"] if is_cpu or not isinstance(policy, policies.GPUOnly) else None
    return Settled(_set_policy(job, policy, count), graph, f"policy: {entries['reason']}")


def _load_or_choose(job: Job, graph: fdg.FDG, devices: Any) -> dict[str, Any] | None:
    """The cached choice as JSON, else a new one, which is cached; None if no time can be predicted."""
    try:
        file = _cache_file(job, graph, devices)
        if file is not None:
            # An invalid file is replaced.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FdgError):
                content = json.loads(file.read_text())
                policy = rebuild_policy(content, CALLER)
                return _choice_json(policy, int(content["devices"]), str(content["reason"]))
        choice = _choice_json(*_choose_quickest(job, graph, devices))
        if file is not None and distributed.is_first():
            with contextlib.suppress(OSError):
                file.parent.mkdir(mode=0o700, exist_ok=True)
                files.write(file, json.dumps(choice).encode())
    except FdgError:  # such as a kind of device without known rates
        return None
    return choice


def _choose_quickest(job: Job, graph: fdg.FDG, devices: Any) -> _Choice:
    """`GPUOnly` on its fastest number of devices, or a policy that is much faster on equally many."""
    if job.devices is None and job.cores is not None and devices[0].platform == "cpu":
        default = policies.GPUOnly()
        count, reason = quickest_count(dataclasses.replace(job, policy=default), graph, devices)
        if count == 1:
            return default, count, reason
        devices = devices[:count]
    options = {"all_devices": True, "further": False}
    return _best_or_default(choose_policy(job.policy, job.algorithm, graph, devices, job.agents, **options))


GAIN = 1.3  # predicted speed-up that another policy needs; the usual error of predictions is smaller


def _best_or_default(choice: Choice) -> _Choice:
    """The fastest candidate, or `GPUOnly` if it is at most `GAIN` times as slow."""
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


def _set_policy(job: Job, policy: Any, count: int | None, algorithm: Any = None) -> Job:
    """The job with the chosen policy and `count` devices (None: not chosen yet)."""
    if count is None or job.devices is not None or distributed.count() > 1:
        count = job.devices_chosen
    return job.changed(algorithm, policy, {"policy_asked": job.described["policy"]}, devices_chosen=count)


def _cache_file(job: Job, graph: fdg.FDG, devices: int | Sequence[jax.Device]) -> Path | None:
    """The cache file for this job, machine and version of the cost model; None without a cache."""
    directory = cache_directory()
    if directory is None:
        return None
    rates = dataclasses.replace(cluster_for(devices), note="")  # the note depends on the current load
    jaxpr = re.sub("0x[0-9a-f]+", "", str(graph.jaxpr))  # without addresses of memory
    inputs = [jaxpr, *map(repr, (rates, devices, job.policy, job.agents, job.devices)), jax.__version__]
    digest = hashlib.sha256("\n".join(inputs).encode())
    for file in sorted(Path(costs.__file__).parent.glob("*.py")):  # a changed cost model chooses again
        digest.update(file.read_bytes())
    return directory / "choices" / f"{digest.hexdigest()[:32]}.json"


def _choice_json(policy: Any, devices: int, reason: str) -> dict[str, Any]:
    return {**describe_policy(policy), "devices": devices, "reason": reason}
