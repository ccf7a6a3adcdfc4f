"""Errors about outputs of user-defined networks."""

import jax.numpy as jnp
import pytest

from algos import checks
from fdg.errors import FdgError


@pytest.mark.parametrize("output", [(jnp.zeros(2),), (jnp.zeros(2),) * 3, jnp.zeros(2), None])
def test_actor_critic_output(output):
    with pytest.raises(FdgError, match=r"an actor-critic gives a pair, \(policy \[4, P\], value \[4\]\)"):
        checks.check_policy_and_value(output, (4,))
    assert checks.check_policy_and_value([1, 2], (4,)) == (1, 2)
