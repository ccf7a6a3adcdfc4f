"""The devices of a job: how many, with how many threads, and whether all that were asked for have work."""

import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

import fdg
import policies
from fdg import jaxprs
from fdg.cores import usable_cores
from fdg.errors import FdgError
from fdg.lowering.host_calls import calls_host
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.running.host_devices import begin_anew, has_few_threads, make_host_devices, threads_for
from fdg.training.job import Job

ONE_THREAD_FLOPS = 12_000_000  # of the largest operation: from there on a second core is worth its thread


def devices_of(job: Job, graph: fdg.FDG) -> tuple[list[jax.Device], str]:
    """The devices of a job, and why they are so many where `--devices` is absent; else "".

    Host devices share a pool of as many threads as are enough for them (`running.host_devices`), which is
    chosen before anything is compiled.

    Args:
      job: what to train, and how.
      graph: its algorithm's.

    Raises:
      FdgError: there are not so many as it asks for, or its policy cannot be carried out on those there are.
    """
    devices = available_devices(job.devices)
    count, why = job.devices_chosen or job.devices, ""
    if count is None and job.cores is not None and devices[0].platform == "cpu":
        count, why = quickest_count(job, graph, devices[: job.cores])
    if count is not None and devices[0].platform == "cpu" and distributed.count() == 1:
        if threads := threads_of(graph, job.policy, count, job.agents):
            begin_anew(count, threads)
        devices = available_devices(None)
    return with_host(job.policy, devices[:count]), why


def quickest_count(job: Job, graph: fdg.FDG, devices: Sequence[jax.Device]) -> tuple[int, str]:
    """Chooses the number of host devices: how many of some, and why.

    Raises:
      PlanError: the policy can be carried out on none.
    """
    if calls_host(jaxprs.open_jaxpr(graph.jaxpr).eqns):
        return 1, "1: what calls Python functions on the host runs in one place"
    choice = policies.auto(
        job.algorithm, devices, policies=[job.policy], num_seeds=job.agents, graph=graph, further=False
    )
    return choice.devices, choice.reason


def threads_of(graph: fdg.FDG, policy: Any, devices: int, num_seeds: int | None = None) -> int | None:
    """Threads of XLA's pool for a job on so many host devices; None for as many as there are.

    One for a single device whose operations are all small: those that XLA could run at the same time are
    handed from thread to thread, which takes longer than they do. PPO on CartPole-v1 with 4 environments
    takes 1.9 ms an iteration with one thread and 2.4 with four, with 32 10.5 and 12.2, with 64 22 and 20.

    Args:
      graph: of the job's algorithm.
      policy: how it is distributed.
      devices: how many host devices it runs on.
      num_seeds: how many agents it trains, None for one.
    """
    jaxpr = jaxprs.open_jaxpr(graph.jaxpr)
    if calls_host(jaxpr.eqns):
        return None
    if devices > 1:
        placed = {} if num_seeds is not None else policy.place(["cpu"] * devices)
        groups = {placed[f.role] for f in graph.fragments if f.role in placed}
        # Several programs have no order between them; parameters that are split, none that is known.
        in_order = len(groups) <= 1 and not any(group.shards for group in groups)
        return threads_for(devices, in_order)
    return 1 if (num_seeds or 1) * jaxprs.largest_operation(jaxpr) < ONE_THREAD_FLOPS else usable_cores()


def with_enough_threads(job: Job, engine: fdg.Engine, graph: fdg.FDG, begins: bool = True) -> fdg.Engine:
    """The engine of a job; made again on a backend of more threads where its program needs them.

    A program of one group is lowered so that its devices wait in one place at a time, and then a thread a
    device is enough. XLA's partitioner may exchange more than that: its program is read, before any array
    lies on a device.

    Args:
      job: what is trained.
      engine: on the devices of `devices_of`.
      graph: the algorithm's, of which the engine's plan has one that is made for its policy.
      begins: whether its `init` is needed, which is a program of its own and takes as long to compile.

    Raises:
      FdgError: it needs more threads, and something lies on the backend already.
    """
    count = len(engine.devices)
    if not has_few_threads(count):
        return engine
    with ThreadPoolExecutor(1) as pool:
        in_order = pool.submit(engine.is_in_order)
        if begins:
            engine.compile_init(job.seed)
    if in_order.result():
        return engine
    gc.collect()  # of weights that were read, say: a backend that holds arrays cannot start again
    begin_anew(count, threads_for(count))
    if has_few_threads(count):
        raise FdgError(
            f"--devices {count}: this program's devices may wait for each other for ever on"
            f" {os.environ.get('PJRT_NPROC')} threads: set PJRT_NPROC={threads_for(count)}"
        )
    return fdg.compile(job.algorithm, job.policy, jax.devices()[:count], job.agents, graph)


def available_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices, or all; of several processes, as many of each.

    On a CPU so many are made, unless JAX has started already.

    Raises:
      FdgError: there are not so many.
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


def check_all_busy(job: Job, plan: fdg.Plan, devices: Sequence[jax.Device]) -> None:
    """Refuses to leave devices idle that were asked for by number, and says which numbers would do."""
    if not plan.idle or (job.devices is None and distributed.count() == 1):
        return  # each of several processes needs something to do
    there = plan.num_devices
    busy = there - len(plan.idle)
    if job.agents is not None:
        nearest = _multiples(job.agents, there)
        raise FdgError(
            f"--num-seeds {job.agents} does not divide by --devices {there}:"
            f" use --num-seeds {nearest}, or --devices {busy}"
        )
    if len(plan.groups) > 1:  # of several groups, one takes what its batch divides by; the plan says which
        working = {devices[i].process_index for group in plan.groups for i in group.devices}
        for process in range(distributed.count()):
            if process not in working:
                raise FdgError(
                    f"{job.policy} leaves process {process} without work: it uses {busy} of {there} devices;"
                    f" use other numbers of devices, or --num-envs that divide by them"
                )
        return
    num_envs = getattr(job.algorithm, "num_envs", None)
    if num_envs is None or num_envs % there == 0:
        raise FdgError(f"{job.policy} uses {busy} of {there} devices: use --devices {busy}")
    raise FdgError(
        f"--num-envs {num_envs} does not divide by --devices {there} under {job.policy}:"
        f" use --num-envs {_multiples(num_envs, there)}, or --devices {busy}"
    )


def _multiples(number: int, of: int) -> str:
    below, above = number // of * of, -(-number // of) * of
    return f"{below} or {above}" if below else str(above)
