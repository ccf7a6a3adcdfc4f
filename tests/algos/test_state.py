"""What an iteration hands on: every leaf of the state is a new one, keys and counts among them."""

import dataclasses

import jax
import pytest

import algos
from tests.conformance.test_algorithms import OFFLINE, SMALL


@pytest.mark.parametrize("name", algos.names("environments"))
def test_nothing_in_the_state_stands_still(name):
    """Read from the traced iteration, which is not compiled."""
    algorithm = SMALL[name]()
    if hasattr(algorithm, "normalize_reward"):
        algorithm = dataclasses.replace(algorithm, normalize_reward=True, normalize_observation=True)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda state: algorithm.iterate(state)[0])(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    variables = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars, strict=True)
    still = [jax.tree_util.keystr(path) for (path, _), before, after in variables if before is after]
    # A data set stays as it is, and so do the statistics of it.
    fixed = (".replay", ".observation_statistics") if name in OFFLINE else ()
    assert not [path for path in still if not path.startswith(fixed)]
