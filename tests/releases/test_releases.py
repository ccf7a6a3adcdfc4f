"""Compatibility with earlier releases: run directories are resumed, and public names exist.

`VERSION.tar.gz` holds small run directories of that release, with only the last checkpoint.
`VERSION.json` is `tests/signatures.json` of that release.
"""

import importlib
import json
import tarfile
from pathlib import Path

import pytest

import envs
import fdg
from fdg.__main__ import main
from tests.signatures import signatures

HERE = Path(__file__).parent
REMOVED = {
    "0.1.0": {
        *(("Plan.__init__", name) for name in ("num_seeds", "memory", "schedule", "constants")),
        ("Profile.__init__", "num_seeds"),
    }
}


@pytest.fixture(scope="module", params=sorted(REMOVED))
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(HERE / f"{request.param}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "grpo"])
def test_runs_are_resumed(runs, name):
    run = runs / name
    before = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((run / "config.json").read_text())
    total = 2 * config["hyperparameters"]["total_steps"]
    assert main(["train", "--resume", str(run), "--total-steps", str(total), "--eval-episodes", "0"]) == 0
    after = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before
    assert [row["iteration"] for row in after] == list(range(1, 2 * len(before) + 1))
    assert fdg.load(run).iteration == 2 * len(before)


@pytest.mark.parametrize("version", sorted(REMOVED))
def test_public_names_exist(version):
    now = signatures()
    for name, taken in json.loads((HERE / f"{version}.json").read_text()).items():
        gone = {(name, argument) for argument in taken if argument not in now.get(name, {})}
        assert name in now and gone <= REMOVED[version], (name, gone)


def test_moved_names_warn():
    for module, name in [
        ("algos.hyperparameters", "hyperparameter"),
        ("algos.exploration", "Exploration"),
        ("algos.minibatches", "take"),
        ("algos.a3c", "A3C"),
        ("algos.offline.rebrac", "ReBRAC"),
    ]:
        with pytest.warns(DeprecationWarning, match=f"{module} is deprecated: write from .* import {name}"):
            assert callable(getattr(importlib.import_module(module), name))
    with pytest.warns(DeprecationWarning, match="write envs.text.Message"):
        assert envs.text.Said is envs.text.Message
