"""Predicted memory of programs and schedules, against numbers worked by hand."""

import jax
import jax.numpy as jnp
import pytest

import fdg
from fdg.placing.layout import BATCH, MODEL, Layout
from fdg.placing.memory import peak_by_group, program_bytes
from fdg.placing.scheduling.schedule import Call, Move, Repeat, Schedule, Value

M = 1000 * 1000  # elements


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def temporaries(function, *shapes, axes=(), devices=1):
    """Temporaries in MB: all memory but arguments and results."""
    jaxpr = traced(function, *shapes)
    ends = [v.aval.size for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars)]
    return program_bytes(jaxpr, axes, devices) / 1e6 - 4 * sum(ends) / 1e6 / devices


@pytest.mark.parametrize(("devices", "bytes_"), [(1, 12 + 4 + 12), (2, 8 + 4 + 8)])
def test_arguments_results_and_live_temporaries(devices, bytes_):
    """x [2], w [1]: cos(x) takes 8 B and its sum 4 B; sin(x) is fused into cos(x)."""
    jaxpr = traced(lambda w, x: w * jnp.sum(jnp.cos(jnp.sin(x)), keepdims=True), (1,), (2,))
    assert program_bytes(jaxpr, [None, 0], devices) == bytes_


def test_results_reuse_donated_arguments():
    jaxpr = traced(lambda x: jnp.sin(x) + 1, (M,))
    assert [program_bytes(jaxpr, (), 1, donated) for donated in ([], [0])] == [8 * M, 4 * M]


@pytest.mark.parametrize(
    ("function", "megabytes"),
    [
        (lambda x: jnp.tanh(x * 2 + 1), 0),  # elementwise operations with one reader each are fused
        (lambda x: jnp.tanh(x @ x) * 2, 4),
        (lambda x: ((x + 1) @ x) @ x, 8),  # operands and results of matmuls are materialized
        (lambda x: (((h := jnp.tanh(x @ x)) @ x) @ x) * (1 - h), 12),  # h is live until 1 - h is computed
        (lambda x: ((x @ x).sum(axis=0), x[0])[1].sum() * x, 0),  # unused results
        (lambda x: jax.jit(lambda x: x @ x)(jax.jit(lambda x: x @ x)(x)), 4),  # calls are inlined
        (lambda x: (x @ x).reshape(-1).reshape(1000, 1000).T @ x, 8),  # views take no memory
    ],
)
def test_materialized_temporaries(function, megabytes):
    assert temporaries(function, (1000, 1000)) == pytest.approx(megabytes, abs=0.01)


def test_batch_is_divided_over_devices():
    assert temporaries(lambda x: (x + 1) @ jnp.ones((8, 8)), (M, 8), axes=[0], devices=4) < 8.1


def test_loop_reuses_memory_across_trips():
    """A trip holds one product, of which it keeps a sum of 4 kB."""

    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), (c @ c).sum(axis=0)), x @ x, length=8)[0].sum() * x

    assert temporaries(loop, (1000, 1000)) == pytest.approx(4 + 4, abs=0.1)


def test_branches_need_the_memory_of_the_largest():
    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ x) @ x, lambda x: x, x)

    assert temporaries(branches, (1000, 1000)) == pytest.approx(4, abs=0.01)


def test_random_bits_need_temporaries():
    found = program_bytes(
        jax.make_jaxpr(lambda key: jax.random.bits(key, (M,)).sum())(jax.random.key(0)), (), 1
    )
    assert found == pytest.approx(5 * 4 * M, rel=0.01)


def test_sharded_inputs_and_their_results():
    """w [4, 2] of 32 B is sharded over four devices, as are the new w and other values of its shape."""
    split = Layout((4, 2), ((MODEL,),), ((BATCH, 1), (MODEL, 4)))
    jaxpr = traced(lambda w: jnp.cos(w @ jnp.eye(2)), (4, 2))
    assert program_bytes(jaxpr, [None], 1, (), {0: split}) == 3 * 8 + 16  # and the identity


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("model", [1, 2])
def test_caches_of_rowwise_calls(devices, model):
    """In each of 8 rows a cache of keys [100, 6] lives while a loop fills it; `model` splits the 6."""

    def generate(w, x):  # x [B, 4]
        def fill(i, keys):
            return jax.lax.dynamic_update_index_in_dim(keys, x @ w + keys[:, 0], i, axis=1)

        keys = jax.lax.fori_loop(0, 100, fill, jnp.zeros((x.shape[0], 100, 6)))
        return jnp.sum(keys, axis=(1, 2))

    jaxpr = traced(fdg.rowwise(generate, (None, 0)), (4, 6), (8, 4))
    layout = Layout((4, 6), ((), (MODEL,)), ((BATCH, devices), (MODEL, model)))
    found = program_bytes(jaxpr, [None, 0], devices, (), {0: layout} if model > 1 else {})
    rows, width = 8 // devices, 6 // model
    ends = 4 * (4 * width + rows * 4 + rows)  # w, x, and the sums
    cache, key = 4 * rows * 100 * width, 4 * rows * width
    assert ends + cache <= found <= ends + cache + 3 * key


# --- schedules ---


def values(jaxpr, group, axis=None):
    """(inputs, outputs) of a traced program, as values on a group."""
    return tuple(
        tuple(Value(v, group, axis) for v in ends) for ends in (jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars)
    )


def call(jaxpr, inputs, outputs, group="here"):
    return Call("f", group, ("f",), tuple(jaxpr.jaxpr.eqns), inputs, outputs, frozenset(), frozenset())


def schedule(steps, leaves, constants=()):
    return Schedule(tuple(steps), leaves, constants, (), ())


WAVE = traced(lambda x: jnp.cos(jnp.cumsum(x, axis=1)), (2, 1))  # 8 B in between, 8 B out


def test_call_and_move():
    """`here` holds x of 8 B and both arrays of the call; `there` holds a copy once it is moved."""
    (x,), (y,) = values(WAVE, "here", 0)
    copy = Value(y.variable, "there", 0)
    steps = [call(WAVE, (x,), (y,)), Move("here", "there", ((y, copy),), (), ())]
    found = schedule(steps, ((x,),))
    assert peak_by_group(found, {"here": 1, "there": 1}) == {"here": 24, "there": 8}
    assert peak_by_group(found, {"here": 2, "there": 1}) == {"here": 12, "there": 8}
    together = peak_by_group(found, {"here": 1, "there": 1}, {"here": "both", "there": "both"})
    assert together == {"both": 8 + 16}  # the copy is made after the call


def test_values_read_later_stay_allocated():
    """y of the first call is live during the second, which needs 16 B."""
    (x,), (y,) = values(WAVE, "here")
    other = traced(lambda x: jnp.cos(jnp.cumsum(x, axis=1)), (2, 1))
    (_,), (z,) = values(other, "here")
    again = Call("g", "here", ("g",), tuple(other.jaxpr.eqns), (x,), (z,), frozenset(), frozenset())
    reader = Move("here", "there", ((y, Value(y.variable, "there", None)),), (), ())
    steps = [call(WAVE, (x,), (y,)), again, reader]
    assert peak_by_group(schedule(steps, ((x,),)), {"here": 1, "there": 1})["here"] == 8 + 8 + 16
    steps = [call(WAVE, (x,), (y,)), reader, again]
    assert peak_by_group(schedule(steps, ((x,),)), {"here": 1, "there": 1})["here"] == 8 + 16


def test_constants_and_replicas_of_leaves_count():
    (x,), (y,) = values(WAVE, "here")
    copy, constant = Value(x.variable, "there", None), Value(x.variable, "there", None)
    found = schedule([call(WAVE, (x,), (y,))], ((x, copy),), ((0, constant),))
    assert peak_by_group(found, {"here": 1, "there": 1}) == {"here": 24, "there": 16}


def test_loop_needs_the_memory_of_one_trip():
    """x of 8 B is live throughout. A trip computes two arrays; the carry, which is the result, is a third."""
    (x,), (y,) = values(WAVE, "here")
    (start,), (end,) = values(WAVE, "here")
    body = call(WAVE, (start,), (end,))
    loop = Repeat(5, ((x, start),), frozenset(), (body,), ((end, start),), ((end, y),))
    assert peak_by_group(schedule([loop], ((x,),)), {"here": 1}) == {"here": 8 + 8 + 16}


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32])
def test_lent_parameters_are_allocated_once(dtype):
    """Leaves [2] and [8], sharded over two devices by their owner and unsharded where they are lent.

    Elements: 1 + 4 sharded, 2 + 8 unsharded. Leaves are converted one by one, so only the largest exists in
    both layouts at once. The call needs the unsharded leaves and 32 bytes for its result, which stays.
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

    converting = 10 * size + 4 * size
    in_call = 10 * size + 32
    assert peak(steps[:1]) == converting
    assert peak(steps) == max(converting + 32, in_call)
    again = [*steps, *steps]  # leaves that came back can be lent again
    assert peak(again) == peak(steps)
    kept = traced(lambda x: jnp.sin(x), (100,))
    (x,), (y,) = values(kept, "training")
    after = [*steps, call(kept, (x,), (y,), "training")]  # next to the sharded leaves only
    assert peak(after) == 5 * size + 32 + 400
