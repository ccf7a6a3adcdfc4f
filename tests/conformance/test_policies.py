"""Every policy on every algorithm gives the numbers of plain calls of `iterate`: the guarantee.

A deliberately wrong lowering, and an algorithm whose border lies, show that the suite can fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from fdg import jaxprs, lowering
from fdg.fragment import boundary_p
from tests.user_algorithm import Walker

ITERATIONS = 10
SMALL = {"num_envs": 16, "num_steps": 8, "num_epochs": 2, "num_minibatches": 2, "hidden": (16, 16)}


def ppo(env, **fields):
    return algos.PPO(env=envs.make(env), **{**SMALL, **fields})


ALGORITHMS = {
    "discrete": lambda: ppo("CartPole-v1"),
    "discrete, time shuffle": lambda: ppo("CartPole-v1", shuffle="time"),
    "continuous": lambda: ppo("Pendulum-v1", normalize_observation=True, normalize_reward=True),
    "multi-discrete": lambda: ppo("probe:multi_discrete"),
    "user's own": Walker,
}
POLICIES = {"GPUOnly": policies.GPUOnly()}


def leaves(tree):
    """(path, NumPy array) of each leaf; keys as the words that they hold."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return found


def assert_same(expected, actual, tolerance=1e-5):
    """Structure, dtypes and integers equal; floats within `tolerance` of each array's largest value."""
    expected, actual = leaves(expected), leaves(actual)
    assert expected.keys() == actual.keys()
    for path, want in expected.items():
        have = actual[path]
        assert (want.shape, want.dtype) == (have.shape, have.dtype), path
        if np.issubdtype(want.dtype, np.floating):
            scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
            np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * scale, err_msg=path)
        else:
            np.testing.assert_array_equal(have, want, err_msg=path)


@pytest.fixture(scope="module")
def reference():
    """What plain JAX gives for an algorithm, without graph, plan or engine; computed once each."""
    known = {}

    def run(name):
        if name not in known:
            algorithm = ALGORITHMS[name]()
            iterate = jax.jit(algorithm.iterate)
            state, metrics = jax.jit(algorithm.init)(jax.random.key(3)), []
            for _ in range(ITERATIONS):
                state, one = iterate(state)
                metrics.append(one)
            known[name] = state, jax.tree.map(lambda *m: jnp.stack(m), *metrics)
        return known[name]

    return run


CASES = [(name, n) for name in ("discrete", "continuous", "user's own") for n in (1, 2, 4, 8)]
CASES += [("discrete, time shuffle", 8), ("multi-discrete", 4)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "count"), CASES)
def test_a_policy_never_changes_the_numbers(name, policy, count, devices, reference):
    engine = fdg.compile(ALGORITHMS[name](), POLICIES[policy], devices[:count])
    state, metrics = engine.run(engine.init(3), ITERATIONS)
    expected = reference(name)
    assert_same(expected, (state, metrics))
    parameters = "parameters" if hasattr(state, "parameters") else "weight"
    ours, theirs = leaves(getattr(state, parameters)), leaves(getattr(expected[0], parameters))
    largest = max(float(np.max(np.abs(ours[path] - theirs[path]))) for path in ours)
    print(f"\n{policy}, {name}, {count} devices: parameters differ by at most {largest:.1e}")
    assert largest < 1e-5


def test_a_wrong_lowering_fails(devices, reference, monkeypatch):
    """As if the all-reduce were forgotten: every split array is its first device's share, repeated."""

    def forgetful(jaxpr, mesh, axes):
        def change(eqn):
            axis = eqn.params.get("axis")
            if eqn.primitive is not boundary_p or axis is None:
                return eqn
            aval = eqn.invars[0].aval

            def first_share(x):
                share = jax.lax.slice_in_dim(x, 0, x.shape[axis] // mesh.size, axis=axis)
                return jnp.concatenate([share] * mesh.size, axis=axis)

            model = jax.make_jaxpr(jax.jit(first_share))(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns[0]
            return eqn.replace(primitive=model.primitive, params=model.params)

        wrong = jaxprs.map_equations(jaxprs.open_jaxpr(jaxpr), change)
        return jaxprs.with_jaxpr(jaxpr, wrong)

    monkeypatch.setattr(lowering, "constrain", forgetful)
    engine = fdg.compile(Walker(), policies.GPUOnly(), devices[:4])
    with pytest.raises(AssertionError):
        assert_same(reference("user's own"), engine.run(engine.init(3), ITERATIONS))


def test_a_dtype_or_an_integer_that_differs_fails():
    state = Walker().init(jax.random.key(0))
    for wrong in (
        state._replace(age=state.age + 1),
        state._replace(key=jax.random.key(1)),
        state._replace(alive=~state.alive),
        state._replace(label=state.label.astype("int32")),
        state._replace(weight=state.weight + 3e-5),
    ):
        with pytest.raises(AssertionError):
            assert_same(state, wrong)
    assert_same(state, state._replace(weight=state.weight + 3e-6))


def test_agents_are_those_of_single_runs(devices):
    """Agent i of a program of several is the single agent of seed + i."""
    algorithm = ppo("CartPole-v1")
    several = fdg.compile(algorithm, policies.GPUOnly(), devices[:4], num_seeds=3)
    assert [len(group) for group in several.plan.groups] == [3]
    states, metrics = several.run(several.init(5), 3)
    assert metrics["loss"].shape == (3, 3)
    single = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    for agent in range(3):
        expected = single.run(single.init(5 + agent), 3)
        take = jax.tree.map(lambda x: x[agent], states), {k: m[:, agent] for k, m in metrics.items()}  # noqa: B023
        # Several agents' matrix products are one batched product, which adds up in another order.
        assert_same(expected, take, 1e-4)
