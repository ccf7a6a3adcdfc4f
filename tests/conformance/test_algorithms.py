"""Every algorithm of `algos`, small, under every policy, compared with plain calls of `iterate`.

Runs resumed from a checkpoint are compared bit for bit, with replay buffers, priorities, memories and
statistics. Each algorithm has an entry in `SMALL`. By default one algorithm runs per policy
(tests/whole.toml); `make test ARGS="tests/conformance --whole"` runs all.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import algos
import envs
import fdg
import policies
from algos.explorers import correlated_noise
from fdg.errors import PlanError
from fdg.training.checkpoint import Checkpoints
from tests.algos.offline.data import random_steps
from tests.compilations import compilations
from tests.conformance import dialogue
from tests.conformance.comparison import ITERATIONS, assert_same, copied, leaves, plain
from tests.running.order import is_in_order

NORMALIZING = {"normalize_observation": True, "normalize_reward": True}
HIDDEN = {"hidden": (8,)}
RND = {"rnd": True, "rnd_features": 4, "rnd_share": 0.5}
ROLLOUT = {"num_envs": 8, "num_steps": 4}
EPOCHS = {**ROLLOUT, "num_epochs": 1, "num_minibatches": 2}
REPLAY = {"num_envs": 8, "learning_starts": 16, "batch_size": 8, "buffer_size": 64}
OFFLINE_DATA = {"dataset": random_steps("probe:continuous"), "num_envs": 8, "num_steps": 2, "batch_size": 16}


def small(cls, env, *groups, **fields):
    """A function that makes the algorithm, so that only tests that use it make its environment."""
    name, options = envs.parse(env)
    return lambda: cls(
        env=envs.make(name, **options), **{k: v for g in groups for k, v in g.items()}, **fields
    )


# Small enough to compile in seconds; 8 environments are divisible by the groups below.
SMALL = {
    "ippo": small(algos.IPPO, "probe:unlike?continuous=True", EPOCHS, HIDDEN, NORMALIZING, RND),
    "mappo": small(algos.MAPPO, "probe:agents?delay=1", EPOCHS, memory_size=8),
    "a2c": small(algos.A2C, "CartPole-v1", ROLLOUT, HIDDEN, NORMALIZING),
    "a2c lstm": small(
        algos.A2C, "probe:parts?length=3", ROLLOUT, NORMALIZING, RND, memory="lstm", memory_size=4
    ),
    "a3c": small(algos.A3C, "CartPole-v1", HIDDEN, NORMALIZING, RND, num_envs=16, num_workers=8, num_steps=4),
    "impala": small(algos.IMPALA, "CartPole-v1", ROLLOUT, HIDDEN, NORMALIZING),
    "impala gru": small(algos.IMPALA, "probe:masked", ROLLOUT, memory="gru", memory_size=4),
    "ppo": small(algos.PPO, "CartPole-v1", EPOCHS, HIDDEN),
    "ppo rnd": small(algos.PPO, "CartPole-v1", EPOCHS, HIDDEN, RND),
    "dqn": small(
        algos.DQN, "CartPole-v1", HIDDEN, NORMALIZING, RND, num_envs=8, num_steps=2, updates_per_step=0.125,
        batch_size=16, buffer_size=64, learning_starts=32, target_period=2, double=True, dueling=True,
        n_step=2, priority_exponent=0.6,
    ),
    "pqn": small(algos.PQN, "CartPole-v1", EPOCHS, HIDDEN, NORMALIZING),
    "recurrent_ppo": small(
        algos.RecurrentPPO, "probe:memory?delay=1", EPOCHS, memory_size=4, sequence_length=2, burn_in=1
    ),
    # Observations in parts, one only for the critic; a transformer with a window of three steps.
    "recurrent_ppo transformer": small(
        algos.RecurrentPPO, "probe:parts?length=3", EPOCHS, memory="transformer", memory_size=4,
        memory_window=3, memory_heads=2, layer_norm=True, normalize_observation=True, sequence_length=2,
        burn_in=1,
    ),
    "sac": small(
        algos.SAC, "probe:continuous", REPLAY, HIDDEN, NORMALIZING, RND, updates_per_step=0.25
    ),
    "td3": small(
        algos.TD3, "probe:continuous", REPLAY, HIDDEN, num_steps=2, updates_per_step=0.125,
        normalize_observation=True, atoms=5, value_min=-2.0, value_max=2.0, memory="lstm", memory_size=4,
        explore=correlated_noise(),
    ),
    "qr_dqn": small(
        algos.QRDQN, "probe:masked", REPLAY, HIDDEN, num_steps=2, updates_per_step=0.125, quantiles=3,
        double=True,
    ),
    "c51": small(
        algos.C51, "probe:masked", REPLAY, HIDDEN, num_steps=2, updates_per_step=0.0625, atoms=3,
        value_min=-1.0, value_max=1.0, memory="gru", memory_size=4, sequence_length=1, burn_in=1,
    ),
    "bc": small(
        algos.BC, "probe:masked", HIDDEN, dataset=random_steps("probe:masked"), num_envs=8, num_steps=1,
        batch_size=8, normalize_observation=False,
    ),
    "iql": small(algos.IQL, "probe:continuous", OFFLINE_DATA, HIDDEN, normalize_observation=True),
    "td3_bc": small(algos.TD3BC, "probe:continuous", OFFLINE_DATA, HIDDEN),
    "rebrac": small(algos.ReBRAC, "probe:continuous", OFFLINE_DATA, HIDDEN),
    "rebrac online": small(
        algos.ReBRAC, "probe:continuous", OFFLINE_DATA, HIDDEN, online=True, total_steps=80
    ),
    "iql online": small(algos.IQL, "probe:continuous", OFFLINE_DATA, HIDDEN, online=True, total_steps=80),
    "cql": small(algos.CQL, "probe:continuous", OFFLINE_DATA, HIDDEN, num_actions=2),
    "redq": small(
        algos.REDQ, "probe:continuous", REPLAY, HIDDEN, updates_per_step=0.25, num_critics=3, policy_delay=2,
        critic_hidden=(8,),
    ),
    "droq": small(
        algos.DroQ, "probe:continuous", REPLAY, HIDDEN, updates_per_step=0.25, dropout=0.25, policy_delay=2,
        normalize_observation=True,
    ),
    "tqc": small(
        algos.TQC, "probe:continuous", REPLAY, HIDDEN, updates_per_step=0.25, num_critics=3, quantiles=4,
        dropped_quantiles=1, critic_hidden=(8,),
    ),
    "fast_td3": small(
        algos.FastTD3, "probe:continuous", REPLAY, HIDDEN, updates_per_step=0.25, atoms=5, value_min=-2.0,
        value_max=2.0, n_step=2, critic_hidden=(8, 8), torso="simba",
    ),
    "crossq": small(
        algos.CrossQ, "probe:continuous", REPLAY, HIDDEN, updates_per_step=0.25, critic_hidden=(8,),
        policy_delay=2, renorm_after=4, n_step=2, priority_exponent=0.6,
    ),
    "vdn": small(
        algos.VDN, "probe:unlike", REPLAY, HIDDEN, RND, num_steps=2, num_updates=1, sequence_length=1
    ),
    "qmix": small(
        algos.QMIX, "probe:agents?delay=1", REPLAY, num_steps=4, num_updates=1, sequence_length=2,
        q_lambda=0.5, priority_exponent=0.6, memory="gru", memory_size=4, mixer_size=4, hypernetwork=(4,),
        **NORMALIZING,
    ),
    "alphazero": small(
        algos.AlphaZero, "game:tic_tac_toe", HIDDEN, num_envs=8, num_steps=2, num_minibatches=2,
        num_simulations=4,
    ),
    "muzero": small(
        algos.MuZero, "CartPole-v1", EPOCHS, HIDDEN, NORMALIZING, num_simulations=4, unroll_steps=2,
        latent_size=8,
    ),
    # Recurrent opponents, replaced twice within the iterations.
    "recurrent_ppo self play": lambda: algos.SelfPlay(
        small(algos.RecurrentPPO, "game:tic_tac_toe", EPOCHS, memory_size=4, sequence_length=2)(),
        size=2, every=2,
    ),
}  # fmt: skip

# Without actors: policies with devices for actors reject them. Variants with actors are called "... online".
OFFLINE = ("bc", "iql", "td3_bc", "rebrac", "cql")
ACTING = ("single_learner_coarse", "single_learner_fine", "environments", "workers")

# (policy, number of devices): groups of unequal sizes, several learners.
SETUPS = {
    "gpu_only": (policies.GPUOnly(), 8),
    "multi_learner": (policies.MultiLearner(), 8),
    "single_learner_coarse": (policies.SingleLearnerCoarse(actors=4, learners=2), 6),
    "single_learner_fine": (policies.SingleLearnerFine(workers=2, learners=1), 3),
    "environments": (policies.Environments(workers=2, learners=4), 6),
    "central": (policies.Central(workers=4, servers=1), 5),
    "workers": (policies.Workers(environments=2, actors=2, learners=2, buffers=1), 7),
}


@functools.cache
def reference(name):
    """Initial state, and (state, metrics) in plain JAX."""
    algorithm = SMALL[name]()
    state = jax.jit(algorithm.init)(jax.random.key(3))
    return state, plain(algorithm, copied(state), ITERATIONS)


def test_every_algorithm_and_policy_is_listed():
    assert {name.split()[0] for name in SMALL} == set(algos.names("environments"))
    assert set(SETUPS) | dialogue.POLICIES == set(policies.names())


@pytest.mark.parametrize("setup", ACTING)
def test_offline_algorithm_is_refused_under_acting_policies(setup, devices):
    policy, count = SETUPS[setup]
    with pytest.raises(PlanError, match=r"IQL has no fragment of (that role|those roles)"):
        fdg.compile(SMALL["iql"](), policy, devices[:count])


def assert_resumes(engine, state, full, folder):
    """A run resumed from a checkpoint equals the uninterrupted one bit for bit."""
    state, first = engine.run(state, 2)
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, state)
    checkpoints.close()
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    state, rest = engine.run(Checkpoints(folder).restore(2, types), ITERATIONS - 2)
    found, expected = leaves((state, jax.tree.map(lambda *x: jnp.concatenate(x), first, rest))), leaves(full)
    assert {path: x.tobytes() for path, x in found.items()} == {p: x.tobytes() for p, x in expected.items()}


@pytest.mark.parametrize(
    ("name", "setup"),
    [(name, setup) for name in SMALL for setup in SETUPS if name not in OFFLINE or setup not in ACTING],
)
def test_policy_matches_plain_jax(name, setup, devices, tmp_path):
    policy, count = SETUPS[setup]
    engine = fdg.compile(SMALL[name](), policy, devices[:count])
    state, expected = reference(name)
    actual = engine.run(copied(state), ITERATIONS)
    assert_same(expected, actual)
    assert not engine.unexplained()
    assert is_in_order(engine)
    if setup in ("gpu_only", "central"):  # reuses the engine to test resuming
        assert_resumes(engine, copied(state), actual, tmp_path)
    with compilations() as compiled:
        jax.block_until_ready(engine.run(actual[0], ITERATIONS))
    assert compiled == []
