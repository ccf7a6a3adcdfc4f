"""Checks that timing does not change results: runs with random sleeps, compared bit by bit.

    python -m tests.running.sleeps --runs 30
    python -m tests.running.sleeps --runs 30 --processes 2
    python -m tests.running.sleeps --runs 30 --algo grpo
    python -m tests.running.sleeps --runs 30 --algo ppo_rlhf --processes 2
    python -m tests.running.sleeps --runs 30 --algo impala --policy single_learner_coarse
    python -m tests.running.sleeps --runs 30 --algo ppo --rings 2

Every fragment and every transfer sleeps 0 to 50 ms on the host; in each run, one group runs a busy loop
instead. Four groups, each with a lane, are in one process, or in two. Algorithms for language models stream:
`ahead=2`, fewer slots than responses, micro-batches. PPO and IMPALA act in workers of Gymnasium, whose steps
sleep too. The last line counts, for each lag, the runs whose state or metrics differ from the first run in
any bit.
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
import envs
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
LAGS = (0, 1, 2, 3, 4)  # in micro-batches; an iteration has 3, or 2 for language models
STALENESS = (0, 1, 2)  # in iterations, for rings, which take no lag


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


def sleepy(name, pause):
    """A subclass of an algorithm, whose fragments all sleep."""

    def paused(fragment):
        role, index = fragment.mark.role, -1

        def wait(x):
            pause(role)
            return np.asarray(x)

        def sleeping(*arguments):
            leaves, structure = jax.tree.flatten(fragment.__wrapped__(*arguments))
            shape = jax.ShapeDtypeStruct(leaves[index].shape, leaves[index].dtype)
            leaves[index] = jax.pure_callback(wait, shape, leaves[index])
            return jax.tree.unflatten(structure, leaves)

        return fdg.fragment(role, fragment.in_axes, fragment.out_axes, name=fragment.mark.name)(sleeping)

    kind = algos.get(name)
    found = inspect.getmembers_static(kind, lambda x: isinstance(x, FragmentFunction))
    return type(kind.__name__, (kind,), {attribute: paused(fragment) for attribute, fragment in found})


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run: an algorithm of `algos`, or `Stages` if `algo` is None.

    `ahead` is for language models; `policy` and `rings` are for PPO and IMPALA. `only` has the delays to
    test, if not all.
    """

    algo: str | None = None
    ahead: int = 2
    policy: str = "workers"
    rings: int = 1
    only: tuple[int, ...] = ()

    @property
    def lags(self):
        """The delays to test: lags, or with rings, numbers of iterations."""
        return self.only or (LAGS if self.rings == 1 else STALENESS)

    def parts(self, pause, lag):
        """The algorithm, its policy and the number of devices."""
        if self.algo is None:
            return Stages(pause), Apart(lag), 4
        if self.algo in ("ppo", "impala"):
            return self._on_host(pause, lag)
        algorithm = sleepy(self.algo, pause)(
            env=counted(max_response=12), num_prompts=4, group_size=2,
            hidden_size=8, num_layers=1, num_heads=2, learning_rate=1e-2,
            ahead=self.ahead, slots=6, micro_batches=2,
        )  # fmt: skip
        apart = {"rewards": 1} if self.algo == "grpo" else {"critics": 1}
        return algorithm, policies.Standalone(actors=1, lag=lag, **apart), 4

    def _on_host(self, pause, lag):
        """PPO or IMPALA; each of two workers sleeps up to 60 ms per step, in three environments."""
        env = envs.make("gymnasium:bench.peers.sleeping:Dozing-v0", milliseconds=20.0, workers=2)
        sizes = {"num_minibatches": 3} if self.algo == "ppo" else {}
        algorithm = sleepy(self.algo, pause)(
            env=env, num_envs=6, num_steps=3, hidden=(8,), learning_rate=1e-2, rings=self.rings, **sizes
        )
        delay = {"lag": lag} if self.rings == 1 else {"staleness": lag}
        if self.policy == "workers":
            return algorithm, policies.Workers(**delay), 3
        return algorithm, policies.SingleLearnerCoarse(**delay), 2


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
    for path, leaf in jax.tree.leaves_with_path((state, metrics)):
        if jax.tree_util.keystr(path[-2:]) == ".inner.pool":
            continue  # the number of a pool of environments is drawn at random
        for shard in leaf.addressable_shards:
            found.update(np.asarray(keys.to_data(shard.data)).tobytes())
    return found.hexdigest()


def digests(runs, seconds, devices, iterations=3, case=Case()):
    """For each lag, the digest of a run without sleeps, and those of `runs` runs."""
    pause = Pause(seconds)
    found = {}
    for lag in case.lags:
        algorithm, policy, count = case.parts(pause, lag)
        # In two processes, both have devices of the run.
        engine = fdg.compile(algorithm, policy, devices[:: len(devices) // count][:count])
        pause.max_seconds, pause.starved = 0.0, None
        of_lag = [digest(*engine.run(engine.init(0), iterations))]
        pause.max_seconds = seconds
        with sleeping_transfers(pause):
            for _ in range(runs):
                pause.starved = random.SystemRandom().choice(ROLES)
                of_lag.append(digest(*engine.run(engine.init(0), iterations)))
        found[str(lag)] = of_lag
    return found


def _process(index, port, runs, seconds, case):
    fdg.host_devices(2)
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    print(json.dumps(digests(runs, seconds, jax.devices(), case=case)), flush=True)


def in_processes(runs, seconds, case):
    """As `digests`, for two processes with two groups each."""
    port = ports.free_port("localhost")
    code = "from tests.running.sleeps import Case, _process; _process({}, {}, {}, {}, {!r})"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(i, port, runs, seconds, case)],
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
    parser.add_argument("--algo", choices=("grpo", "ppo_rlhf", "ppo", "impala"), help="instead of stubs")
    parser.add_argument("--ahead", type=int, default=2, help="of language models")
    parser.add_argument("--policy", choices=("workers", "single_learner_coarse"), default="workers")
    parser.add_argument("--rings", type=int, default=1, help="of PPO and IMPALA: with staleness, not lag")
    parser.add_argument("--lag", type=int, action="append", default=[], help="only this delay (none: all)")
    given = parser.parse_args(words)
    case = Case(given.algo, given.ahead, given.policy, given.rings, tuple(given.lag))
    runs = -(-given.runs // len(case.lags))
    if given.processes == 2:
        found = in_processes(runs, given.seconds, case)
    else:
        fdg.host_devices(4)
        found = digests(runs, given.seconds, jax.devices(), case=case)
    apart = {lag: sum(one != every[0] for one in every[1:]) for lag, every in found.items()}
    print(f"{sum(len(every) - 1 for every in found.values())} runs; that differ, by lag: {apart}")
    return int(any(apart.values()))


if __name__ == "__main__":
    raise SystemExit(main())
