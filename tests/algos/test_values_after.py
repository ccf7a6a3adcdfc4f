"""`values_after`: values of next observations, computed only where an episode is truncated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.losses import values_after
from envs import TimeStep


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_values_after(share):
    """Several truncations per environment, also in the last row, and rows with both flags."""
    steps, environments = 9, 5
    rng = np.random.default_rng(int(10 * share))
    value, final = rng.normal(size=(2, steps, environments)).astype(np.float32)
    truncated, terminated = rng.uniform(size=(2, steps, environments)) < share
    calls = []

    def value_of(observation):
        calls.append(observation.shape)
        return 10.0 * observation[:, 0]

    time_step = TimeStep(None, None, terminated, truncated, jnp.asarray(final)[..., None], None, None)
    result = jax.jit(lambda value: values_after(value, time_step, value_of))(value)
    assert calls and set(calls) == {(environments, 1)}  # one row at a time, not all T
    for t in range(steps):
        for b in range(environments):
            if terminated[t, b]:
                continue  # the value after a termination is not used
            truncated_or_last = truncated[t, b] or t == steps - 1
            assert result[t, b] == pytest.approx(10 * final[t, b] if truncated_or_last else value[t + 1, b])
