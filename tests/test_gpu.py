"""The GPU benchmark, run on the CPU: results are stored at once and never measured twice."""

import json
from pathlib import Path

import pytest

from bench.gpu import measuring
from bench.gpu.measuring import FailedError, Measurement, Part, Record, Settings, measure, measure_here
from bench.gpu.parts import PARTS
from bench.gpu.tables import NOT_MEASURED, markdown, record_of
from bench.gpu.training import measure_training
from bench.peers.pairs import Pair
from envs import from_playground
from fdg.errors import FdgError
from fdg.training.reference_jobs import ReferenceJob

ROOT = Path(__file__).parents[1]


def part_of(*rows, calls=None):
    """A part with instant measurements, which counts the calls of each row."""
    calls = {} if calls is None else calls

    def figures(row):
        calls[row] = calls.get(row, 0) + 1
        return {"value": float(calls[row]), "list": [row]}

    return Part(
        "Fakes",
        100,
        lambda settings: [Measurement("Rows", row, lambda row=row: figures(row), 10) for row in rows],
    )


def test_results_are_stored_and_reused(tmp_path):
    calls, path = {}, record_of(tmp_path, 1)
    part = part_of("a", "b", "c", calls=calls)

    def fails_at_b(one, limit):
        kept = json.loads(path.read_text())["measured"] if path.exists() else {}
        assert len(kept) == sum(calls.values())  # all earlier results are on disk
        if one.row == "b":
            raise FailedError("out of memory")
        return measure_here(one, limit)

    measure(part, Settings(tmp_path), Record(path), fails_at_b)
    assert calls == {"a": 1, "c": 1}
    printed = "\n".join(markdown(part, 1, tmp_path))
    assert "| a | 1 |\n| b | - |\n| c | 1 |" in printed and "failed: Rows: b: out of memory" in printed
    measure(part, Settings(tmp_path), Record(path), measure_here)
    assert calls == {"a": 1, "b": 1, "c": 1}
    assert "failed" not in "\n".join(markdown(part, 1, tmp_path))


def test_measurements_beyond_time_limit_are_skipped(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 7))  # 7 s per call: a runs from 7 to 21, b has 2 s left
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(clock)))
    record = Record(record_of(tmp_path, 1))
    limits = []
    measure(
        part_of("a", "b"), Settings(tmp_path), record, lambda *both: limits.append(both[1]) or {}, seconds=30
    )
    assert limits == [23.0]
    assert record.content["left out"] == {"Rows: b": "2 s were left, and it takes about 10"}
    measure(part_of("a", "b"), Settings(tmp_path), Record(record_of(tmp_path, 1)), measure_here)
    assert not Record(record_of(tmp_path, 1)).content["left out"]


def test_rehearsal_record_is_refused(tmp_path):
    path = record_of(tmp_path, 1)
    Record(path, tiny=True).keep("measured", "a", {})
    with pytest.raises(FdgError, match="a rehearsal, and this is measurements"):
        Record(path)
    path.write_text("[1]")
    with pytest.raises(FdgError, match="no record of this command"):
        Record(path)


@pytest.mark.parametrize("number", [1, 2, 5, 7])
def test_full_sizes_parse(number, tmp_path):
    from fdg.commands.parse import parse

    for one in PARTS[number].measurements(Settings(tmp_path)):
        what, *_ = (*getattr(one.measure, "args", ()), None)
        if getattr(one.measure, "func", None) is measure_training:
            if "playground" in one.row:  # not installed here: the other flags, for another environment
                assert what[1] in from_playground.factories(), one.name
                what = ["--env", "brax:ant", *what[2:]]
            assert parse(what, "test", "").num_iterations > 10, one.name
        elif isinstance(what, Pair):
            job = parse(what.our_flags, "test", "")
            assert job.num_iterations * job.steps_per_iteration == what.steps, one.name
        elif isinstance(what, ReferenceJob):
            assert what.build()[0].num_envs >= 128, one.name


def test_wheels_match_constraints():
    def pins(path):
        lines = (line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
        return dict(line.split("==") for line in lines if "==" in line)

    wheels, pinned = pins("bench/gpu/wheels.txt"), pins("constraints.txt")
    assert wheels == {name: pinned.get(name, version) for name, version in wheels.items()}


@pytest.mark.parametrize("number", PARTS)
def test_gpu_page_has_every_part(number, tmp_path):
    heading, _, status, *_ = markdown(PARTS[number], number, tmp_path)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert status == NOT_MEASURED and heading in page
    names = [one.name for one in PARTS[number].measurements(Settings(tmp_path))]
    assert len(set(names)) == len(names)
