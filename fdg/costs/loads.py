"""The work of each program of a plan on one of its devices: worked out once, then priced on any cluster."""

import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core

from fdg import jaxprs
from fdg.batch.collective import Collective
from fdg.costs.compiled import HERE, Compiled, Target, programs
from fdg.jax_internals import ClosedJaxpr
from fdg.lowering.agents import mapped
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


def loads(plan: Plan, target: Target = HERE) -> tuple[Load, ...]:
    """The programs of a plan, in its order; nothing is compiled or allocated.

    Args:
      plan: any.
      target: the devices that it is for.
    """
    arrays = [2 * len(plan.graph.state_axes)]
    if plan.schedule is not None:
        arrays = [len(call.inputs) + len(call.outputs) for call, _ in plan.schedule.calls()]
    return tuple(
        Load(one.name, one.group, _shared(_work(one), one.group), count, planned.collectives)
        for planned, one, count in zip(plan.programs, programs(plan, target), arrays, strict=True)
    )


def _work(one: Compiled) -> Work:
    """On one device, of all the agents that it has."""
    if one.agents == 1:
        return work_of(one.jaxpr, one.axes, one.rows)
    return _agents(one.jaxpr, one.agents, one.together)


@functools.lru_cache(maxsize=64)
def _agents(jaxpr: ClosedJaxpr, agents: int, together: int) -> Work:
    """Of so many on one device."""
    inputs: Any = jaxprs.open_jaxpr(jaxpr).invars
    shapes = [jax.ShapeDtypeStruct((agents, *v.aval.shape), v.aval.dtype) for v in inputs]
    return work_of(jax.make_jaxpr(mapped(core.jaxpr_as_fun(jaxpr), agents, together))(*shapes))


def _shared(work: Work, group: Group) -> Work:
    """Of one device where `model` of them share a part of the batch: parameters, so products, are split."""
    if group.model == 1:
        return work
    products = {
        product._replace(n=max(1, product.n // group.model)): count
        for product, count in work.products.items()
    }
    return dataclasses.replace(work, products=products)
