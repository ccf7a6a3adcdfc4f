"""Checks that timing does not change results: runs with random sleeps, compared bit by bit.

    python -m tests.running.sleeps --runs 30
    python -m tests.running.sleeps --runs 30 --processes 2
    python -m tests.running.sleeps --runs 30 --algo grpo
    python -m tests.running.sleeps --runs 30 --algo ppo_rlhf --processes 2

Every fragment and every transfer sleeps 0 to 50 ms on the host; in each run, one group runs a busy loop
instead. Four groups, each with a lane, are in one process, or in two. Algorithms for language models stream:
`ahead=2`, fewer slots than responses, micro-batches. The last line counts, for each lag, the runs whose
state or metrics differ from the first run in any bit.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import inspect
import json
import random
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import algos
import fdg
import policies
from fdg import keys
from fdg.fragment import FragmentFunction
from fdg.placing.policy import Group
from fdg.processes import ports
from fdg.running.exchange import Exchange
from fdg.running.transfers import Mover
from tools.break_it.language import counted

ROLES = ("actor", "reward", "reference", "learner")
LAGS = (0, 1, 3, 4)  # in micro-batches; an iteration has 3, or 2 for language models


class Pause:
    """Sleeps for a random time; the starved role runs a busy loop instead."""

    def __init__(self, max_seconds):
        self.max_seconds, self.starved = max_seconds, None

    def __call__(self, role=None):
        seconds = self.max_seconds * random.SystemRandom().random()
        if role is None or role != self.starved:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass


@dataclasses.dataclass(frozen=True)
class Stages:
    """Micro-batches through four roles, all of which call the host."""

    pause: Pause
    micro_batches: int = 3

    def init(self, key):
        return {
            "weight": jnp.linspace(0.5, 1.5, 4),
            "old": jnp.ones(4),
            "rows": jnp.linspace(0, 1, 8).reshape(2, 4),
        }

    def iterate(self, state):
        def on(role, function, *axes, out=0):
            def paused(*arrays):
                def wait(x):
                    self.pause(role)
                    return np.asarray(x)

                made = function(*arrays)
                return jax.pure_callback(wait, jax.ShapeDtypeStruct(made.shape, made.dtype), made)

            return fdg.fragment(role, in_axes=axes, out_axes=out)(paused)

        act = on("actor", lambda weight, rows: jnp.sin(rows + weight[None]), None, 0)
        score = on("reward", lambda rows: jnp.cumsum(rows, axis=1), 0)
        refer = on("reference", lambda old, rows: jnp.cos(rows * old[None]), None, 0)
        gradient = on("learner", lambda rows, a, b: jnp.sum(rows * a - b, axis=0), 0, 0, 0, out=None)

        def micro(carry, _):
            rows, total = carry
            rows = act(state["weight"], rows)
            scored, referred = score(rows), refer(state["old"], rows)
            return (rows, total + gradient(rows, scored, referred)), jnp.sum(scored)

        start = state["rows"], jnp.zeros(4)
        (rows, total), seen = jax.lax.scan(micro, start, None, length=self.micro_batches)
        weight = on("learner", lambda weight, total: weight - 0.1 * jnp.tanh(total), None, None, out=None)(
            state["weight"], total
        )
        return {"weight": weight, "old": state["old"], "rows": rows}, {
            "seen": jnp.sum(seen),
            "w": jnp.sum(weight),
        }


@dataclasses.dataclass(frozen=True)
class Apart:
    """Places each role on a separate device."""

    lag: int = 0

    def place(self, devices):
        return {role: Group(f"{role}s", (i,)) for i, role in enumerate(ROLES)}


def language(name, pause, lag):
    """A streaming algorithm whose fragments all sleep, and its policy, with four groups."""

    def paused(fragment):
        role, index = fragment.mark.role, -1

        def wait(x):
            pause(role)
            return np.asarray(x)

        def sleepy(*arguments):
            leaves, structure = jax.tree.flatten(fragment.__wrapped__(*arguments))
            shape = jax.ShapeDtypeStruct(leaves[index].shape, leaves[index].dtype)
            leaves[index] = jax.pure_callback(wait, shape, leaves[index])
            return jax.tree.unflatten(structure, leaves)

        return fdg.fragment(role, fragment.in_axes, fragment.out_axes, name=fragment.mark.name)(sleepy)

    kind = algos.get(name)
    found = inspect.getmembers_static(kind, lambda x: isinstance(x, FragmentFunction))
    sleepy = type(kind.__name__, (kind,), {attribute: paused(fragment) for attribute, fragment in found})
    algorithm = sleepy(
        env=counted(max_response=12), num_prompts=4, group_size=2, hidden_size=8, num_layers=1, num_heads=2,
        ahead=2, slots=6, micro_batches=2, learning_rate=1e-2,
    )  # fmt: skip
    apart = {"rewards": 1} if name == "grpo" else {"critics": 1}
    return algorithm, policies.Standalone(actors=1, lag=lag, **apart)


@contextlib.contextmanager
def sleeping_transfers(pause):
    """Transfers sleep before they start."""

    def slowed(function):
        def delayed(self, *arguments):
            pause()
            return function(self, *arguments)

        return delayed

    with contextlib.ExitStack() as stack:
        for kind, name in ((Mover, "__call__"), (Exchange, "cut"), (Exchange, "exchange")):
            stack.enter_context(mock.patch.object(kind, name, slowed(getattr(kind, name))))
        yield


def digest(state, metrics):
    """A hash of all bits of the state and the metrics in this process."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((state, metrics)):
        for shard in leaf.addressable_shards:
            found.update(np.asarray(keys.to_data(shard.data)).tobytes())
    return found.hexdigest()


def digests(runs, seconds, devices, iterations=3, lags=LAGS, algo=None):
    """For each lag, the digest of a run without sleeps, and those of `runs` runs."""
    pause = Pause(seconds)
    found = {}
    for lag in lags:
        parts = language(algo, pause, lag) if algo else (Stages(pause), Apart(lag))
        engine = fdg.compile(*parts, devices)
        pause.max_seconds, pause.starved = 0.0, None
        of_lag = [digest(*engine.run(engine.init(0), iterations))]
        pause.max_seconds = seconds
        with sleeping_transfers(pause):
            for _ in range(runs):
                pause.starved = random.SystemRandom().choice(ROLES)
                of_lag.append(digest(*engine.run(engine.init(0), iterations)))
        found[str(lag)] = of_lag
    return found


def _process(index, port, runs, seconds, algo):
    fdg.host_devices(2)
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    print(json.dumps(digests(runs, seconds, jax.devices(), algo=algo)), flush=True)


def in_processes(runs, seconds, algo):
    """As `digests`, for two processes with two groups each."""
    port = ports.free_port("localhost")
    code = "from tests.running.sleeps import _process; _process({}, {}, {}, {}, {!r})"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(i, port, runs, seconds, algo)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    results = [json.loads(child.communicate(timeout=1800)[0].splitlines()[-1]) for child in children]
    return {lag: [*zip(*(one[lag] for one in results), strict=True)] for lag in results[0]}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--seconds", type=float, default=0.05, help="longest sleep of a fragment or transfer")
    parser.add_argument("--algo", choices=("grpo", "ppo_rlhf"), help="instead of stubs")
    given = parser.parse_args(words)
    runs = -(-given.runs // len(LAGS))
    if given.processes == 2:
        found = in_processes(runs, given.seconds, given.algo)
    else:
        fdg.host_devices(4)
        found = digests(runs, given.seconds, jax.devices(), algo=given.algo)
    apart = {lag: sum(one != every[0] for one in every[1:]) for lag, every in found.items()}
    print(f"{sum(len(every) - 1 for every in found.values())} runs; that differ, by lag: {apart}")
    return int(any(apart.values()))


if __name__ == "__main__":
    raise SystemExit(main())
