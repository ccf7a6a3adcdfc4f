"""The memory that programs and schedules need, by hand."""

import jax
import jax.numpy as jnp
import pytest

from fdg.placing.layout import BATCH, MODEL, Layout
from fdg.placing.memory import peak_by_group, program_bytes
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Value

M = 1000 * 1000  # elements


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def temporaries(function, *shapes, axes=(), devices=1):
    """In MB: what there is besides arguments and results, which these functions have one of each."""
    jaxpr = traced(function, *shapes)
    ends = [v.aval.size for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars)]
    return program_bytes(jaxpr, axes, devices) / 1e6 - 4 * sum(ends) / 1e6 / devices


@pytest.mark.parametrize(("devices", "bytes_"), [(1, 12 + 4 + 12), (2, 8 + 4 + 8)])
def test_arguments_results_and_what_is_alive_together(devices, bytes_):
    """x [2], w [1]: the cosine of 8 B, and its sum of 4; the sine is computed where the cosine is."""
    jaxpr = traced(lambda w, x: w * jnp.sum(jnp.cos(jnp.sin(x)), keepdims=True), (1,), (2,))
    assert program_bytes(jaxpr, [None, 0], devices) == bytes_


def test_results_take_over_donated_arguments():
    jaxpr = traced(lambda x: jnp.sin(x) + 1, (M,))
    assert [program_bytes(jaxpr, (), 1, donated) for donated in ([], [0])] == [8 * M, 4 * M]


@pytest.mark.parametrize(
    ("function", "megabytes"),
    [
        (lambda x: jnp.tanh(x * 2 + 1), 0),  # one operation after the other, by one reader each
        (lambda x: jnp.tanh(x @ x) * 2, 4),
        (lambda x: ((x + 1) @ x) @ x, 8),  # what a product reads is an array, and so is what it makes
        (lambda x: (((h := jnp.tanh(x @ x)) @ x) @ x) * (1 - h), 12),  # h stays until 1 - h is computed
        (lambda x: ((x @ x).sum(axis=0), x[0])[1].sum() * x, 0),  # what nobody reads
        (lambda x: jax.jit(lambda x: x @ x)(jax.jit(lambda x: x @ x)(x)), 4),  # calls are written out
        (lambda x: (x @ x).reshape(-1).reshape(1000, 1000).T @ x, 8),  # views are no arrays
    ],
)
def test_what_becomes_an_array(function, megabytes):
    assert temporaries(function, (1000, 1000)) == pytest.approx(megabytes, abs=0.01)


def test_a_batch_is_split():
    assert temporaries(lambda x: (x + 1) @ jnp.ones((8, 8)), (M, 8), axes=[0], devices=4) < 8.1


def test_a_loop_has_the_arrays_of_one_trip_and_writes_over_what_it_carries():
    """Of a trip the product, of which a sum of 4 kB is kept."""

    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), (c @ c).sum(axis=0)), x @ x, length=8)[0].sum() * x

    assert temporaries(loop, (1000, 1000)) == pytest.approx(4 + 4, abs=0.1)


def test_a_branch_has_its_largest():
    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ x) @ x, lambda x: x, x)

    assert temporaries(branches, (1000, 1000)) == pytest.approx(4, abs=0.01)


def test_random_numbers_are_made_of_words():
    found = program_bytes(
        jax.make_jaxpr(lambda key: jax.random.bits(key, (M,)).sum())(jax.random.key(0)), (), 1
    )
    assert found == pytest.approx(5 * 4 * M, rel=0.01)


def test_inputs_that_lie_otherwise_and_what_becomes_of_them():
    """w [4, 2] of 32 B is split by rules over four, as are the new w and what has its shape in between."""
    split = Layout((4, 2), ((MODEL,),), ((BATCH, 1), (MODEL, 4)))
    jaxpr = traced(lambda w: jnp.cos(w @ jnp.eye(2)), (4, 2))
    assert program_bytes(jaxpr, [None], 1, (), {0: split}) == 3 * 8 + 16  # and the identity


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


WAVE = traced(lambda x: jnp.cos(jnp.cumsum(x, axis=1)), (2, 1))  # 8 B in between, 8 B out


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
    other = traced(lambda x: jnp.cos(jnp.cumsum(x, axis=1)), (2, 1))
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
        Move("training", "generation", tuple(zip(owned, lent, strict=True)), (), (), donates=True),
        call(jaxpr, lent, (made,), "generation"),
        Move("generation", "training", tuple(zip(lent, owned, strict=True)), (), (), donates=True),
    ]
    both = {"training": "devices", "generation": "devices"}

    def peak(steps):
        found = schedule(steps, tuple((value,) for value in owned))
        return peak_by_group(found, dict.fromkeys(both, 1), both)["devices"]

    changing = 10 * size + 4 * size
    inside = 10 * size + 32
    assert peak(steps[:1]) == changing
    assert peak(steps) == max(changing + 32, inside)
    again = [*steps, *steps]  # back where they were, they can be lent a second time
    assert peak(again) == peak(steps)
    kept = traced(lambda x: jnp.sin(x), (100,))
    (x,), (y,) = values(kept, "training")
    after = [*steps, call(kept, (x,), (y,), "training")]  # beside the halves alone
    assert peak(after) == 5 * size + 32 + 400
