"""Comparing recordings finds each kind of difference, and ignores times."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.net import worker
from tests.net.__main__ import main
from tests.net.jobs import all_jobs
from tests.net.worker import write

ABOUT = {"commit": "a", "code": "b", "machine": "one", "jax": "1"}
JOB = {"name": "job", "kind": "train", "arguments": []}
ROWS = [{"iteration": i, "loss": 0.5 + i + 0.25 * (i > 1), "episode_return": float("nan")} for i in (1, 2, 3)]
TEXTS = {"fdg.plan": "a plan\nrun act actors\nrun learn learners", "test_x": "give a number"}


def recording(folder, about=ABOUT, **changes):
    """Writes a recording of one job with metrics, a plan, a message, and arrays with NaN and bfloat16."""
    rows = [{"iteration": i, "loss": 0.5 + i, "episode_return": float("nan")} for i in (1, 2, 3)]
    found = {
        "texts": TEXTS,
        "rows": {"metrics.jsonl": rows},
        **changes.get("found", {}),
    }
    arrays = {
        "weight": np.array([1.0, np.nan, 0.0], np.float32),
        "half": np.array([1, 2], worker.ml_dtypes.bfloat16),
        "count": np.array(3),
        **changes.get("arrays", {}),
    }
    folder.mkdir()
    (folder / "recording.json").write_text(json.dumps(about))
    write(folder / "job", {"job": JOB, **found}, arrays)
    return str(folder)


def differences(capsys, a, b, *more):
    status = main(["compare", a, b, *more])
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, last


def test_equal_recordings(tmp_path, capsys):
    status, lines, last = differences(capsys, recording(tmp_path / "a"), recording(tmp_path / "b"))
    assert (status, lines) == (0, []) and last.startswith("0 differences, and 0 that were expected")


DIFFERENCES = {
    "a bit": (
        {"arrays": {"weight": np.array([np.nextafter(np.float32(1), 2), np.nan, 0.0], np.float32)}},
        "job checkpoint weight: 1 of 3 elements, by at most 1.19e-07 (1.2e-07 of the largest)",
    ),
    "a sign of zero": (
        {"arrays": {"weight": np.array([1.0, np.nan, -0.0], np.float32)}},
        "job checkpoint weight: 1 of 3 elements, by at most 0 (0 of the largest)",
    ),
    "a NaN": (
        {"arrays": {"weight": np.array([np.nan, np.nan, 0.0], np.float32)}},
        "job checkpoint weight: 1 of 3 elements, one of them not-a-number in one recording only",
    ),
    "a bit of bfloat16": (
        {"arrays": {"half": np.array([1, 2.015625], worker.ml_dtypes.bfloat16)}},
        "job checkpoint half: 1 of 2 elements, by at most 0.0156 (0.0078 of the largest)",
    ),
    "a dtype": (
        {"arrays": {"count": np.array(3, np.int32)}},
        "job checkpoint count: was int64[] and is int32[]",
    ),
    "an extra array": ({"arrays": {"more": np.zeros(2)}}, "job checkpoint more: only in the second"),
    "a metric": (
        {"found": {"rows": {"metrics.jsonl": ROWS}}},
        "job metrics.jsonl loss from iteration 2: 2 of 3 rows, by at most 0.25, at first 2.5 and 2.75",
    ),
    "a row": (
        {"found": {"rows": {"metrics.jsonl": ROWS[:1]}}},
        "job metrics.jsonl: 3 rows and 1",
    ),
    "a line of a plan": (
        {"found": {"texts": {**TEXTS, "fdg.plan": TEXTS["fdg.plan"].replace("act actors", "act all")}}},
        "job fdg.plan line 2: 1 lines, the first was 'run act actors' and is 'run act all'",
    ),
    "a message": (
        {"found": {"texts": {**TEXTS, "test_x": "give a word"}}},
        "job test_x line 1: 1 lines, the first was 'give a number' and is 'give a word'",
    ),
    "a long message": (
        {"found": {"texts": {**TEXTS, "test_x": "give a number" + "x" * 9000}}},
        f"job test_x line 1: 1 lines, the first was 'give a number' and is 'give a number{'x' * 387}...'",
    ),
    "an extra message": (
        {"found": {"texts": {**TEXTS, "test_y": "give two"}}},
        "job test_y: only in the second",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_difference_is_found(difference, tmp_path, capsys):
    changes, line = DIFFERENCES[difference]
    status, lines, _ = differences(capsys, recording(tmp_path / "a"), recording(tmp_path / "b", **changes))
    assert (status, lines) == (1, [line])


def test_missing_job(tmp_path, capsys):
    a, b = recording(tmp_path / "a"), recording(tmp_path / "b")
    (tmp_path / "b" / "job.json").unlink()
    assert differences(capsys, a, b)[:2] == (1, [f"job: not recorded in {b}"])


def test_expected_differences(tmp_path, capsys):
    a = recording(tmp_path / "a")
    b = recording(tmp_path / "b", found={"rows": {"metrics.jsonl": ROWS}})
    table = tmp_path / "expected.toml"
    entry = '[[expected]]\njob = "job"\nfile = "metrics.jsonl"\n'
    table.write_text(entry + 'array = "l*"\nreason = "its sign was wrong"\ndecision = "93"\n')
    status, (line,), last = differences(capsys, a, b, "--expected", str(table))
    assert status == 0 and line.endswith("(expected: its sign was wrong, 93)") and last.startswith("0 diff")
    table.write_text(entry + 'array = "entropy"\nreason = "its sign was wrong"\ndecision = "93"\n')
    assert differences(capsys, a, b, "--expected", str(table))[0] == 1
    table.write_text(entry + 'decision = "93"\n')
    assert main(["compare", a, b, "--expected", str(table)]) == 2
    assert "entry 1 has no reason" in capsys.readouterr().err
    table.write_text(entry + 'reason = "its sign was wrong"\n')
    assert main(["compare", a, b, "--expected", str(table)]) == 2
    assert "entry 1 has no decision" in capsys.readouterr().err


def test_different_machines_are_refused(tmp_path, capsys):
    a, b = recording(tmp_path / "a"), recording(tmp_path / "b", {**ABOUT, "machine": "two"})
    assert main(["compare", a, b]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "machine 'one' and 'two'" in line and "record both on one machine" in line


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_training_is_recorded_without_times(tmp_path, monkeypatch, capsys, devices):
    line = "--algo tests.tiny:Walk --policy gpu_only --devices 2 --total-steps 24 --eval-episodes 0 --out run"
    recorded = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        found, arrays = worker.train([line])
        write(folder / "job", {"job": JOB, **found}, arrays)
        (folder / "recording.json").write_text(json.dumps(ABOUT))
        recorded.append((found, arrays, Path("run/metrics.jsonl").read_text().splitlines()))
    assert differences(capsys, str(tmp_path / "a"), str(tmp_path / "b"))[:2] == (0, [])
    found, arrays, raw = recorded[0]
    assert set(arrays) == {"walks", "keys", "count", "flips", "nested/0/0"} and arrays["count"] == 3
    assert str(arrays["nested/0/0"].dtype) == "bfloat16" and arrays["walks"].any()
    assert [
        set(row) ^ set(kept)
        for row, kept in zip(map(json.loads, raw), found["rows"]["metrics.jsonl"], strict=True)
    ] == ([{"wall_s"}] * 3)
    assert "wall_s" not in found["rows"]["summary.json"][0]


def test_job_names_are_unique_file_names():
    names = [job.name for job in all_jobs()]
    assert len(set(names)) == len(names) and not any(set(name) & set("/: ") for name in names)
