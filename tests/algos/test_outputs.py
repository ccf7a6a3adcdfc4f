"""What a network of one's own gives is looked at before anything is made of it."""

import jax.numpy as jnp
import pytest

from algos import checks
from fdg.errors import FdgError


@pytest.mark.parametrize("output", [(jnp.zeros(2),), (jnp.zeros(2),) * 3, jnp.zeros(2), None])
def test_an_actor_critic_gives_a_pair(output):
    with pytest.raises(FdgError, match=r"an actor-critic gives a pair, \(policy \[4, P\], value \[4\]\)"):
        checks.check_policy_and_value(output, (4,))
    assert checks.check_policy_and_value([1, 2], (4,)) == (1, 2)
