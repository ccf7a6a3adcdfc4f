"""Inputs of fragments, and outputs that are inputs of the next call of the same fragment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
from fdg.profiling.sites import inputs_of, sites
from fdg.tracing.trace import side_by_side
from tests.tiny import Pupil


def test_feedback():
    """`act` passes keys to its next call, `step` positions, `learn` and `update` the weight."""
    found = {site.fragment.name: site for site in sites(fdg.trace(Pupil()))}
    feedback = {name: dict(site.feedback) for name, site in found.items()}
    assert feedback == {"act": {1: 2}, "step": {0: 0}, "learn": {0: 0}, "slope": {}, "update": {0: 0}}
    assert found["act"].axes == (None, 0, 0) and found["act"].output_axes == (0, 0)


def first_inputs(pupil, state):
    """Inputs of the first call of each fragment in `iterate`."""
    position, keys, positions, rewards = state["position"], state["keys"], [], []
    inputs = {}
    for _ in range(2):
        inputs.setdefault("act", [state["weight"], position, keys])
        action, keys = pupil.act(state["weight"], position, keys)
        inputs.setdefault("step", [position, action])
        position, reward = pupil.step(position, action)
        positions.append(position)
        rewards.append(reward)
    learned = state["weight"], jnp.stack(positions), jnp.stack(rewards)
    slope = pupil.slope(*learned)
    return {**inputs, "learn": learned, "slope": learned, "update": [state["weight"], slope]}


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("num_seeds", [None, 3])
def test_inputs_of_first_call(num_seeds):
    pupil = Pupil()
    graph = fdg.trace(pupil)
    states = [pupil.init(jax.random.key(i)) for i in range(num_seeds or 1)]
    rows = [jax.tree.leaves(state) for state in states]
    leaves = rows[0] if num_seeds is None else [jnp.stack(each) for each in zip(*rows, strict=True)]
    found = inputs_of(side_by_side(graph, num_seeds), leaves)
    for i, state in enumerate(states):
        for name, wanted in first_inputs(pupil, state).items():
            got = found[name] if num_seeds is None else [x[i] for x in found[name]]
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(data(a), data(b), rtol=1e-5, atol=1e-6)


class Branching:
    """A fragment in a branch within a `while_loop`."""

    def init(self, key):
        return jnp.float32(3)

    def iterate(self, state):
        double = fdg.fragment("actor", in_axes=None, out_axes=None, name="double")(lambda x: 2 * x)

        def body(x):
            return jax.lax.cond(x > 2, lambda x: double(x + 1), lambda x: x + 1, x)

        return jax.lax.while_loop(lambda x: x < 50, body, state + 0.5), {}


def test_inputs_in_branch_of_while_loop():
    graph = fdg.trace(Branching())
    assert [float(x) for x in inputs_of(graph, [jnp.float32(3)])["double"]] == [4.5]


@pytest.mark.parametrize("ordered", [False, True])
def test_debug_prints_are_removed(ordered, capfd):
    class Chatty:
        def init(self, key):
            return jnp.float32(3)

        def iterate(self, state):
            @fdg.fragment("actor", in_axes=None, out_axes=None)
            def act(x):
                def one(x, _):
                    jax.debug.print("x is {}", x, ordered=ordered)
                    return x + 1, None

                return jax.lax.scan(one, x, length=2)[0]

            return act(state), {}

    (site,) = sites(fdg.trace(Chatty()))
    (result,) = jax.jit(jax.extend.core.jaxpr_as_fun(site.jaxpr))(jnp.float32(3))
    jax.effects_barrier()
    assert float(result) == 5 and not site.jaxpr.effects and "x is" not in capfd.readouterr().out
