"""An environment of a user's own, in parts, from the command line: trained, resumed, used."""

import json
import sys

import numpy as np
import pytest

import fdg
from fdg.commands.cli import train_main
from fdg.errors import FdgError

OWN = """
import dataclasses
from envs import probe

@dataclasses.dataclass(frozen=True)
class Maze(probe.Parts):
    size: int = 1
"""
FLAGS = (
    "--num-envs 4 --num-steps 4 --hidden 4 --num-minibatches 2 --num-epochs 1 --devices 1 --eval-episodes 4"
)
ENV = "a_maze_of_mine:Maze?size=4"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run on an environment of a module that only this folder has."""
    path = tmp_path_factory.mktemp("own")
    (path / "a_maze_of_mine.py").write_text(OWN)
    sys.path.insert(0, str(path))
    out = path / "run"
    words = [
        *FLAGS.split(),
        "--env",
        ENV,
        "--normalize-observation",
        "--total-steps",
        "32",
        "--out",
        str(out),
    ]
    assert train_main(words) == 0
    yield out
    sys.path.remove(str(path))


def test_it_is_kept_and_imported_only_when_named_or_trusted(trained, capsys, monkeypatch):
    assert json.loads((trained / "config.json").read_text())["env"] == ENV
    monkeypatch.delitem(sys.modules, "a_maze_of_mine")
    assert train_main(["--resume", str(trained)]) == 2
    assert f"name it too, --env {ENV}, or say --trust" in capsys.readouterr().err
    with pytest.raises(FdgError, match="trust=True"):
        fdg.load(trained)
    assert "a_maze_of_mine" not in sys.modules
    assert train_main(["--resume", str(trained), "--env", ENV, "--total-steps", "48"]) == 0
    assert fdg.load(trained, trust=True).iteration == 3


def test_it_acts_and_is_exported_without_what_critics_see(trained, tmp_path):
    run = fdg.load(trained, trust=True)
    assert run.algorithm.env.single.size == 4
    rng = np.random.default_rng(0)
    seen = {
        "picture": rng.integers(0, 256, (3, 4, 4, 1), np.uint8),
        "told": (np.array([0, 1, 1]), rng.uniform(-1, 1, (3, 1)).astype(np.float32)),
    }
    actions = run.policy(seen)
    # What critics see changes nothing.
    np.testing.assert_array_equal(run.policy({**seen, "bonus": np.ones((3, 1))}), actions)
    one = {"picture": seen["picture"][1], "told": (1, seen["told"][1][1])}
    assert run.policy(one) == actions[1]
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax"))
    assert policy.facts["arguments"] == [
        "observation['picture']",
        "observation['told'][0]",
        "observation['told'][1]",
    ]
    np.testing.assert_array_equal(policy(seen), actions)
    assert policy(one) == actions[1]
    for wrong, message in (
        ({"picture": seen["picture"]}, "no part 'told'"),
        ({**seen, "picture": np.zeros((3, 5, 4, 1))}, r"\['picture'\] of shape \[3, 5, 4, 1\]"),
    ):
        with pytest.raises(FdgError, match=message):
            policy(wrong)
        with pytest.raises(FdgError):
            run.policy(wrong)
