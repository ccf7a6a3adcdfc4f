"""`fdg.diff`: array differences, the first fragment that differs, run directories, damaged recordings."""

import dataclasses
import io
import json
import random
import shutil
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fdg
import policies
from fdg.__main__ import main
from fdg.errors import FdgError
from fdg.training.recording import FACTS, array_difference, read_recording
from fdg.training.replaying import Replay
from fdg.training.run import Run
from tests import tiny, user_algorithm
from tests.refusing import refuses
from tests.training import planted

F32 = np.float32


def initial_run(algorithm, seed=0):
    """A run at iteration 0, with the initial state of a seed."""
    return Run(algorithm, jax.jit(algorithm.init)(jax.random.key(seed)), 0, seed=seed)


@pytest.fixture(scope="module")
def pupil(tmp_path_factory):
    run = initial_run(tiny.Pupil())
    return run, fdg.record(run, tmp_path_factory.mktemp("recorded") / "pupil.npz", iterations=2)


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "expected"),
    [  # (elements that differ, largest difference, units in the last place)
        (F32([1, 2]), F32([1, np.nextafter(F32(2), F32(3))]), 0.0, (1, 2.0**-22, 1)),
        (F32([-1e-45, 1]), F32([1e-45, 1]), 0.0, (1, pytest.approx(2.8e-45, rel=0.01), 2)),  # around zero
        (F32([0.0]), F32([-0.0]), 0.0, (1, 0.0, 0)),
        (F32([0.0]), F32([-0.0]), 1e-9, None),
        (F32([np.nan]), F32([-np.nan]), 0.0, None),
        (F32([np.nan, 1]), F32([1, 1]), 1.0, (1, np.inf, None)),
        (F32([np.inf, 1]), F32([np.inf, 1.25]), 0.1, (1, 0.25, 2**21)),
        (F32([100]), F32([101]), 0.01, None),  # 1 <= 0.01 * (1 + 101)
        (F32([100]), F32([101]), 0.009, (1, 1.0, 2**17)),
        (np.float64([-1e308]), np.float64([1e308]), 0.0, (1, np.inf, None)),
        (
            np.array([1, 2], ml_dtypes.bfloat16),
            np.array([1, 2.015625], ml_dtypes.bfloat16),
            0.0,
            (1, 1 / 64, 1),
        ),
        (np.int8([-128, 3]), np.int8([127, 3]), 0.5, (1, 255.0, None)),
        (np.uint32([0]), np.uint32([2**32 - 1]), 0.0, (1, 2.0**32 - 1, None)),
        (np.array([True, False]), np.array([False, False]), 0.0, (1, 1.0, None)),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0, None),
    ],
)
def test_array_difference_by_hand(a, b, tolerance, expected):
    found = array_difference("x", a, b, tolerance)
    assert (found and (found.count, found.max_abs, found.ulps)) == expected


def test_array_kinds_differ():
    assert array_difference("x", F32([1]), F32([[1]])).kinds == ("float32[1]", "float32[1, 1]")
    assert array_difference("x", F32([1]), np.int32([1])).kinds == ("float32[1]", "int32[1]")


@pytest.mark.parametrize("seed", range(3))
def test_changed_fragment_is_found(pupil, seed):
    run, recorded = pupil
    rng, graph = random.Random(seed), fdg.trace(run.algorithm)
    for fragment in rng.sample(graph.fragments, len(graph.fragments)):
        changed = planted.plant(run.algorithm, graph, fragment.name, rng)
        if changed is None:
            continue
        after = Run(changed, run.state, 0)
        found = fdg.diff(recorded, after)
        if found.differs or not planted.changes_nothing(run, after):
            break
    assert (found.iteration, found.fragment) == (1, fragment.name)
    assert 0 < found.array.count <= found.array.size and found.array.ulps >= 1


def test_equal_runs_and_another_initial_state(pupil):
    run, recorded = pupil
    found = fdg.diff(recorded, run)
    assert not found.differs and found.compared > 20 and "no difference" in str(found)
    assert not fdg.diff(run, initial_run(run.algorithm)).differs
    other = fdg.diff(run, initial_run(run.algorithm, seed=1))
    assert other.iteration == 0 and other.fragment is None and "first state" in str(other)


def test_stepping_matches_one_program():
    run = initial_run(user_algorithm.Gardener())
    replay = Replay(run, 0, False)
    end = list(replay.borders(0, 1))[-1]
    expected = replay.stepper.state(1, replay.stepper.run_iteration(*replay.leaves)[: len(replay.leaves)])
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(end.arrays[name].astype(float), value.astype(float), rtol=1e-5, atol=1e-6)


def test_change_between_fragments(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Between:
        factor: float = 1.0

        def init(self, key):
            return jnp.ones(3)

        def iterate(self, state):
            return _double(_double(state) * self.factor), {}

    found = fdg.diff(fdg.record(initial_run(Between()), tmp_path / "r.npz"), initial_run(Between(factor=1.5)))
    assert found.fragment is None and found.where == "inputs of call 1 of `double.2`"
    assert "between fragments" in str(found)


@fdg.fragment("actor", name="double")
def _double(x):
    return 2 * x


def test_run_directories(tmp_path, capsys):
    for name, scale in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        fdg.fit(tiny.Walk(scale=scale), total_steps=32, out=str(tmp_path / name), progress=False)
    a, b, c = (str(tmp_path / name) for name in "abc")
    capsys.readouterr()
    assert main(["diff", a, b, "--trust", "true"]) == 0
    assert "rows are equal" in capsys.readouterr().out
    assert main(["diff", a, c, "--trust", "true"]) == 1
    text = capsys.readouterr().out
    assert "in iteration 1, in fragment `move`" in text and "scale 0.1 and 0.2" in text
    assert len(text.splitlines()) <= 15 and "replayed: from init" in text
    recorded = str(tmp_path / "c.npz")
    assert main(["diff", c, "--record", recorded, "--checkpoint", "4", "--trust", "true"]) == 0
    assert main(["diff", recorded, c, "--trust", "true"]) == 0
    assert main(["diff", recorded, a, "--trust", "true"]) == 1
    capsys.readouterr()
    assert main(["diff", a, c, "--tolerance", "1e9", "--trust", "true"]) == 0
    text = capsys.readouterr().out
    assert "no difference" in text and "scale 0.1 and 0.2" in text and "part" not in text
    (tmp_path / "a" / "metrics.jsonl").unlink()  # no row or checkpoint in common: both are replayed
    of_a, of_c = (sorted(tmp_path.glob(f"{name}/checkpoints/*"), key=lambda x: int(x.name)) for name in "ac")
    for path in (*of_a[:-1], of_c[-1]):
        shutil.rmtree(path)
    assert main(["diff", a, c, "--trust", "true"]) == 1
    assert "in iteration 1, in fragment `move`" in capsys.readouterr().out
    for wrong in (["diff", a], ["diff", a, str(tmp_path / "nowhere")], ["diff", a, b, "--tolerance", "-1"]):
        capsys.readouterr()
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def pupils(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pupils")
    variants = {
        "one": {"devices": 2},
        "two": {"devices": 2, "num_seeds": 2},
        "fresh": {"devices": 2, "policy": policies.SingleLearnerCoarse()},
        "stale": {"devices": 2, "policy": policies.SingleLearnerCoarse(staleness=1)},
    }
    for name, how in variants.items():
        fdg.fit(
            tiny.Pupil(), total_steps=32, out=folder / name, progress=False, eval_episodes=0,
            checkpoint_every=1, **how,
        )  # fmt: skip
    return folder


def test_staleness_differs_first_at_the_actor(pupils):
    found = fdg.diff(pupils / "fresh", pupils / "stale", trust=True)
    assert (found.iteration, found.where) == (2, "inputs of call 1 of `act`")
    assert "staleness 0 and 1" in str(found) and found.start == "init"


def test_replay_from_a_checkpoint_uses_stale_parameters(pupils):
    run = fdg.load(pupils / "stale", checkpoint=2, trust=True)
    end = list(Replay(run, 0, True).borders(2, 4))[-1]
    last = fdg.load(pupils / "stale", trust=True)
    np.testing.assert_allclose(end.arrays["state['weight']"], last.state["weight"], rtol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "agent", "text"),
    [
        ("one", "one", 5, "one has one agent, 0"),
        ("one", "two", 1, "one has one agent, 0"),
        ("two", "two", 2, "two has 2 agents, 0 to 1"),
        ("two", "two", -1, "two has 2 agents, 0 to 1"),
    ],
)
def test_missing_agent_is_refused(pupils, a, b, agent, text):
    with refuses(f"agent={agent}: ", text):
        fdg.diff(pupils / a, pupils / b, agent=agent, trust=True)


def test_digests_are_compared_beyond_the_size_limit(pupil, tmp_path):
    run, _ = pupil
    small = fdg.record(run, tmp_path / "small.npz", limit_mb=0)
    assert not fdg.diff(small, run).differs
    graph = fdg.trace(run.algorithm)
    changed = planted.plant(run.algorithm, graph, graph.fragments[0].name, random.Random(0))
    found = fdg.diff(small, Run(changed, run.state, 0))
    assert found.fragment == graph.fragments[0].name and found.array.count is None
    with pytest.raises(FdgError, match="another state"):
        fdg.diff(small, initial_run(tiny.Walk()))


def edited(path, change):
    """The bytes of a recording, with changed JSON."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    facts = json.loads(parts[FACTS])
    change(facts)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, content in {**parts, FACTS: json.dumps(facts).encode()}.items():
            new.writestr(name, content)
    return file.getvalue()


def test_float128_is_refused(pupil, tmp_path):
    _, path = pupil
    file, array = tmp_path / "wide.npz", ["x", "float128", [], "0" * 32]
    file.write_bytes(edited(path, lambda facts: facts["borders"][-1][5].append(array)))
    with pytest.raises(FdgError, match="an array has no dtype"):
        read_recording(file)
