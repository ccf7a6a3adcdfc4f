"""Host functions that fail: an error of one line that names the fragment."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg import jaxprs
from fdg.commands.cli import train_main
from fdg.errors import HostError, host_error
from fdg.lowering import host_calls
from tests.conformance.comparison import plain
from tests.lowering.calling import Calling

STEP = "fragment 'step' (environment): ask"
FAULTS = {
    "raise": f"{STEP} raised ValueError: the wheels fell off (calling.py, line 19)",
    "sys.exit": f"{STEP} raised SystemExit: 4 (calling.py, line 21)",
    "shape": f"{STEP} returned float32[3], expected float32[4]",
    "dtype": f"{STEP} returned int32[4], expected float32[4]",
    "count": f"{STEP} returned 2 arrays, expected 1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failure_on_the_command_line(fault, tmp_path, capfd, host_devices):
    flags = f"--algo tests.lowering.calling:Calling --fault {fault} --devices 1 --total-steps 8"
    assert train_main([*flags.split(), "--out", str(tmp_path / "run")]) == 1
    assert capfd.readouterr().err == f"error: {FAULTS[fault]}\n"


@pytest.mark.parametrize("kind", ["pure", "ordered", "debug"])
@pytest.mark.parametrize("policy", [policies.GPUOnly(), policies.SingleLearnerCoarse(actors=1)], ids=repr)
def test_failure_in_python(kind, policy, devices, caplog):
    count = 1 if policy == policies.GPUOnly() else 2
    engine = fdg.compile(Calling(fault="raise", kind=kind), policy, devices[:count])
    with pytest.raises((jax.errors.JaxRuntimeError, HostError)) as caught:
        jax.block_until_ready(engine.run(engine.init(), 2))
        jax.effects_barrier()
    found = caught.value if isinstance(caught.value, HostError) else host_error(caught.value)
    line = (
        FAULTS["raise"]
        if kind != "debug"
        else FAULTS["raise"].replace("ask", "a function of jax.debug.callback")
    )
    assert str(found) == line
    assert str(caught.value).rstrip().splitlines()[-1].endswith(line)
    assert not caplog.records  # JAX's own traceback


def test_failure_in_init(devices):
    engine = fdg.compile(Calling(fault="raise", where="init"), policies.GPUOnly(), devices[:1])
    with pytest.raises(HostError, match=r"^init: ask raised ValueError: the wheels"):
        jax.block_until_ready(engine.init())


def test_exit_is_reported():
    script = (
        "import fdg, policies, jax; from tests.lowering.calling import Calling\n"
        "engine = fdg.compile(Calling(fault='exit'), policies.GPUOnly(), jax.devices()[:1])\n"
        "jax.block_until_ready(engine.run(engine.init(), 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (7, f"error: {STEP} called os._exit(7)\n")


def test_os_exit_is_restored_after_a_call():
    before = os._exit
    call = host_calls.Guarded(lambda: [os._exit is before], "here", None, None)
    assert call() == [False] and os._exit is before


class Mute(Exception):
    __str__ = None


class Unreadable:
    def __array__(self, *_, **__):
        raise ValueError("no array")


def raising(error):
    def ask():
        raise error

    return ask


@pytest.mark.parametrize(
    "ask, message",
    [
        (raising(Mute("x")), "raised Mute: no message"),
        (raising(KeyboardInterrupt()), "raised KeyboardInterrupt: no message"),
        (raising(GeneratorExit("g")), "raised GeneratorExit: g"),
        (lambda: ["abc"], r"returned <U3\[\], expected float32\[4\]"),
        (lambda: [object()], r"returned object\[\], expected float32\[4\]"),
        (lambda: [np.zeros(4, "M8[s]")], r"returned datetime64\[s\]\[4\], expected float32\[4\]"),
        (lambda: [Unreadable()], "raised ValueError: no array"),
    ],
)
def test_any_exception_or_wrong_result_is_one_line(ask, message):
    ask.__name__ = "ask"
    call = host_calls.Guarded(ask, "fragment 'step' (environment)", (((4,), "float32"),), None)
    with pytest.raises(HostError, match=f"^{re.escape(STEP)} {message}"):
        call()


@pytest.mark.parametrize("fault", ["none", "double"])
def test_calls_that_succeed_are_unchanged(fault, devices):
    algorithm = Calling(fault=fault, kind="ordered")
    engine = fdg.compile(algorithm, policies.GPUOnly(), devices[:1])
    state, metrics = engine.run(engine.init(), 3)
    expected, _ = plain(algorithm, algorithm.init(jax.random.key(0)), 3)
    np.testing.assert_array_equal(state, expected)
    np.testing.assert_array_equal(state, [((0 + 2) * 2 + 2) * 2 * 2.0 + 4] * 4)
    assert metrics["episode_return"].tolist() == [4.0, 12.0, 28.0]


def test_guarded_calls_keep_effects_and_equality():
    jaxpr = fdg.trace(Calling(kind="ordered")).jaxpr
    one, two = host_calls.guard(jaxpr), host_calls.guard(jaxpr)
    assert jaxprs.open_jaxpr(one).effects == jaxprs.open_jaxpr(jaxpr).effects

    def calls(jaxpr):
        for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name == "io_callback":
                yield eqn.params["callback"]
            for body in jaxprs.bodies(eqn):
                yield from calls(body.jaxpr)

    (first,), (second,) = calls(one), calls(two)
    assert first == second and hash(first) == hash(second)
    assert first.where == "fragment 'step' (environment)"
    again = host_calls.guard(one)
    assert next(calls(again)) is first  # guarded once
    silent = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    assert host_calls.guard(silent) is silent


class HostData:
    """Reads its data from the host; each device keeps some of the columns."""

    def init(self, key):
        shape = jax.ShapeDtypeStruct((10, 8, 1), jnp.float32)
        return {"data": jax.pure_callback(lambda: np.ones((10, 8, 1), np.float32), shape)}

    def iterate(self, state):
        @fdg.fragment("learner", in_axes=1, out_axes=1)
        def halved(data):
            return data / 2

        return {"data": halved(state["data"])}, {"sum": jnp.sum(state["data"])}


def test_host_data_is_sharded_without_a_warning(devices, capfd):
    engine = fdg.compile(HostData(), policies.GPUOnly(), devices[:4])
    _, metrics = engine.run(engine.init(0), 2)
    assert metrics["sum"].tolist() == [80, 40]
    assert "rematerialization" not in capfd.readouterr().err
