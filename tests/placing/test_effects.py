"""Effects under several groups run in program order, once each; plans that cannot do so are refused."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

import fdg
import policies
from fdg.placing.policy import Group
from tests.placing.schedules import assert_valid, described


class Wire:
    """Fragments that append to a log on the host; what `recv` returns depends on the length of the log."""

    def __init__(self, ordered=True, trips=3, send_role="environment"):
        self.log, self.ordered, self.trips, self.send_role = [], ordered, trips, send_role

    def init(self, key):
        return {"x": jnp.arange(4.0), "w": jnp.float32(0.5)}

    def _call(self, function, *args):
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        return io_callback(function, shape, *args, ordered=self.ordered)

    def _send(self, action):
        self.log.append(("send", float(action[0])))
        return np.asarray(action)

    def _recv(self):
        self.log.append(("recv",))
        return np.full(4, 0.25 * len(self.log), np.float32)

    def iterate(self, state):
        act = fdg.fragment("actor", (None, 0), name="act")(lambda w, x: w * x)
        send = fdg.fragment(self.send_role, name="send")(lambda a: (self._call(self._send, a), a)[1])
        recv = fdg.fragment("environment", name="recv")(lambda x: self._call(self._recv) + 0.0 * x)
        learn = fdg.fragment("learner", (None, 0), None, name="learn")(lambda w, x: w + 0.01 * jnp.mean(x))

        def one(x, _):
            send(act(state["w"], x))
            return recv(jnp.zeros(4)), None  # does not depend on what was sent

        x, _ = jax.lax.scan(one, state["x"], None, length=self.trips)
        return {"x": x, "w": learn(state["w"], x)}, {"x": x[0]}


def plain(algorithm, iterations):
    state = algorithm.init(None)
    for _ in range(iterations):
        state, _ = algorithm.iterate(state)
    jax.effects_barrier()
    return jax.tree.map(np.asarray, state), list(algorithm.log)


@dataclasses.dataclass(frozen=True)
class Apart:
    """Places `send` and `recv` on separate groups."""

    def place(self, devices):
        return {
            "sender": Group("senders", (1,)),
            "environment": Group("receivers", (0,)),
            "actor": Group("actors", (2,)),
            "learner": Group("actors", (2,)),
        }


@pytest.mark.parametrize(
    ("policy", "send_role", "ordered"),
    [
        (policies.SingleLearnerFine(), "environment", True),
        (Apart(), "sender", True),
        # JAX may reorder unordered effects within one program, also under plain jit; programs run in order.
        (Apart(), "sender", False),
    ],
)
def test_effects_run_in_order_and_once(devices, policy, send_role, ordered):
    expected, log = plain(Wire(send_role=send_role), 3)
    assert [what for what, *_ in log] == ["send", "recv"] * 9
    algorithm = Wire(ordered, send_role=send_role)
    engine = fdg.compile(algorithm, policy, devices[: 3 if send_role == "sender" else 2])
    assert_valid(engine.plan.schedule)
    state, _ = engine.run(engine.init(0), 2)
    state, _ = engine.run(state, 1)
    for name, x in expected.items():
        np.testing.assert_allclose(state[name], x, rtol=1e-6)
    jax.effects_barrier()
    assert [what for what, *_ in algorithm.log] == [what for what, *_ in log]
    np.testing.assert_allclose([x for _, *x in algorithm.log if x], [x for _, *x in log if x], rtol=1e-6)


def test_effect_token_is_a_planned_value():
    """The sending program waits for the receiving one: a token of four bytes moves between the groups."""
    plan = fdg.place(Wire(send_role="sender"), Apart(), 3)
    assert_valid(plan.schedule)
    steps = described(plan.schedule)
    assert steps.index("  receivers: recv") > steps.index("  senders: send")
    assert any("senders -> receivers: u32[]" in step for step in steps), steps
    assert any("later: receivers -> senders: u32[]" in step for step in steps), steps
    assert len(plan.schedule.leaves) == 2


class Between:
    """Effects in code between fragments: two groups read the result of one, nothing reads that of another."""

    def __init__(self):
        self.log = []

    def init(self, key):
        return jnp.zeros(4)

    def iterate(self, x):
        def record(what):
            return lambda *_: (self.log.append(what), np.float32(len(self.log)))[1]

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        drawn = io_callback(record("drawn"), shape, ordered=True)
        a = fdg.fragment("actor", name="act")(jnp.sin)(x + drawn)
        io_callback(record("unread"), shape, a[0], ordered=True)
        b = fdg.fragment("learner", name="learn")(jnp.cos)(a + drawn)
        io_callback(record("last"), shape, ordered=True)
        return b, {"drawn": drawn}


def test_effects_between_fragments_are_neither_copied_nor_pruned(devices):
    algorithm = Between()
    engine = fdg.compile(algorithm, policies.SingleLearnerCoarse(actors=1, learners=1), devices[:2])
    _, metrics = engine.run(engine.init(0), 3)
    jax.effects_barrier()
    assert algorithm.log == ["drawn", "unread", "last"] * 3
    np.testing.assert_array_equal(metrics["drawn"], [1.0, 4.0, 7.0])


class Printing:
    """Debug prints, which have no result, within a scan that becomes a loop of the schedule."""

    def init(self, key):
        return jnp.zeros(4)

    def iterate(self, x):
        act, step = fdg.fragment("actor", name="act")(jnp.sin), fdg.fragment("environment", name="s")(jnp.cos)
        learn = fdg.fragment("learner", name="learn")(lambda x: x * 0.5)

        def one(x, _):
            jax.debug.print("before {}", x.shape[0])
            x = step(act(x))
            jax.debug.print("after {}", x[0] * 0)
            return x, None

        return learn(jax.lax.scan(one, x, None, length=2)[0]), {}


def test_debug_prints_are_neither_lost_nor_repeated(devices, capfd):
    engine = fdg.compile(Printing(), policies.SingleLearnerFine(), devices[:2])
    jax.block_until_ready(engine.run(engine.init(0), 2))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")
    assert (lines.count("before 4"), lines.count("after 0.0")) == (4, 4)


# --- refused effects ---

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)
CALLS = {
    "io_callback": (lambda x: io_callback(np.asarray, SHAPE, x), "asarray"),
    "pure_callback": (lambda x: jax.pure_callback(np.asarray, SHAPE, x), "asarray"),
    "ffi": (lambda x: jax.ffi.ffi_call("write_log", SHAPE, has_side_effect=True)(x), "write_log"),
    "buffer": (lambda x: buffer_callback(print, SHAPE, has_side_effect=True)(x), "print"),
    "pure buffer": (lambda x: buffer_callback(print, SHAPE)(x), "print"),
    "ordered print": (lambda x: (jax.debug.print("{}", x, ordered=True), x)[1], "debug_print"),
}


@dataclasses.dataclass(frozen=True)
class Calling:
    kind: str
    inside: str = "jit"

    def init(self, key):
        return jnp.zeros(4)

    def iterate(self, x):
        call = CALLS[self.kind][0]
        if self.inside == "scan":
            outside = call
            call = lambda x: jax.lax.scan(lambda x, _: (outside(x), None), x, None, length=2)[0]  # noqa: E731
        x = fdg.fragment("environment", name="log")(jax.jit(call))(x)
        return fdg.fragment("learner", name="learn")(jnp.sin)(x), {}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("inside", ["jit", "scan"])
def test_effects_on_several_devices_are_refused(kind, inside):
    what = CALLS[kind][1]
    words = rf"{what} in fragment 'log' \(environment\) runs on the host"
    for policy, count in ((policies.GPUOnly(), 2), (policies.SingleLearnerFine(workers=2), 3)):
        with pytest.raises(fdg.PlanError, match=words):
            fdg.place(Calling(kind, inside), policy, count)
    with pytest.raises(fdg.PlanError, match=rf"num_seeds=2: {words}"):
        fdg.place(Calling(kind, inside), policies.GPUOnly(), 1, num_seeds=2)
    fdg.place(Calling(kind, inside), policies.SingleLearnerFine(workers=1), 2)


@pytest.mark.parametrize("devices", [1, 2])
def test_host_calls_of_a_single_agent(devices):
    """`num_seeds=1` only adds an axis of length 1: calls and numbers are those of the plain algorithm."""
    one, agents = Wire(), Wire()
    engine = fdg.compile(one, policies.GPUOnly(), devices=1)
    state, metrics = engine.run(engine.init(seed=0), iterations=3)
    engine = fdg.compile(agents, policies.GPUOnly(), devices=devices, num_seeds=1)
    states, all_metrics = engine.run(engine.init(seed=0), iterations=3)
    jax.effects_barrier()
    assert one.log == agents.log and len(one.log) == 18
    jax.tree.map(np.testing.assert_array_equal, states, jax.tree.map(lambda x: x[None], state))
    jax.tree.map(np.testing.assert_array_equal, all_metrics, jax.tree.map(lambda x: x[:, None], metrics))


def test_local_ref_is_not_an_effect():
    class Counting:
        def init(self, key):
            return jnp.zeros(4)

        def iterate(self, x):
            def count(x):
                memory = jax.new_ref(x)
                memory[...] = memory[...] + 1
                return memory[...]

            return fdg.fragment("learner", name="count")(count)(x), {}

    fdg.place(Counting(), policies.GPUOnly(), 2)


def test_ref_of_several_programs_is_refused():
    class Counting:
        def init(self, key):
            return jnp.zeros(4)

        def iterate(self, x):
            memory = jax.new_ref(x)
            memory[...] = fdg.fragment("sender", name="sent")(jnp.sin)(memory[...])
            memory[...] = fdg.fragment("environment", name="seen")(jnp.cos)(memory[...])
            act = fdg.fragment("actor", name="acted")(jnp.tanh)
            return act(memory[...]), {}

    fdg.place(Counting(), policies.GPUOnly(), 2)
    with pytest.raises(fdg.PlanError, match=r"Apart\(\) passes a mutable array .*: create and use it inside"):
        fdg.place(Counting(), Apart(), 3)


def test_effects_in_several_processes_are_refused():
    devices = [types.SimpleNamespace(platform="cpu", process_index=i) for i in (0, 1, 1)]
    words = r"Apart\(\) puts effects into several processes.*_recv in fragment 'recv' .*\(receivers\)"
    with pytest.raises(fdg.PlanError, match=words):
        fdg.place(Wire(send_role="sender"), Apart(), devices)
    devices[0].process_index = 1
    fdg.place(Wire(send_role="sender"), Apart(), devices)
