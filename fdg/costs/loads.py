"""The work of each program of a plan on one of its devices: worked out once, then priced on any cluster.

GPUOnly on 4 devices         one program, a quarter of the batch
actors (3) + learners (1)    act+step on a third of it; learn on all of it
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.placing.plan import Plan
from fdg.placing.policy import Group
from fdg.profiling.work import Work, work_of


@dataclasses.dataclass(frozen=True)
class Load:
    """A program of a plan, each time that it runs.

    Attributes:
      program: its name.
      group: where it runs.
      work: of one of the group's devices.
      arrays: that the host hands over and gets back.
      collectives: among the group's devices.
    """

    program: str
    group: Group
    work: Work
    arrays: int
    collectives: tuple[Collective, ...]


def loads(plan: Plan) -> tuple[Load, ...]:
    """The programs of a plan, in its order; nothing is compiled or allocated."""
    groups = {group.name: group for group in plan.groups}
    if plan.schedule is None:
        (planned,), (group,) = plan.programs, plan.groups
        state = len(plan.graph.state_axes)
        return (Load(planned.name, group, _whole(plan, group), 2 * state, planned.collectives),)
    found = []
    for planned, (call, _) in zip(plan.programs, plan.schedule.calls(), strict=True):
        group = groups[call.group]
        work = work_of(call.jaxpr, [value.axis for value in call.inputs], group.rows)
        arrays = len(call.inputs) + len(call.outputs)
        found.append(Load(planned.name, group, _shared(work, group), arrays, planned.collectives))
    return tuple(found)


def _whole(plan: Plan, group: Group) -> Work:
    """Of an iteration on one device; with agents, of those that one device has."""
    if plan.num_seeds is None:
        return _shared(_iteration(plan.graph.jaxpr, plan.graph.state_axes, group.rows), group)
    return _agents(plan.graph.jaxpr, plan.num_seeds // len(group))


@functools.lru_cache(maxsize=64)
def _iteration(jaxpr: core.ClosedJaxpr, axes: tuple[int | None, ...], rows: int) -> Work:
    return work_of(jaxpr, axes, rows)


@functools.lru_cache(maxsize=64)
def _agents(jaxpr: core.ClosedJaxpr, agents: int) -> Work:
    """Of so many on one device."""
    inputs: Sequence[Any] = jaxprs.open_jaxpr(jaxpr).invars
    shapes = [jax.ShapeDtypeStruct((agents, *v.aval.shape), v.aval.dtype) for v in inputs]
    return work_of(jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr)))(*shapes))


def _shared(work: Work, group: Group) -> Work:
    """Of one device where `model` of them share a part of the batch: parameters, so products, are split."""
    if group.model == 1:
        return work
    products = {
        product._replace(n=max(1, product.n // group.model)): count
        for product, count in work.products.items()
    }
    return dataclasses.replace(work, products=products)
