"""The metric `staleness`: by how many iterations the parameters of responses lag behind the learner's."""

import functools

import jax
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import partial_eval

import fdg
import policies
from fdg import jaxprs
from tests.rlhf.small import make


@functools.cache
def graph_of(name):
    return fdg.trace(make(name, num_epochs=2))


def staleness_metric(name, policy, iterations):
    """The metric of each iteration, from a jaxpr without everything that it does not depend on."""
    plan = fdg.place(graph_of(name), policy, 2)
    jaxpr, first = jaxprs.open_jaxpr(plan.graph.jaxpr), graph_of(name).state
    names = sorted(plan.graph.metrics)
    start = [np.zeros(x.shape, x.dtype) if x.dtype == np.int32 else None for x in jax.tree.leaves(first)]
    if plan.delayed is not None:
        start += [start[i] for i in plan.delayed.leaves] * plan.delayed.staleness
    wanted = [False] * len(start) + [name == "staleness" for name in names]
    while True:  # includes what the metric of later iterations depends on
        live, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        if not any(u and not w for u, w in zip(used, wanted, strict=False)):
            break
        wanted = [u or w for u, w in zip(used, wanted, strict=False)] + wanted[len(start) :]
    constants = jaxpr.constvars, jaxprs.constants_of(plan.graph.jaxpr)
    pruned = jaxprs.build(live.invars, live.outvars, live.eqns, *constants, checked=False)
    step = jax.jit(core.jaxpr_as_fun(pruned))
    state, found = [x for x, u in zip(start, used, strict=True) if u], []
    for _ in range(iterations):
        *state, metric = step(*state)
        found.append(float(metric))
    return found


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf"])
def test_staleness_is_zero_on_shared_devices(name):
    assert staleness_metric(name, policies.Colocated(), 3) == [0, 0, 0]
