"""Profiles of engines: known durations, every policy, and printed tables."""

import gzip
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdg
import policies
from fdg.commands.cli import train_main
from fdg.errors import FdgError
from fdg.profiling import measuring, repeating
from fdg.profiling.fragments import fragment_benchmarks, place_fragments
from fdg.profiling.tracing import read_fragments, trace_iteration
from tests.oracle.compare import limit_agents_per_vmap
from tests.tiny import Pupil

TICK = 1000.0  # seconds; callbacks advance a fake clock by this, so that the machine's load does not matter


class Clock:
    """The real clock plus `TICK` for each tick that callbacks add."""

    def __init__(self):
        self.ticks = 0

    def perf_counter(self):
        return time.perf_counter() + self.ticks * TICK


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(repeating, "ROUND_S", 5e-4)
    monkeypatch.setattr(measuring, "_ROUND_SECONDS", 5e-3)


def sleep(x, ticks):
    def wait(x):
        CLOCK.ticks += ticks
        return x

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def ticks(seconds):
    return round(seconds / TICK)


class Slow:
    """Acts twice for one tick, and learns for three: one tick, and two of a nested gradient."""

    def init(self, key):
        return {"weight": jnp.ones(4), "walks": jnp.zeros((2, 4))}

    def iterate(self, state):
        @fdg.fragment("actor", in_axes=(None, 0))
        def act(weight, walks):
            return sleep(walks + weight[None], 1)

        @fdg.fragment("gradient", in_axes=(None, 0), out_axes=None)
        def slope(weight, walks):
            return sleep(weight + jnp.mean(walks @ jnp.ones((4, 4))), 1)

        @fdg.fragment("learner", in_axes=(None, 0), out_axes=None)
        def learn(weight, walks):
            weight, _ = jax.lax.scan(lambda w, _: (slope(w, walks), None), weight, length=2)
            return sleep(weight, 1)

        walks, _ = jax.lax.scan(lambda w, _: (act(state["weight"], w), None), state["walks"], length=2)
        return {"weight": learn(state["weight"], walks), "walks": walks}, {"mean": jnp.mean(walks)}


def test_known_durations(devices, monkeypatch):
    monkeypatch.setattr(repeating, "time", CLOCK)
    monkeypatch.setattr(measuring, "time", CLOCK)
    engine = fdg.compile(Slow(), policies.GPUOnly(), devices[:1])
    state = engine.init(0)
    with pytest.raises(FdgError, match=r"rounds=0: give an integer of at least 1"):
        fdg.profile(engine, state, rounds=0)
    profile = fdg.profile(engine, state, rounds=np.int64(3))
    assert {f.name: f.calls for f in profile.fragments} == {"act": 2, "learn": 1, "slope": 2}
    assert [ticks(f.seconds) for f in profile.fragments] == [1, 3, 1]
    assert ticks(profile.iteration_s) == 5
    assert ticks(profile.fragments_s) == 5  # nested fragments count once
    assert ticks(profile.own_s("learn")) == 1
    slope = profile.fragment("slope")
    assert slope.parent == "learn" and slope.depth == 1 and slope.products_s > 0
    assert slope.roofline == pytest.approx(slope.limit_s / slope.seconds) and slope.roofline < 1e-3
    (product,) = profile.products
    assert str(product.product) == "2 x 4 x 4" and product.calls == 2 and product.rate > 0
    lines = str(profile).splitlines()
    assert "Slow under GPUOnly() on 1 device: an iteration takes" in lines[0]
    assert any(line.startswith("    slope") and " 2 " in line for line in lines)
    jax.block_until_ready(engine.run(state, 1))  # `profile` has copied the state: it is not donated


def test_benchmarked_fragment_has_collectives_of_training(devices):
    engine = fdg.compile(Pupil(), policies.GPUOnly(), devices[:2])
    leaves = jax.device_get(jax.tree.leaves(engine.init(0)))
    fragments = place_fragments(engine.plan)
    gradient = fragment_benchmarks(engine.plan, fragments, engine.devices, leaves)["slope"]
    # On the CPU, sums are combined into one array before XLA's partitioner.
    assert gradient.lower().as_text().count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("per_vmap", [1, 2])
def test_agents_in_batches(per_vmap, devices):
    """One batch of agents per device is timed, and its time is multiplied by the number of batches."""
    with limit_agents_per_vmap(per_vmap):
        engine = fdg.compile(Pupil(), policies.GPUOnly(), devices[:2], num_seeds=8)
    leaves = jax.tree.leaves(engine.init(0))
    (one,) = [each for each in place_fragments(engine.plan) if each.fragment.name == "slope"]
    timed = fragment_benchmarks(engine.plan, [one], engine.devices, leaves)["slope"]
    (_, (weight, positions, _)) = timed.lower().args_info[0]
    assert weight.shape == (2 * per_vmap, 3) and positions.shape[0] == 2 * per_vmap
    timed.samples.append((4.0, 1.0))
    assert timed.seconds == 3.0 * 4 // per_vmap
    alone = fdg.trace(Pupil()).fragment("slope").flops_per_call
    assert one.work.total_flops == pytest.approx(4 * alone, rel=0.1)


def test_trace_names_fragments(tmp_path, devices):
    # With small arrays, XLA of JAX 0.12 fuses a loop into one operation.
    engine = fdg.compile(Pupil(num_envs=8192), policies.GPUOnly(), devices[:1])
    state, _ = engine.run(engine.init(0), 1)
    path = trace_iteration(engine, state, tmp_path)
    assert {"act", "step", "slope", "update"} <= set(read_fragments([engine.programs[0].hlo()]).values())
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {"act", "step"} <= {event["name"] for event in spans if event["tid"] == 0}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert trace_iteration(engine, state, None) is None


def test_train_with_profile(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--algo", "tests.tiny:Pupil", "--devices", "1", "--total-steps", "16", "--profile"]
    assert train_main([*words, "--out", str(run)]) == 0
    output = capsys.readouterr().out
    table = (run / "profile" / "profile.txt").read_text()
    assert table in output and "Pupil under GPUOnly() on 1 device" in table
    assert json.loads((run / "profile" / "profile.json").read_text())["iteration_s"] > 0
    assert (run / "profile" / "trace.json.gz").exists() and "ui.perfetto.dev" in output
    places = [output.rindex(words) for words in ("evaluation return", "an iteration takes", "run directory")]
    assert places == sorted(places)
