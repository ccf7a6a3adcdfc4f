"""Values of what each step of a rollout led to, computed only where an episode was cut short."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
from algos.rollout import Recollection, values_after
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


@pytest.mark.parametrize(
    ("kind", "env", "fields"),
    [
        (algos.RecurrentPPO, "probe:truncation", {"memory": "transformer", "memory_heads": 2}),
        (algos.MAPPO, "probe:agents", {"recurrent": True}),
    ],
)
def test_with_a_memory_they_are_those_of_every_row(kind, env, fields):
    """Valued one by one: what each step led to, by the memory after it; the next row has it, but at ends."""
    steps, environments = 5, 4
    algorithm = kind(env=envs.make(env), num_envs=environments, memory_size=4, hidden=(4,), **fields)
    rng = np.random.default_rng(0)
    agents = algorithm._agents
    shape = (steps + 1, environments, *agents, *algorithm.env.observation_space.shape)
    seen = jnp.asarray(rng.normal(size=shape), jnp.float32)
    ended, terminated = rng.uniform(size=(2, steps, environments)) < 0.4
    at_end = ended.reshape(*ended.shape, *(1,) * (len(shape) - 2))
    final = jnp.where(at_end, jnp.asarray(rng.normal(size=shape), jnp.float32)[1:], seen[1:])
    start = np.concatenate([np.ones((1, environments), bool), ended[:-1]])
    parameters = jax.jit(algorithm._network.init)(jax.random.key(0), seen[:1])
    memory = algorithm._network.memory(environments)
    time_step = TimeStep(None, None, ended & terminated, ended & ~terminated, final, None, None)

    @jax.jit
    def both(parameters):
        _, value, memories = algorithm._unroll(parameters, memory, seen[:-1], jnp.asarray(start))
        within = jnp.zeros(environments, bool)
        one_by_one = jax.lax.map(
            lambda row: algorithm._one_step(parameters, row[0], Recollection(row[1], within))[1],
            (final, memories),
        )
        return algorithm._next_value(parameters, None, value, time_step, memories), one_by_one

    found, expected = both(parameters)
    counts = ~np.asarray(time_step.terminated)
    np.testing.assert_allclose(np.asarray(found)[counts], np.asarray(expected)[counts], rtol=1e-4, atol=1e-6)
