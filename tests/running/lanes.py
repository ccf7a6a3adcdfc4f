"""Random schedules on lanes, with host functions that fail, are slow or never return, and with Ctrl-C.

    python -m tests.running.lanes --schedules 1000
    python -m tests.running.lanes --schedules 1000 --switch 1e-6

Programs are Python functions that mix integers, so nothing is compiled. Each schedule has to end correctly:
with the numbers of a single thread, or within `PATIENCE` seconds of a failure, with an error that names its
cause. The last line counts how schedules ended, and gives the longest time from cause to end.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from unittest import mock

import fdg

if __name__ == "__main__":
    fdg.host_devices(4)

import jax
import jax.numpy as jnp
import numpy as np

from fdg.engine import Engine
from fdg.errors import HostError
from fdg.lowering.host_calls import Guarded
from fdg.placing.policy import Group
from fdg.running import lanes, many_programs
from tests.conformance.comparison import leaves

PATIENCE = 5.0  # seconds
LIMIT = 0.4  # seconds for a host function
KINDS = ("right", "fails", "slow", "interrupted", "interrupted twice", "never")


@dataclasses.dataclass(frozen=True)
class OneDeviceEach:
    """Places role `i` of "actor", "learner", "r2" and "r3" on device `i`."""

    count: int
    staleness: int

    def place(self, devices):
        return {
            role: Group(f"group{i}", (i,))
            for i, role in enumerate(["actor", "learner", "r2", "r3"][: self.count])
        }


@dataclasses.dataclass(frozen=True)
class Mixer:
    """An algorithm whose fragments read random earlier values, some of them in a loop."""

    seed: int
    groups: int

    def init(self, key):
        return {"weight": jnp.ones(4, jnp.uint32), **{f"x{i}": jnp.full(4, i, jnp.uint32) for i in range(3)}}

    def iterate(self, state):
        rng = random.Random(self.seed)
        roles = ["actor", "learner", "r2", "r3"][: self.groups]

        def fragment(role, name, *arrays):
            def mix(*arrays):
                return sum(a * jnp.uint32(7 + k) for k, a in enumerate(arrays)) ^ jnp.uint32(len(name))

            return fdg.fragment(role, in_axes=None, out_axes=None, name=name)(mix)(*arrays)

        def choices(values, count):
            return [rng.choice(values) for _ in range(count)]

        values = list(state.values())
        for i, role in enumerate([*rng.sample(roles, len(roles)), *choices(roles, rng.randint(0, 2))]):
            values.append(fragment(role, f"f{i}", *choices(values, rng.randint(1, 3))))
        if rng.random() < 0.6:
            inside = [(rng.choice(roles), f"g{i}", rng.randint(1, 2)) for i in range(rng.randint(1, 3))]
            constant = rng.choice(values)

            def body(carry, _):
                made = [carry, constant]
                for role, name, count in inside:
                    made.append(fragment(role, name, *choices(made, count), carry))
                return made[-1], made[-1]

            last, rows = jax.lax.scan(body, rng.choice(values), None, length=rng.randint(2, 4))
            values += [last, rows[0]]
        weight = fragment("learner", "learn", state["weight"], *choices(values, 2))
        new = {"weight": weight, **{f"x{i}": rng.choice(values[4:] or values) for i in range(3)}}
        return new, {"m": jnp.sum(weight), "n": jnp.sum(rng.choice(values))}


def planned(seed):
    """An algorithm and its plan, with random groups and staleness."""
    rng = random.Random(seed)
    groups, staleness = rng.randint(2, 4), rng.choice([0, 0, 1, 2])
    algorithm = Mixer(seed, groups)
    graph = fdg.trace(algorithm)
    with contextlib.suppress(fdg.PlanError):  # fragments that alternate with updates cannot be stale
        return algorithm, fdg.place(graph, OneDeviceEach(groups, staleness), jax.devices()[:4])
    return algorithm, fdg.place(graph, OneDeviceEach(groups, 0), jax.devices()[:4])


class Faked:
    """An engine whose programs are Python functions, each of which first calls `before` with its name."""

    def __init__(self, algorithm, plan, lanes_of):
        self.before = lambda name: None
        with mock.patch.object(many_programs, "lanes_of", lanes_of):
            self.engine = Engine(algorithm, plan, jax.devices()[:4])
        for program in [*self.engine.programs, *self.engine._execution._stack.programs]:
            program.compiled = self._fake(program)

    def _fake(self, program):
        shapes = jax.eval_shape(program.function, *program.arguments)
        device = program.devices[0]
        call = Guarded(lambda: self.before(program.name), f"fragment '{program.name}' (faked)", None, None)

        def compiled(*arguments):
            call()
            if program.name.startswith("fetch"):
                return [jax.device_put(np.asarray(x), device) for x in jax.tree.leaves(arguments)]
            mixed = len(program.name)
            for x in jax.tree.leaves(arguments):
                mixed = (31 * mixed + int(np.sum(np.asarray(x), dtype=np.int64)) + 1) % 100_003
            made = [
                np.full(x.shape, (mixed + i) % 251, x.dtype) for i, x in enumerate(jax.tree.leaves(shapes))
            ]
            return jax.tree.unflatten(jax.tree.structure(shapes), [jax.device_put(x, device) for x in made])

        return compiled


def on_lanes(schedule, meshes):
    """A lane for each group, also if it needs none."""
    return lanes.Lanes(meshes)


def on_one_thread(schedule, meshes):
    """No lanes."""


def numbers(state, metrics):
    return {path: np.asarray(x) for path, x in leaves((state, metrics)).items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def try_one(seed, kind):
    """`attempt`, with a short time limit if a host function never returns."""
    limit = LIMIT if kind in ("never", "interrupted twice") else 600
    with mock.patch.dict(os.environ, {lanes.LIMIT: str(limit)}):
        return attempt(seed, kind)


def close(faked):
    """Ends the threads that measure an engine."""
    faked.engine._execution.timeline.end(1.0)


def attempt(seed, kind):
    """Runs a random schedule of one of `KINDS`; returns the seconds from the cause of its end to the end.

    Raises:
      AssertionError: it did not end correctly.
    """
    rng = random.Random(f"{seed} {kind}")
    plan = planned(seed)
    plain, tested = Faked(*plan, on_one_thread), Faked(*plan, on_lanes)
    iterations = rng.randint(1, 6)
    calls, lock, cause = Counter(), threading.Lock(), []
    faulty_call = rng.randint(1, 4 * iterations)
    release = threading.Event()
    pause = rng.choice([0.0, 0.0, 0.001, 0.003])

    def before(name):
        with lock:
            calls["all"] += 1
            is_faulty = calls["all"] == faulty_call
        if pause:
            time.sleep(pause * random.random())
        if not is_faulty:
            return
        cause.append((name, time.monotonic()))
        if kind == "fails":
            raise ValueError("the wheels fell off")
        if kind == "slow":
            time.sleep(0.3)
        if kind.startswith("interrupted"):
            os.kill(os.getpid(), signal.SIGINT)
        if kind == "interrupted twice":
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(PATIENCE)
        if kind == "never":
            release.wait(60)

    tested.before = before
    ended, result = None, None
    try:
        result = numbers(*tested.engine.run(tested.engine.init(0), iterations))
    except (HostError, KeyboardInterrupt) as error:
        ended = error
    seconds = time.monotonic() - cause[0][1] if cause else 0.0
    release.set()
    if not cause or kind in ("right", "slow"):
        assert ended is None, repr(ended)
        assert same(result, numbers(*plain.engine.run(plain.engine.init(0), iterations)))
        seconds = 0.0
    elif kind in ("fails", "never"):
        assert isinstance(ended, HostError) and f"'{cause[0][0]}'" in str(ended), f"{cause} {ended!r}"
    elif kind == "interrupted":
        if ended is None:  # it came after the last call
            assert same(result, numbers(*plain.engine.run(plain.engine.init(0), iterations)))
        else:
            assert isinstance(ended, KeyboardInterrupt)
            state, metrics = tested.engine.interrupted()
            done = len(metrics["m"])
            assert same(numbers(state, metrics), numbers(*plain.engine.run(plain.engine.init(0), done)))
    else:
        # Python merges two signals at once, and loses one in a finalizer: then the time limit ends the run.
        late = isinstance(ended, HostError) and f"'{cause[0][0]}'" in str(ended)
        assert ended is None or isinstance(ended, KeyboardInterrupt) or late, repr(ended)
    assert seconds < PATIENCE, f"{seconds:.1f} s after {cause}"
    os.environ[lanes.LIMIT] = "600"
    # Another run can start, and has the right numbers.
    tested.before = lambda name: None
    second = numbers(*tested.engine.run(tested.engine.init(0), 2))
    assert same(second, numbers(*plain.engine.run(plain.engine.init(0), 2))), "the next run differs"
    close(plain), close(tested)
    threads = [t.name for t in threading.enumerate() if t.name.startswith("lane ")]
    assert not threads, f"threads are left: {threads}"
    return seconds


@contextlib.contextmanager
def switching(seconds):
    """Sets Python's interval for switching threads; None keeps it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds or before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--switch", type=float, help="seconds between switches of threads")
    given = parser.parse_args(words)
    ended, slowest, wrong = Counter(), 0.0, []
    with switching(given.switch):
        for seed in range(given.seed, given.seed + given.schedules):
            kind = KINDS[seed % len(KINDS)]
            faulthandler.dump_traceback_later(180, exit=True)
            try:
                seconds = try_one(seed, kind)
            except Exception:
                wrong.append(seed)
                print(f"seed {seed}, {kind}:\n{traceback.format_exc()}", flush=True)
            else:
                ended[kind] += 1
                slowest = max(slowest, seconds)
    faulthandler.cancel_dump_traceback_later()
    print(f"{dict(ended)}; at most {slowest:.2f} s after the cause; {len(wrong)} ended otherwise: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
