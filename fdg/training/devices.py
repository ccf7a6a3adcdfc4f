"""The devices of a job: which there are, how many threads host devices get, and whether all have work."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import fdg
from fdg import jaxprs
from fdg.cores import usable_cores
from fdg.errors import FdgError, listed
from fdg.processes import distributed
from fdg.running.host_devices import threads_for
from fdg.training.settings import nearest_multiples
from fdg.training.sweep import unwrap_sweep

ONE_THREAD_FLOPS = 12_000_000  # an operation with fewer FLOPs gains nothing from a second thread


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


def thread_count(graph: fdg.FDG, agents: int | None, policy: Any, devices: int) -> int:
    """Size of XLA's thread pool for a job on host devices; `graph` is of one agent.

    A program with one group is lowered so that each device waits in one collective at a time
    (`lowering.ordering`); then one thread per device is enough.

    A single device with small operations gets one thread: passing operations between threads takes longer
    than running them in parallel saves. Milliseconds per iteration of PPO on CartPole-v1, with one thread and
    with four: 1.9 and 2.4 with 4 environments, 10.5 and 12.2 with 32, 22 and 20 with 64.
    """
    if devices > 1:
        placed = {} if agents is not None else policy.place(["cpu"] * devices)
        groups = {placed[f.role] for f in graph.fragments if f.role in placed}
        # Collectives of several programs, and those of sharded parameters, have no known order.
        in_order = len(groups) <= 1 and not any(group.shards for group in groups)
        return threads_for(devices, in_order)
    largest = (agents or 1) * jaxprs.largest_cost(jaxprs.open_jaxpr(graph.jaxpr))
    return 1 if largest < ONE_THREAD_FLOPS else usable_cores()


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
