"""Values of what each step of a rollout led to, computed only where an episode was cut short."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.losses import values_after
from envs import TimeStep


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_rows_follow_each_other_but_where_they_are_cut(share):
    """Several truncations of one environment in one rollout, in the last row too; both flags at once."""
    steps, environments = 9, 5
    rng = np.random.default_rng(int(10 * share))
    value, final = rng.normal(size=(2, steps, environments)).astype(np.float32)
    truncated, terminated = rng.uniform(size=(2, steps, environments)) < share
    calls = []

    def value_of(observation):
        calls.append(observation.shape)
        return 10.0 * observation[:, 0]

    time_step = TimeStep(None, None, terminated, truncated, jnp.asarray(final)[..., None], None, None)
    found = jax.jit(lambda value: values_after(value, time_step, value_of))(value)
    assert calls and set(calls) == {(environments, 1)}  # one row at a time, not all T
    for t in range(steps):
        for b in range(environments):
            if terminated[t, b]:
                continue  # worth nothing, whatever it says
            cut = truncated[t, b] or t == steps - 1
            assert found[t, b] == pytest.approx(10 * final[t, b] if cut else value[t + 1, b])
