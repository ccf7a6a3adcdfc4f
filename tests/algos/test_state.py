"""An iteration replaces every leaf of the state, keys and counts included."""

import dataclasses

import jax
import pytest

import algos
from tests.conformance.test_algorithms import OFFLINE, SMALL


@pytest.mark.parametrize("name", algos.names("environments"))
def test_iteration_replaces_every_leaf(name):
    """Compares inputs and outputs of the traced iteration, without compiling it."""
    algorithm = SMALL[name]()
    if hasattr(algorithm, "normalize_reward"):
        algorithm = dataclasses.replace(algorithm, normalize_reward=True, normalize_observation=True)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda state: algorithm.iterate(state)[0])(state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    variables = zip(leaves, traced.jaxpr.invars, traced.jaxpr.outvars, strict=True)
    unchanged = [jax.tree_util.keystr(path) for (path, _), before, after in variables if before is after]
    # The dataset and its statistics are constant.
    fixed = (".replay", ".observation_statistics") if name in OFFLINE else ()
    assert not [path for path in unchanged if not path.startswith(fixed)]
