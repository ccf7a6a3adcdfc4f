"""A stream under the engine: the plain numbers on any devices, under staleness, and after a checkpoint."""

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
    index: jax.Array  # [S] int32, of the response
    age: jax.Array  # [S] int32, ticks
    first: jax.Array  # [S] int32, the version that it began under
    last: jax.Array  # [S] int32, the version of its last tick
    done: jax.Array  # [S] bool


class Walk:
    """Each response walks at the parameter's speed, to an end of its own: how long that takes is learned."""

    def idle(self, slots):
        none = jnp.zeros(slots, jnp.int32)
        return Kept(none, none, none, none, none == 0)

    def begin(self, parameters, key, index, now):
        none = jnp.zeros_like(index)
        return Kept(index, none, none + now.version, none, none > 0), jnp.zeros(len(index))

    def tick(self, parameters, kept, cache, now):
        moves = ~kept.done
        age = kept.age + moves
        way = cache + jnp.where(moves, parameters, 0.0)
        kept = kept._replace(
            age=age,
            last=jnp.where(moves, now.version, kept.last),
            done=kept.done | (way >= 1.0 + (kept.index * 7) % 11),
        )
        return kept, way

    def done(self, kept):
        return kept.done

    def refresh(self, parameters, kept):
        return kept.age * parameters

    def row(self, kept):
        return kept


@dataclasses.dataclass(frozen=True)
class Learner:
    """Speeds up by what it sees: responses of another version, or of another order, change the parameter."""

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
        w, version, seen = self.learn(
            state["w"], state["version"], jax.tree.map(lambda x: x.reshape(-1), rows)
        )
        return {"w": w, "version": version, "stream": stream}, {**seen, "ticks": stream.clock.tick}

    @fdg.fragment("actor", in_axes=(None, None, KEPT), out_axes=(None, KEPT))
    def respond(self, parameters, version, stream):
        return self.stream.take(parameters, version, stream)

    @fdg.fragment("learner", in_axes=(None, None, 0), out_axes=None)
    def learn(self, w, version, rows):
        weight = jnp.sin(rows.index.astype(jnp.float32)) / rows.age
        w = jnp.clip(w + 0.1 * jnp.sum(weight), 0.5, 2.0)
        seen = {
            "index": jnp.sum(rows.index * (rows.index + 3)),
            "staleness_max": jnp.max(version - rows.first),
            "staleness": jnp.max(version - rows.last),
        }
        return w, version + 1, seen


def plain(learner, staleness, iterations):
    """The same without an engine: the actor is handed the parameters of some iterations ago."""
    state = learner.init(jax.random.key(0))
    past = [(state["w"], state["version"])] * (staleness + 1)
    take, learn, seen = jax.jit(learner.stream.take), jax.jit(learner.learn), []
    for _ in range(iterations):
        rows, stream = [], state["stream"]
        for _ in range(learner.micro_batches):
            some, stream = take(*past[0], stream)
            rows.append(some)
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
        w, version, metrics = learn(state["w"], state["version"], whole)
        state = {"w": w, "version": version, "stream": stream}
        past = [*past[1:], (w, version)]
        seen.append({**metrics, "ticks": stream.clock.tick})
    return state, jax.tree.map(lambda *x: np.stack(x), *seen)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_it_gives_the_plain_numbers_under_staleness(devices, staleness):
    learner = Learner()
    expected, seen = plain(learner, staleness, 6)
    assert seen["staleness_max"].max() == learner.ahead + staleness  # reached, and never more
    assert seen["staleness"].max() >= staleness
    policy = policies.SingleLearnerCoarse(actors=1, learners=1, staleness=staleness)
    engine = fdg.compile(learner, policy, devices=devices[:2])
    state, metrics = engine.run(engine.init(seed=0), 6)
    assert_same(engine.algorithm_state(state), expected)
    assert_same(metrics, seen)


def test_slots_are_split_over_devices_and_a_run_goes_on_from_a_checkpoint(devices):
    learner = Learner()
    expected, seen = plain(learner, 0, 5)
    engine = fdg.compile(learner, policies.GPUOnly(), devices=devices[:2])
    assert not engine.unexplained()
    state, first = engine.run(engine.init(seed=0), 2)
    kept = jax.tree.map(lambda x: np.asarray(x), {**state, "stream": state["stream"]._replace(key=())})
    again = jax.tree.map(jnp.asarray, kept)
    again["stream"] = again["stream"]._replace(key=jax.random.key(0))
    state, rest = engine.run(again, 3)
    assert_same(state, expected)
    assert_same(jax.tree.map(lambda *x: np.concatenate(x), first, rest), seen)
