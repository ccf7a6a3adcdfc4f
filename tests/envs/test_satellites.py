"""Satellites: fleet workers that hold the actor. Ray is mocked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from envs import from_ray, host
from envs.host import HostEnvironment
from fdg.errors import FdgError
from tests.envs.test_fleet_played import Counting, ray  # noqa: F401

SIZES = {"num_envs": 5, "num_steps": 7, "total_steps": 1000}


def fleet(acts):
    return HostEnvironment(from_ray.FleetSource(Counting(), 2, 1.0, acts), restarts=100)


def trained(algorithm):
    """Parameters and metrics of three iterations, with actors and learner on two devices."""
    engine = fdg.compile(algorithm, policies.SingleLearnerCoarse(), jax.devices()[:2])
    state, metrics = engine.run(engine.init(0), 3)
    return jax.device_get(state.parameters), jax.device_get(metrics)


def assert_close(actual, expected, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), actual, expected)


def test_numbers_equal_those_without_acts(ray):  # noqa: F811
    expected, actual = (trained(algos.IMPALA(env=fleet(acts), **SIZES)) for acts in (False, True))
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_dead_worker_loses_only_its_rows(ray):  # noqa: F811
    """The second worker has rows 3 and 4."""
    env = fleet(acts=True)
    run = jax.jit(lambda key, state: run_segment(env, key, state))
    keys = jax.random.split(jax.random.key(1), (7, 2, 5))
    before, found = host.losses(), []
    for dies in (False, True):
        state, _ = env.reset(jax.random.split(jax.random.key(0), 5))
        if dies:
            [actor for actor in ray.actors if actor.worker._observations][-1].mode = "dead"
        found.append(jax.device_get(run(keys, state)))
    expected, lost = found
    assert_close(*(jax.tree.map(lambda x: x[:, :3], x) for x in (expected, lost)), rtol=0)
    assert lost[1].truncated[0].tolist() == [False, False, False, True, True]
    assert lost[1].reward[0].tolist() == [1, 1, 1, 0, 0]
    assert expected[1].truncated[0].tolist() == [False] * 5
    assert host.losses().failures > before.failures
    # They restart at once: their next episode ends five steps later.
    assert lost[1].truncated[5, 3:].all() and expected[1].truncated[4].all()


def run_segment(env, keys, state):
    def act(observation, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys), observation

    acting, operands = env.acting(act, keys)
    _, _, extras, steps = env.segment(acting, operands, keys, state)
    return extras, steps


def test_actions_have_the_dtype_of_the_space(ray):  # noqa: F811
    """As in `step`: with 64-bit types, a policy's actions may have another one."""
    keys = jax.random.split(jax.random.key(1), (7, 2, 5))
    actor, _ = fleet(True).acting(lambda observation, keys: (jnp.zeros(len(keys), jnp.int16), ()), keys)
    exported = jax.export.deserialize(bytearray(actor.program.serialized[3]))
    assert [x.dtype for x in exported.out_avals] == [np.int32]


def test_invalid_settings_are_refused(ray, monkeypatch):  # noqa: F811
    monkeypatch.setattr(envs.from_ray.ray_cluster, "module", lambda: ray)
    with pytest.raises(FdgError, match=r"acts=True needs the number of workers.*--env-workers"):
        from_ray.make("counting", lambda name: HostEnvironment(Counting()), acts=True)
    keys = jax.random.split(jax.random.key(1), (7, 2, 5))
    with pytest.raises(FdgError, match=r"acts in each environment alone, .* \(with reduce_sum\)"):
        fleet(True).acting(
            lambda rows, keys: (jnp.zeros(len(keys), jnp.int32), rows - rows.mean(0, keepdims=True)), keys
        )
    with pytest.raises(FdgError, match=r"rings=5: workers that act \(acts=True\)"):
        algos.IMPALA(env=fleet(True), rings=5, **SIZES)
    with pytest.raises(FdgError, match="acts=True does not work with a memory"):
        trained(algos.RecurrentPPO(env=fleet(True), **{**SIZES, "num_envs": 4, "num_steps": 8}))
