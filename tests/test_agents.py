"""`fdg.agents`: several agents of one algorithm, compiled, nested, and in plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.agents import Agents
from fdg.training.space import make_grid
from fdg.training.sweep import Sweep
from tests.oracle.compare import limit_agents_per_vmap
from tests.tiny import Pupil
from tests.training.descent import Descent, assert_close, single_run


def as_numbers(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_equal(a, b):
    for x, y in zip(as_numbers(a), as_numbers(b), strict=True):
        np.testing.assert_array_equal(x, y)


def iterated(many, iterations):
    """State and metrics of a `lax.scan` over `many.iterate`."""

    @jax.jit
    def run(starts):
        return jax.lax.scan(lambda state, _: many.iterate(state), many.init(starts), length=iterations)

    return run(many.starts(3))


def trained(engine, iterations):
    return engine.run(engine.init(3), iterations)


def test_plain_jax(devices):
    """Plain `init` and `iterate` match the engine, and each agent matches a run of a single agent."""
    many = fdg.agents(Descent(), 3)
    have = iterated(many, 4)
    state = have[0]
    assert_close(have, trained(fdg.compile(many, policies.GPUOnly(), devices[:1]), 4))
    for i in range(3):
        assert_close(single_run(Descent(), 3 + i, 4)[0], jax.tree.map(lambda x: x[i], state))  # noqa: B023


@pytest.mark.parametrize(("n", "agents_per_vmap"), [(4, 4), (4, 2), (2, 1)])
def test_state_without_arrays(n, agents_per_vmap, devices):
    class Constant:
        def init(self, key):
            return {}

        def iterate(self, state):
            return state, {"loss": jnp.float32(3)}

    with limit_agents_per_vmap(agents_per_vmap):
        engine = fdg.compile(Constant(), policies.GPUOnly(), devices[:1], num_seeds=n)
    state, metrics = trained(engine, 2)
    assert state == {} and metrics["loss"].tolist() == [[3.0] * n] * 2
    assert fdg.agents(Constant(), n).iterate({})[1]["loss"].tolist() == [3.0] * n


def test_nested_agents(devices):
    """Two times three agents use six consecutive seeds."""
    engine = fdg.compile(fdg.agents(fdg.agents(Descent(), 3), 2), policies.GPUOnly(), devices[:2])
    state, metrics = trained(engine, 2)
    assert state["x"].shape == (2, 3, 3) and metrics["loss"].shape == (2, 2, 3)
    for i in range(2):
        for j in range(3):
            want, _ = single_run(Descent(), 3 + 3 * i + j, 2)
            assert_close(want, jax.tree.map(lambda x: x[i, j], state))  # noqa: B023


@pytest.mark.parametrize("n", [0, -1, True, 2**32])
def test_invalid_number_of_agents(n):
    with pytest.raises(fdg.FdgError, match=r"n=.*give"):
        fdg.agents(Pupil(), n)


def test_attributes_delegate_to_algorithm():
    many = fdg.agents(Pupil(num_envs=4), 2)
    assert many.num_envs == 4 and many == Agents(Pupil(num_envs=4), 2) and hash(many) == hash(many)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        many.nothing_of_the_kind  # noqa: B018


@dataclasses.dataclass(frozen=True)
class Reader:
    """State with a batch and a matrix; the actor reads `rate`."""

    rate: float = 0.1

    def init(self, key):
        x, m = jax.random.split(key)
        return {"x": jax.random.normal(x, (8, 4)), "m": jax.random.normal(m, (4, 2)), "step": jnp.int32(0)}

    def iterate(self, state):
        m = self.learn(state["m"], state["x"], self.act(state["m"], state["x"]))
        return {"x": state["x"], "m": m, "step": state["step"] + 1}, {"episode_return": -jnp.sum(m * m)}

    @fdg.fragment("actor", in_axes=(None, 0))
    def act(self, m, x):
        return jnp.tanh(x @ m) * (1 - self.rate)

    @fdg.fragment("learner", in_axes=(None, 0, 0), out_axes=None)
    def learn(self, m, x, seen):
        return m - self.rate * x.T @ seen / len(x)


SHARDED = {
    "fsdp": policies.GPUOnly(parameters="fsdp"),
    "rules": policies.GPUOnly(model_parallel=2, parameters=(("m", (None, "model")), ("", "batch"))),
}


@pytest.mark.parametrize("policy", SHARDED)
def test_sharded_agents(policy, devices):
    """Each device holds a shard of every agent; results match those of one device."""
    engine = fdg.compile(Reader(), SHARDED[policy], devices[:4], num_seeds=3)
    (leaf,) = engine.plan.sharded
    (one,) = fdg.place(Reader(), SHARDED[policy], 4).sharded
    assert (leaf.position, leaf.layout.shape) == (one.position, (3, 4, 2))
    assert leaf.layout.spec == ((), *one.layout.spec) and "all 3 agents are vmapped" in str(engine.plan)
    state, metrics = trained(engine, 3)
    parts = {shard.data.size for shard in state["m"].addressable_shards}
    assert parts == {3 * 4 * 2 // one.layout.num_parts}
    assert_close((state, metrics), trained(fdg.compile(Reader(), policies.GPUOnly(), devices[:1], 3), 3))


def test_stale_sharded_population(devices):
    """With `staleness=1`, a sweep on sharded agents matches one device (swept values are never stale)."""
    sweep = Sweep(Reader(), make_grid({"rate": [0.05, 0.1, 0.3, 0.5]}), exploit_every=2)
    found = []
    for count, fields in ((1, {}), (4, {"learners": 2, "parameters": "fsdp"})):
        policy = policies.SingleLearnerCoarse(staleness=1, **fields)
        engine = fdg.compile(sweep, policy, devices[:count], num_seeds=4)
        state, metrics = engine.run(engine.init(0), 6)
        found.append((engine.algorithm_state(state), metrics))
    assert len(engine.plan.groups) == 2 and len(np.unique(np.asarray(state.hyperparameters["rate"]))) > 1
    assert_close(*found)


def test_auto_fit_and_compile_accept_agents(tmp_path, devices):
    """`auto`, `fit`, and `compile` with a graph of all agents or of one."""
    many = fdg.agents(Descent(), 2)
    choice = policies.auto(many, 1, policies=[policies.GPUOnly])
    short = policies.auto(Descent(), 1, policies=[policies.GPUOnly], num_seeds=2)
    assert choice.seconds == short.seconds and choice.algorithm == many and short.algorithm == Descent()
    run = fdg.fit(many, total_steps=16, out=tmp_path / "run", progress=False)
    assert run.agents == 2 and run.algorithm == Descent(total_steps=16)
    for graph in (fdg.trace(many), fdg.trace(Descent())):
        engine = fdg.compile(many, policies.GPUOnly(), devices[:1], graph=graph)
        assert engine.state_shape["x"].shape == (2, 3)
    assert ", of each of 2 agents" in str(fdg.trace(many))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fdg.compile(Descent(), policies.GPUOnly(), 1, graph=fdg.trace(fdg.agents(Descent(), 2))),
         "has 2 agents, but the algorithm has one agent"),
        (lambda: fdg.compile(fdg.agents(Descent(), 3), policies.GPUOnly(), 1,
                             graph=fdg.trace(fdg.agents(Descent(), 2))), "has 2 agents, but .* has 3 agents"),
        (lambda: fdg.fit(fdg.agents(Descent(), 3), num_seeds=2),
         "num_seeds=2: the algorithm already has 3 agents"),
        (lambda: fdg.fit(fdg.agents(fdg.agents(Descent(), 3), 2)), "agents of agents"),
    ],
)  # fmt: skip
def test_contradicting_numbers_of_agents(call, words):
    with pytest.raises(fdg.FdgError, match=words):
        call()
