"""Every operation of every preset has a rule for a batch, and a class of work."""

import pytest

from bench.exchanges import JOBS, graph_of
from fdg import jaxprs
from fdg.batch.rules import RULES
from fdg.errors import FdgError
from fdg.jaxprs.classes import CLASSES, VIEWS

CLASSIFIED = VIEWS.union(*CLASSES.values())
ALL = [(algorithm, environment) for algorithm in JOBS for environment in JOBS[algorithm].split()]


def operations(jaxpr, found=None, seen=None):
    """Equations without bodies, by primitive name."""
    found, seen = ({}, set()) if found is None else (found, seen)
    if id(jaxpr) not in seen:
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            inner = jaxprs.bodies(eqn)
            if not inner:
                found.setdefault(eqn.primitive.name, eqn)
            for body in inner:
                operations(body.jaxpr, found, seen)
    return found


@pytest.mark.parametrize(("algorithm", "environment"), ALL)
def test_every_operation_of_a_preset_is_known(algorithm, environment):
    try:
        graph = graph_of(algorithm, environment)
    except FdgError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    found = operations(jaxprs.open_jaxpr(graph.jaxpr))
    without_inputs = {name for name, eqn in found.items() if not eqn.invars}  # `iota`: no batch to follow
    assert found.keys() - RULES.keys() - without_inputs - {"fragment_boundary"} == set()
    assert found.keys() - CLASSIFIED == set()
