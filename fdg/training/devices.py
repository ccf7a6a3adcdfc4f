"""Chooses a job's devices and XLA's CPU threads, and checks that no requested device is idle."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import fdg
import policies
from fdg import jaxprs
from fdg.cores import usable_cores
from fdg.errors import FdgError, listed
from fdg.lowering.host_calls import calls_host
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.running.host_devices import make_host_devices, restart_cpu_backend, threads_for
from fdg.tracing.trace import side_by_side
from fdg.training.job import Job
from fdg.training.settings import nearest_multiples
from fdg.training.sweep import unswept

ONE_THREAD_FLOPS = 12_000_000  # a largest operation with fewer FLOPs gains nothing from a second thread


def devices_of(job: Job, graph: fdg.FDG) -> tuple[list[jax.Device], str]:
    """A job's devices, and the reason for their number if `--devices` is absent (else "").

    Host devices share one thread pool. It is sized here, before anything is compiled
    (`running.host_devices`).

    Args:
      job: what to train, and how.
      graph: the graph of its algorithm.

    Raises:
      FdgError: there are fewer devices than requested, or the policy cannot be carried out on them.
    """
    devices = available_devices(job.devices)
    count, why = job.devices_chosen or job.devices, ""
    if count is None and job.cores is not None and devices[0].platform == "cpu":
        count, why = quickest_count(job, graph, devices[: job.cores])
    if count is not None and devices[0].platform == "cpu" and distributed.count() == 1:
        if threads := threads_of(side_by_side(graph, job.agents), job.policy, count):
            restart_cpu_backend(count, threads)
        devices = available_devices(None)
    return with_host(job.policy, devices[:count]), why


def quickest_count(job: Job, graph: fdg.FDG, devices: Sequence[jax.Device]) -> tuple[int, str]:
    """The number of host devices that is predicted to be fastest, and the reason.

    Raises:
      PlanError: the policy cannot be carried out on any number of them.
    """
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
        return 1, "1: a program that calls Python functions on the host runs on one device"
    choice = policies.auto(
        job.algorithm, devices, policies=[job.policy], num_seeds=job.agents, graph=graph, further=False
    )
    return choice.devices, choice.reason


def threads_of(graph: fdg.FDG, policy: Any, devices: int) -> int | None:
    """Size of XLA's thread pool for a job on host devices; None to leave the pool as it is.

    A program of one group is lowered so that each device waits in one collective at a time
    (`lowering.ordering`); then one thread for each device is enough.

    A single device with small operations gets one thread: passing operations between threads takes longer
    than running them in parallel saves. Milliseconds of an iteration of PPO on CartPole-v1, with one thread
    and with four: 1.9 and 2.4 with 4 environments, 10.5 and 12.2 with 32, 22 and 20 with 64.

    Args:
      graph: the graph of the job's algorithm, of one agent or of several.
      policy: the distribution policy.
      devices: the number of host devices.
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
    return 1 if (graph.agents or 1) * jaxprs.largest_operation(jaxpr) < ONE_THREAD_FLOPS else usable_cores()


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices, or all; with several processes, the same number from each.

    On a CPU, configures that many host devices, unless JAX has started already.

    Raises:
      FdgError: there are fewer devices.
    """
    processes = distributed.count()
    if count is not None:
        make_host_devices(count // processes)
    devices = jax.devices()
    if count is None:
        return devices
    if count > len(devices):
        kind = devices[0].platform
        fix = "" if kind == "cpu" else ", or set JAX_PLATFORMS=cpu for host devices"
        raise FdgError(
            f"--devices {count}: there {'is' if len(devices) == 1 else 'are'} {len(devices)} of kind {kind}:"
            f" use --devices {len(devices)}{fix}"
        )
    if processes == 1:
        return devices[:count]
    each = [[d for d in devices if d.process_index == i][: count // processes] for i in range(processes)]
    if min(map(len, each)) < count // processes:
        raise FdgError(
            f"--devices {count}: that is {count // processes} in each of {processes} processes,"
            f" and one has only {min(map(len, each))}"
        )
    return [device for some in each for device in some]


def too_small_micro_batch(algorithm: Any, plan: fdg.Plan) -> str | None:
    """Which fragments idle devices since a micro-batch is smaller than their group, and the one that would
    not; None where no micro-batch does.

    Args:
      algorithm: what is planned; None is said of one without a field `micro_batch`.
      plan: of it.
    """
    algorithm = unswept(algorithm)
    micro = getattr(algorithm, "micro_batch", None)
    if micro is None:
        return None
    for name, left in plan.unfit:
        group = next(one for one in plan.groups if one.name == name)
        asked = len(group) + len(left)
        rows = asked // group.model
        here = [f for f in plan.graph.fragments if f.batch_size and plan.group_of(f.name) == group]
        narrow = [f"`{f.name}`" for f in here if f.batch_size == micro]
        if not (left and narrow and micro % rows):
            continue
        wanted = -(-micro // rows) * rows
        try:
            dataclasses.replace(algorithm, micro_batch=wanted)
            fits = all(f.batch_size % rows == 0 for f in here if f.batch_size not in (None, micro))
        except FdgError:
            fits = False
        more = "" if fits else f", and a number of prompts (--num-prompts) whose batches divide by {wanted}"
        return (
            f"{len(group)} of {asked} devices work in {listed(narrow, 'and')}, whose batch is the micro-batch"
            f" of {micro}: give --micro-batch {wanted}{more}"
        )
    return None


def check_all_busy(job: Job, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Raises an `FdgError` if a device of an explicit `--devices` would be idle; suggests other numbers."""
    if not plan.idle or (job.devices is None and distributed.count() == 1):
        return  # with several processes, an idle device is an error even without --devices
    there = plan.num_devices
    busy = there - len(plan.idle)
    if job.agents is not None and plan.graph.agents is not None:
        nearest = nearest_multiples(job.agents, there)
        raise FdgError(
            f"--num-seeds {job.agents} does not divide by --devices {there}:"
            f" use --num-seeds {nearest}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # a group may use fewer devices so that its batch divides; the plan shows it
        if (process := plan.idle_process(devices)) is not None:
            raise FdgError(
                f"{job.policy} leaves process {process} without work: it uses {busy} of {there} devices;"
                f" use other numbers of devices, or --num-envs that divide by them"
            )
        return
    if line := too_small_micro_batch(job.algorithm, plan):
        raise FdgError(f"{line}, or --devices {busy}")
    num_envs = getattr(job.algorithm, "num_envs", None)
    if num_envs is None or num_envs % there == 0:
        raise FdgError(f"{job.policy} uses {busy} of {there} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} does not divide by --devices {there} under {job.policy}:"
        f" use --num-envs {nearest_multiples(num_envs, there)}, or --devices {busy}"
    )
