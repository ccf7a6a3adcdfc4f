"""Streams under the engine match plain JAX: on several devices, with staleness, and from a state in NumPy."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.stream import Stream, StreamState
from tests.conformance.comparison import assert_same

KEPT = StreamState(key=None, clock=None, kept=0, rows=None)


class Kept(NamedTuple):
    index: jax.Array  # [S] int32, the response
    age: jax.Array  # [S] int32, in ticks
    first: jax.Array  # [S] int32, version of the first tick
    last: jax.Array  # [S] int32, version of the last tick
    done: jax.Array  # [S] bool


class Walk:
    """Each response moves at the learned speed to its own end, so lengths depend on the parameter."""

    def idle(self, slots):
        zeros = jnp.zeros(slots, jnp.int32)
        return Kept(zeros, zeros, zeros, zeros, zeros == 0)

    def begin(self, parameters, key, index, now):
        zeros = jnp.zeros_like(index)
        return Kept(index, zeros, zeros + now.version, zeros, zeros > 0), jnp.zeros(len(index))

    def tick(self, parameters, kept, cache, now):
        active = ~kept.done
        age = kept.age + active
        distance = cache + jnp.where(active, parameters, 0.0)
        kept = kept._replace(
            age=age,
            last=jnp.where(active, now.version, kept.last),
            done=kept.done | (distance >= 1.0 + (kept.index * 7) % 11),
        )
        return kept, distance

    def done(self, kept):
        return kept.done

    def refresh(self, parameters, kept):
        return kept.age * parameters

    def row(self, kept):
        return kept


@dataclasses.dataclass(frozen=True)
class Learner:
    """The parameter depends on the versions and the order of the responses."""

    micro_batches: int = 2
    ahead: int = 2

    @property
    def stream(self):
        return Stream(Walk(), 4, 4, self.micro_batches, self.ahead)

    def init(self, key):
        return {"w": jnp.float32(1.0), "version": jnp.int32(0), "stream": self.stream.init(key)}

    def iterate(self, state):
        def one(stream, _):
            rows, stream = self.respond(state["w"], state["version"], stream)
            return stream, rows

        stream, rows = jax.lax.scan(one, state["stream"], None, length=self.micro_batches)
        w, version, metrics = self.learn(
            state["w"], state["version"], jax.tree.map(lambda x: x.reshape(-1), rows)
        )
        return {"w": w, "version": version, "stream": stream}, {**metrics, "ticks": stream.clock.tick}

    @fdg.fragment("actor", in_axes=(None, None, KEPT), out_axes=(None, KEPT))
    def respond(self, parameters, version, stream):
        return self.stream.take(parameters, version, stream)

    @fdg.fragment("learner", in_axes=(None, None, 0), out_axes=None)
    def learn(self, w, version, rows):
        weight = jnp.sin(rows.index.astype(jnp.float32)) / rows.age
        w = jnp.clip(w + 0.1 * jnp.sum(weight), 0.5, 2.0)
        metrics = {
            "index": jnp.sum(rows.index * (rows.index + 3)),
            "staleness_max": jnp.max(version - rows.first),
            "staleness": jnp.max(version - rows.last),
        }
        return w, version + 1, metrics


def plain(learner, staleness, iterations):
    """(state, metrics) in plain JAX; the actor gets parameters that are `staleness` iterations old."""
    state = learner.init(jax.random.key(0))
    past = [(state["w"], state["version"])] * (staleness + 1)
    take, learn, all_metrics = jax.jit(learner.stream.take), jax.jit(learner.learn), []
    for _ in range(iterations):
        rows, stream = [], state["stream"]
        for _ in range(learner.micro_batches):
            batch_rows, stream = take(*past[0], stream)
            rows.append(batch_rows)
        batch = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
        w, version, metrics = learn(state["w"], state["version"], batch)
        state = {"w": w, "version": version, "stream": stream}
        past = [*past[1:], (w, version)]
        all_metrics.append({**metrics, "ticks": stream.clock.tick})
    return state, jax.tree.map(lambda *x: np.stack(x), *all_metrics)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_staleness_matches_plain_jax(devices, staleness):
    learner = Learner()
    expected, expected_metrics = plain(learner, staleness, 6)
    assert expected_metrics["staleness_max"].max() == learner.ahead + staleness  # the bound is reached
    assert expected_metrics["staleness"].max() >= staleness
    policy = policies.SingleLearnerCoarse(actors=1, learners=1, staleness=staleness)
    engine = fdg.compile(learner, policy, devices=devices[:2])
    state, metrics = engine.run(engine.init(seed=0), 6)
    assert_same(engine.algorithm_state(state), expected)
    assert_same(metrics, expected_metrics)


def test_slots_on_two_devices_and_numpy_round_trip(devices):
    learner = Learner()
    expected, expected_metrics = plain(learner, 0, 5)
    engine = fdg.compile(learner, policies.GPUOnly(), devices=devices[:2])
    assert not engine.unexplained()
    state, first = engine.run(engine.init(seed=0), 2)
    data = jax.random.key_data(state["stream"].key)
    kept = jax.tree.map(np.asarray, {**state, "stream": state["stream"]._replace(key=data)})
    restored = jax.tree.map(jnp.asarray, kept)
    key = jax.random.wrap_key_data(restored["stream"].key)
    restored["stream"] = restored["stream"]._replace(key=key)
    state, rest = engine.run(restored, 3)
    assert_same(state, expected)
    assert_same(jax.tree.map(lambda *x: np.concatenate(x), first, rest), expected_metrics)
