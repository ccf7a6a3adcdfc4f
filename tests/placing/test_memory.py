"""The memory that an iteration needs at least, by hand, of schedules of a few small arrays."""

import jax
import jax.numpy as jnp
import pytest

from fdg.placing.layout import BATCH, MODEL, Layout
from fdg.placing.memory import peak_by_group, peak_bytes
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Value


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def learn(w, x):
    """x [2], w [1]: a and b of 8 B, both alive while b is made; then b and the new w of 4 B."""
    return w * jnp.sum(jnp.cos(jnp.sin(x)), keepdims=True)


@pytest.mark.parametrize(("devices", "bytes_"), [(1, 12 + 16), (2, 8 + 8)])
def test_arrays_that_are_alive_together(devices, bytes_):
    assert peak_bytes(traced(learn, (1,), (2,)), [None, 0], devices) == bytes_


def test_results_stay_to_the_end():
    """a [2] is a result: it is still there as c [2] is made of b [2]."""
    jaxpr = traced(lambda x: ((a := jnp.sin(x)), jnp.exp(jnp.cos(a))), (2,))
    assert peak_bytes(jaxpr, [0], 1) == 8 + 3 * 8


def test_inputs_that_lie_otherwise_and_what_becomes_of_them():
    """w [4, 2] of 32 B is split by rules over four, as is the new w; nobody says so of what is in between."""
    split = Layout((4, 2), ((MODEL,),), ((BATCH, 1), (MODEL, 4)))
    jaxpr = traced(lambda w: jnp.cos(jnp.sin(w)), (4, 2))
    assert peak_bytes(jaxpr, [None], 1, {0: split}) == 8 + 32 + 8


# --- schedules ---


def values(jaxpr, group, axis=None):
    """(inputs, outputs) of a traced program, on a group."""
    return tuple(
        tuple(Value(v, group, axis) for v in ends) for ends in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    )


def call(jaxpr, inputs, outputs, group="here"):
    return Call("f", group, ("f",), tuple(jaxpr.jaxpr.eqns), inputs, outputs, frozenset(), frozenset())


def schedule(steps, leaves, constants=()):
    return Schedule(tuple(steps), leaves, constants, (), ())


WAVE = traced(lambda x: jnp.cos(jnp.sin(x)), (2,))  # 8 B in between, 8 B out


def test_a_call_and_a_move():
    """Here: x of 8 B, and both arrays of the call. There: a copy, as soon as it is moved."""
    (x,), (y,) = values(WAVE, "here", 0)
    copy = Value(y.variable, "there", 0)
    steps = [call(WAVE, (x,), (y,)), Move("here", "there", ((y, copy),), (), ())]
    found = schedule(steps, ((x,),))
    assert peak_by_group(found, {"here": 1, "there": 1}) == {"here": 24, "there": 8}
    assert peak_by_group(found, {"here": 2, "there": 1}) == {"here": 12, "there": 8}
    together = peak_by_group(found, {"here": 1, "there": 1}, {"here": "both", "there": "both"})
    assert together == {"both": 8 + 16}  # the copy is made after the call


def test_what_is_read_later_stays():
    """y of the first call stays through the second, which needs 16 B of its own."""
    (x,), (y,) = values(WAVE, "here")
    other = traced(lambda x: jnp.cos(jnp.sin(x)), (2,))
    (_,), (z,) = values(other, "here")
    again = Call("g", "here", ("g",), tuple(other.jaxpr.eqns), (x,), (z,), frozenset(), frozenset())
    reader = Move("here", "there", ((y, Value(y.variable, "there", None)),), (), ())
    steps = [call(WAVE, (x,), (y,)), again, reader]
    assert peak_by_group(schedule(steps, ((x,),)), {"here": 1, "there": 1})["here"] == 8 + 8 + 16
    steps = [call(WAVE, (x,), (y,)), reader, again]
    assert peak_by_group(schedule(steps, ((x,),)), {"here": 1, "there": 1})["here"] == 8 + 16


def test_constants_and_second_places_of_leaves_count():
    (x,), (y,) = values(WAVE, "here")
    copy, table = Value(x.variable, "there", None), Value(x.variable, "there", None)
    found = schedule([call(WAVE, (x,), (y,))], ((x, copy),), ((0, table),))
    assert peak_by_group(found, {"here": 1, "there": 1}) == {"here": 24, "there": 16}


def test_a_loop_needs_what_one_trip_does():
    """Beside what stays through it: x of 8 B; a trip makes two arrays, and the result is a third's name."""
    (x,), (y,) = values(WAVE, "here")
    (start,), (end,) = values(WAVE, "here")
    body = call(WAVE, (start,), (end,))
    loop = Repeat(5, ((x, start),), frozenset(), (body,), ((end, start),), ((end, y),))
    assert peak_by_group(schedule([loop], ((x,),)), {"here": 1}) == {"here": 8 + 8 + 16}


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32])
def test_what_is_lent_is_there_once(dtype):
    """Leaves [2] and [8], halved where they are of record and whole where they are lent.

    Bytes of an element times: 1 + 4 of the halves, 2 + 8 of the wholes. While leaves change over one by one,
    the largest is there as both; in the call, the wholes and its own of 32 bytes, whose result stays.
    """
    size = jnp.dtype(dtype).itemsize
    jaxpr = jax.make_jaxpr(lambda w, v: jnp.sin(v.astype(jnp.float32)))(
        *(jax.ShapeDtypeStruct((n,), dtype) for n in (2, 8))
    )
    mesh = ((BATCH, 1), (MODEL, 2))
    owned, lent = (
        tuple(Value(v, group, None, Layout(v.aval.shape, spec, mesh)) for v in jaxpr.jaxpr.invars)
        for group, spec in (("training", ((MODEL,),)), ("generation", ()))
    )
    made = Value(jaxpr.jaxpr.outvars[0], "generation", None)
    steps = [
        Move("training", "generation", tuple(zip(owned, lent, strict=True)), (), (), lends=True),
        call(jaxpr, lent, (made,), "generation"),
        Move("generation", "training", tuple(zip(lent, owned, strict=True)), (), (), lends=True),
    ]
    both = {"training": "devices", "generation": "devices"}

    def peak(steps):
        found = schedule(steps, tuple((value,) for value in owned))
        return peak_by_group(found, dict.fromkeys(both, 1), both)["devices"]

    changing = 10 * size + 4 * size
    inside = 10 * size + 32 * (2 if size == 1 else 1)  # converted to float32 first
    assert peak(steps[:1]) == changing
    assert peak(steps) == max(changing + 32, inside)
    again = [*steps, *steps]  # back where they were, they can be lent a second time
    assert peak(again) == peak(steps)
    kept = traced(lambda x: jnp.sin(x), (100,))
    (x,), (y,) = values(kept, "training")
    after = [*steps, call(kept, (x,), (y,), "training")]  # beside the halves alone
    assert peak(after) == 5 * size + 32 + 400
