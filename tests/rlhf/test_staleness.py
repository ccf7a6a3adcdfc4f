"""The metric `staleness`: by how many iterations responses are older than the learner, counted by hand."""

import functools

import jax
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import partial_eval

import fdg
import policies
from fdg import jaxprs
from tests.rlhf.small import made


@functools.cache
def graph_of(name):
    return fdg.trace(made(name, num_epochs=2))


def reported(name, policy, iterations):
    """The metric of each iteration, computed with nothing else than it needs."""
    plan = fdg.place(graph_of(name), policy, 2)
    jaxpr, first = jaxprs.open_jaxpr(plan.graph.jaxpr), graph_of(name).state
    names = sorted(plan.graph.metrics)
    start = [np.zeros(x.shape, x.dtype) if x.dtype == np.int32 else None for x in jax.tree.leaves(first)]
    if plan.delayed is not None:
        start += [start[i] for i in plan.delayed.leaves] * plan.delayed.staleness
    wanted = [False] * len(start) + [name == "staleness" for name in names]
    while True:  # also what the next iteration's needs
        live, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        if not any(u and not w for u, w in zip(used, wanted, strict=False)):
            break
        wanted = [u or w for u, w in zip(used, wanted, strict=False)] + wanted[len(start) :]
    constants = jaxpr.constvars, jaxprs.constants_of(plan.graph.jaxpr)
    small = jaxprs.build(live.invars, live.outvars, live.eqns, *constants, checked=False)
    step = jax.jit(core.jaxpr_as_fun(small))
    state, found = [x for x, u in zip(start, used, strict=True) if u], []
    for _ in range(iterations):
        *state, metric = step(*state)
        found.append(float(metric))
    return found


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf"])
def test_it_is_zero_where_both_sides_share_their_devices(name):
    assert reported(name, policies.Colocated(), 3) == [0, 0, 0]
