"""Benchmark results: alternating rounds, ratios, tables. No training runs here."""

import dataclasses
import json
import sys

import pytest

from bench import harness, performance, results
from bench import table as bench_table
from bench.peers import alternate
from bench.peers.checkouts import PAIRS as OF_CHECKOUTS
from bench.peers.peers import PEERS
from bench.peers.serve import Rounds
from bench.peers.table import PAIRS

# A driver that reports made-up speeds; ours are three times theirs.
DRIVER = """
FACTOR = {factor}
def prepare(config):
    print("what a library prints on standard output is no answer")
    def one_round(seed):
        return {{"steps": 1000 * FACTOR, "seconds": 1.0 + seed, "return": float(seed) or None}}
    return one_round, {{"compile_seconds": 2.0, "devices": 1}}
"""


@pytest.fixture
def drivers(tmp_path, monkeypatch):
    """Drivers named `ours` and `fake`, which return at once."""
    for name, factor in {"ours": 3, "fake": 1}.items():
        (tmp_path / f"{name}.py").write_text(DRIVER.format(factor=factor))
    started = alternate.subprocess.Popen

    def popen(command, **keywords):
        _, *serve, module, config = command
        words = [sys.executable, *serve, module.rpartition(".")[2], config]
        return started(words, **{**keywords, "env": {**keywords["env"], "PYTHONPATH": str(tmp_path)}})

    monkeypatch.setattr(alternate.subprocess, "Popen", popen)


def test_comparison_discards_first_round(drivers):
    pair = next(iter(PAIRS.values()))
    fake = dataclasses.replace(pair, driver="fake")
    result = alternate.compare(fake, None, rounds=3)
    assert result["ratio"] == pytest.approx(3.0)
    assert result["rounds"] == 3
    # Rounds 1, 2, 3 take 2, 3, 4 seconds: round 2 is the median.
    assert result["ours"]["steps_per_s"] == pytest.approx(1000.0)
    assert result["theirs"]["steps_per_s"] == pytest.approx(1000 / 3)
    assert result["theirs"]["returned"] == 2.0
    assert result["theirs"]["compile_seconds"] == 2.0


def test_driver_error(drivers, tmp_path):
    (tmp_path / "fake.py").write_text("raise ValueError('no such environment')")
    fake = dataclasses.replace(next(iter(PAIRS.values())), driver="fake")
    with pytest.raises(alternate.DriverError, match="no such environment"):
        alternate.compare(fake, None, rounds=1)


def test_pairs_have_peers_and_drivers():
    for pair in PAIRS.values():
        driver = (pair.driver or pair.peer).replace("-", "_")
        assert (alternate.ROOT / "bench" / "peers" / "drivers" / f"{driver}.py").exists(), pair.name
        assert pair.target_ratio > 1
    assert {pair.peer for pair in PAIRS.values()} == set(PEERS)
    assert all(PEERS[pair.peer].is_checkout for pair in OF_CHECKOUTS)


def test_performance_table(tmp_path):
    side = {"steps_per_s": 1234.5, "compile_seconds": 2.0, "start_seconds": 4.0, "returned": None}
    figures = {
        "peer": "rejax",
        "task": "PPO CartPole-v1",
        "size": 1024,
        "flags": "--env CartPole-v1 --num-envs 1024 --total-steps 5",
        "equal": "4 epochs",
        "at_least": 2.0,
        "ours": {**side, "devices": 2},
        "theirs": {**side, "returned": 500.0},
        "ratio": 2.5,
        "ratio_middle_half": [2.25, 2.75],
    }
    path = tmp_path / "performance.json"
    results.keep("peers", "a pair", figures, path)
    results.keep("peers", "a pair", {**figures, "ratio": 1.5}, path)  # replaces the first
    assert len(json.loads(path.read_text())["peers"]) == 1
    text = performance.measured_text(results.read(path), [])
    row = next(line for line in text.splitlines() if line.startswith("| PPO CartPole-v1"))
    assert "| 1,024 | 1,234 on 2 devices | 1,234 | **1.50** (2.25 to 2.75) | 2: not met |" in row
    assert row.endswith("| - / 500 |")
    assert "`python -m fdg.train --env CartPole-v1 --num-envs N`" in text


def test_rounds_of_one_training_call():
    rounds, trained = Rounds(), []

    def train():
        for i in range(2):
            trained.append(i)
            rounds.end({"steps": i})
            rounds.wait()
        raise ValueError("there is no third one")

    assert rounds.start(train) == {"steps": 0} and trained == [0]
    assert rounds.next(1) == {"steps": 1} and trained == [0, 1]
    with pytest.raises(ValueError, match="no third one"):
        rounds.next(2)


def test_rounds_alternate_after_warm_up():
    order = []
    found = harness.in_turns(
        {"a": lambda i: order.append(f"a{i}") or i, "b": lambda i: order.append(f"b{i}")}, 2
    )
    assert order == ["b0", "a0", "a1", "b1", "b2", "a2"] and found["a"] == [1, 2]
    assert harness.Spread.ratio([2.0, 6.0, 4.0, 8.0], [1.0, 2.0, 2.0, 2.0]) == harness.Spread(2.5, 2.0, 3.0)


def test_table_keeps_other_cells():
    document = bench_table.DOCUMENT
    _, text, _ = harness.split_at_marks(document, "bench.table --budget short")
    cells = bench_table.cells_in(text)
    environments = list(cells["random"])
    assert bench_table.tables(cells, list(cells), environments) == text.strip()
    cells["ppo"]["Acrobot-v1"] = "new"
    changed = bench_table.tables(cells, list(cells), environments).splitlines()
    assert len(set(changed) - set(text.splitlines())) == 1
