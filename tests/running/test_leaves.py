"""States that contain an array twice: its memory cannot be donated twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.placing.staleness import DelayedState
from fdg.running.leaves import ReturnedArrays, without_aliases
from tests.conformance.comparison import assert_same, plain
from tests.running.test_lanes import Calls
from tests.tiny import Pupil


class Aliased:
    """A network and its target, walks and previous walks, keys and next keys: each pair is one array."""

    def init(self, key):
        w, x, keys = jnp.arange(3.0), jnp.ones((4, 3)), jax.random.split(key, 4)
        return {"w": w, "target": w, "x": x, "before": x, "keys": keys, "next": keys}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0, 0))
        def act(w, x, keys):
            return x * w[None] + jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(w, x):
            return 0.9 * w + 0.1 * jnp.mean(x)

        x = act(state["w"], state["x"], state["keys"])
        w = learn(state["w"], x)
        keys = jax.vmap(lambda key: jax.random.split(key, 1)[0])(state["next"])
        new = {
            "w": w,
            "target": state["w"],
            "x": x,
            "before": state["x"],
            "keys": state["next"],
            "next": keys,
        }
        return new, {"mean": jnp.mean(x)}


def same_objects(state, shapes):
    return state


def placed_once(state, shapes):
    """On the devices, with one array for both leaves."""
    placed = {
        id(x): jax.device_put(x, s.sharding) for x, s in ((state[name], shapes[name]) for name in state)
    }
    return {name: placed[id(x)] for name, x in state.items()}


def other_objects(state, shapes):
    """Other objects with the same memory."""
    state = placed_once(state, shapes)
    aliases = {
        name: jax.random.wrap_key_data(jax.random.key_data(state[name]))
        if name == "next"
        else jax.make_array_from_single_device_arrays(
            state[name].shape, state[name].sharding, [shard.data for shard in state[name].addressable_shards]
        )
        for name in ("target", "before", "next")
    }
    for name, alias in aliases.items():
        assert alias is not state[name] and without_aliases([state[name], alias])[1] is not alias
    return {**state, **aliases}


@pytest.mark.parametrize("alias", [same_objects, placed_once, other_objects], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("policy", "count"),
    [(policies.GPUOnly(), 1), (policies.GPUOnly(), 4), (policies.SingleLearnerCoarse(), 3)],
    ids=["one device", "four devices", "two groups"],
)
def test_state_with_aliases(policy, count, alias, devices, engines):
    engine = engines(policy, count)
    algorithm = engine.algorithm
    expected = plain(algorithm, algorithm.init(jax.random.key(1)), 3)
    state = alias(algorithm.init(jax.random.key(1)), engine.state_shape)
    assert_same(expected, engine.run(state, 3))


@pytest.fixture(scope="module")
def engines(devices):
    kept = {}

    def get(policy, count):
        if (policy, count) not in kept:
            kept[policy, count] = fdg.compile(Aliased(), policy, devices[:count])
        return kept[policy, count]

    return get


@pytest.mark.parametrize("count", [1, 4])
def test_delayed_state_with_aliases(count, devices):
    engine = fdg.compile(Pupil(num_envs=6), policies.SingleLearnerCoarse(staleness=2), devices[:count])
    expected = engine.run(engine.init(0), 3)
    state = Pupil(num_envs=6).init(jax.random.key(0))
    delayed = engine.plan.delayed.leaves
    old = tuple(jax.tree.leaves(state)[i] for i in delayed)
    assert old
    assert_same(expected, engine.run(DelayedState(state, (old, old)), 3), 1e-6)


def test_only_aliases_are_copied(devices):
    spread = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices[:2]), ("x",)), jax.sharding.PartitionSpec()
    )
    a, b, empty = jnp.ones(3), jnp.ones(3), jnp.zeros(0)
    in_part = jax.device_put(a, spread)  # its shard on the first device may alias `a`
    c, d, e, f, g, h = without_aliases([a, b, a, in_part, empty, empty])
    assert c is a and d is b and e is not a and h is not g
    pointers = [shard.data.unsafe_buffer_pointer() for x in (c, d, e, f) for shard in x.addressable_shards]
    assert len(set(pointers)) == 5
    for x in (e, f):
        np.testing.assert_array_equal(x, a)
    assert f.sharding == spread


def test_returned_arrays_match_by_identity_and_are_not_kept():
    a, b = jnp.ones(3), jax.random.key(0)
    known = ReturnedArrays([a, b])
    assert known.matches([a, b])
    assert not known.matches([b, a]) and not known.matches([a]) and not known.matches([a, jax.random.key(0)])
    del a
    assert not known.matches([jnp.ones(3), b])
    assert ReturnedArrays().matches([]) and not ReturnedArrays().matches([b])


def test_run_from_an_earlier_state_after_a_failed_run(devices):
    """The copies of the earlier state on the actors' devices are made again."""
    fails = []

    def act(x):
        if fails:
            raise ValueError("asleep")
        return np.asarray(x)

    engine = fdg.compile(Calls(act), policies.SingleLearnerCoarse(), devices[:2])
    state, _ = engine.run(engine.init(0), 1)
    first, second = (jax.tree.map(jnp.copy, state) for _ in range(2))
    fails.append(True)
    with pytest.raises(fdg.FdgError, match="asleep"):
        engine.run(first, 1)
    fails.clear()
    retried = engine.run(state, 1)
    assert_same(engine.run(second, 1), retried)


def test_numpy_arrays_are_not_donated(devices):
    """The engine donates its copy, not the caller's memory."""
    engine = fdg.compile(Pupil(num_envs=6), policies.GPUOnly(), devices[:1])
    position = np.linspace(0, 1, 18, dtype=np.float32).reshape(6, 3)
    before = position.copy()
    engine.run({**engine.init(0), "position": position}, 2)
    np.testing.assert_array_equal(position, before)


class Narrow:
    """Casts between a dtype of the state, and one between an actor and a learner."""

    def __init__(self, state, between):
        self.state, self.between = state, between

    def init(self, key):
        return {"x": jnp.arange(4).astype(self.state), "sum": jnp.int32(0)}

    def iterate(self, state):
        act = fdg.fragment("actor", in_axes=0)(lambda x: x.astype(self.between))
        learn = fdg.fragment("learner", in_axes=0, out_axes=None)(lambda x: x.astype(jnp.int32).sum())
        return {"x": state["x"], "sum": learn(act(state["x"]))}, {}


@pytest.mark.parametrize(
    ("state", "between", "policy", "refused"),
    [
        ("int4", "int8", policies.GPUOnly(), "int4"),
        ("float4_e2m1fn", "int8", policies.GPUOnly(), "float4_e2m1fn"),
        ("int8", "uint2", policies.SingleLearnerCoarse(), "uint2"),
        ("int8", "uint4", policies.GPUOnly(), None),
        ("float8_e5m2", "float8_e4m3fn", policies.SingleLearnerCoarse(), None),
    ],
)
def test_dtypes_of_less_than_a_byte_are_refused_outside_programs(state, between, policy, refused, devices):
    engine = fdg.compile(Narrow(state, between), policy, devices=devices[:2])
    if refused is None:
        after, _ = engine.run(engine.init(seed=0), iterations=2)
        assert after["sum"] == 6
        return
    with pytest.raises(fdg.FdgError, match=rf"an array {refused}\[\d\] is in the state"):
        engine.run(engine.init(seed=0), iterations=2)
