"""The devices of a job: those that there are, and whether all that were asked for get something to do."""

import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

import fdg
from fdg.errors import FdgError
from fdg.placing.policy import with_host
from fdg.processes import distributed
from fdg.running.host_devices import begin_anew, has_few_threads, make_host_devices, threads_for
from fdg.training.default_devices import Choice, choose, threads_of
from fdg.training.job import Job


def with_enough_threads(job: Job, engine: fdg.Engine, graph: fdg.FDG, begins: bool = True) -> fdg.Engine:
    """The engine of a job; made again on a backend of more threads where it needs them.

    Where host devices share a batch, a command begins with as many threads as are enough for programs whose
    devices wait in one place at a time. Whether one does is seen when it is compiled, and that is before any
    array lies on a device.

    Args:
      job: what is trained.
      engine: on the devices of `devices_of`.
      graph: the algorithm's, of which the engine's plan has one that is made for its policy.
      begins: whether its `init` is needed, which is a program of its own and takes as long to compile.

    Raises:
      FdgError: it needs more threads, and something lies on the backend already.
    """
    if not has_few_threads(len(engine.devices)):
        return engine
    with ThreadPoolExecutor(1) as pool:
        in_order = pool.submit(engine.is_in_order)
        if begins:
            engine.compile_init(job.seed)
    if in_order.result():
        return engine
    gc.collect()  # of weights that were read, say: a backend that holds arrays cannot start again
    devices, _ = devices_of(job, graph, in_order=False)
    if has_few_threads(len(devices)):  # the backend could not start again
        raise FdgError(
            f"--devices {len(devices)}: this program's devices may wait for each other for ever on"
            f" {os.environ.get('PJRT_NPROC')} threads: set PJRT_NPROC={threads_for(len(devices))}"
        )
    return fdg.compile(job.algorithm, job.policy, devices, job.agents, graph)


def devices_of(job: Job, graph: fdg.FDG, in_order: bool = True) -> tuple[list[jax.Device], Choice | None]:
    """The devices of a job, and why they are so many where nobody said how many.

    Args:
      job: what to train, and how.
      graph: its algorithm's.
      in_order: whether to begin with the threads that are enough for programs in one order.

    Raises:
      FdgError: there are not so many as it asks for, or its policy cannot be carried out on those there are.
    """
    devices = available_devices(job.devices)
    choice = None
    count = job.devices_chosen or job.devices
    if count is None and job.cores is not None and devices[0].platform == "cpu":
        choice = choose(graph, job.policy, min(job.cores, len(devices)), job.agents)
        count = choice.devices
    if count is not None and devices[0].platform == "cpu" and distributed.count() == 1:
        if threads := threads_of(graph, count, job.agents, in_order):
            begin_anew(count, threads)
        devices = available_devices(None)
    return with_host(job.policy, devices[:count]), choice


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
