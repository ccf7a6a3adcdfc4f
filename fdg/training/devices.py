"""Checks that all devices of a job have work, and says which sizes would give them work."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import fdg
from fdg.errors import FdgError, listed
from fdg.training.settings import nearest_multiples
from fdg.training.sweep import unwrap_sweep


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
