"""User-defined environments and networks on the command line: training, resume, acting, export."""

import json
import sys

import numpy as np
import pytest

import fdg
from fdg.commands.cli import train_main
from fdg.errors import FdgError

MODULE = """
import dataclasses
import functools
import equinox
import jax
import jax.numpy as jnp
from flax import nnx
from envs import probe

@dataclasses.dataclass(frozen=True)
class Maze(probe.Parts):
    size: int = 1

class InParts(equinox.Module):  # an Equinox network, of one observation
    policy: equinox.nn.Linear
    value: equinox.nn.Linear

    def __init__(self, actions, *, key):
        one, two = jax.random.split(key)
        self.policy = equinox.nn.Linear(19, actions, key=one)
        self.value = equinox.nn.Linear(19, 1, key=two)

    def __call__(self, seen):
        parts = [jnp.ravel(part).astype(jnp.float32) / 255.0 for part in jax.tree.leaves(seen)]
        x = jnp.concatenate(parts)
        return self.policy(x), self.value(x)[0]

def in_parts(observation_space, action_space):
    return functools.partial(InParts, action_space.n)

class Rows(nnx.Module):  # an NNX network, of a batch
    def __init__(self, size, actions, *, rngs):
        self.policy = nnx.Linear(size, actions, rngs=rngs)
        self.value = nnx.Linear(size, 1, rngs=rngs)

    def __call__(self, x):
        return self.policy(x), self.value(x)[:, 0]

def rows(observation_space, action_space):
    return functools.partial(Rows, observation_space.shape[0], action_space.n)
"""
FLAGS = "--algo a2c --num-envs 4 --num-steps 4 --hidden 4 --devices 1 --eval-episodes 0"
ENV, NETWORK = "user_maze:Maze?size=4", "user_maze:in_parts"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory. The environment's module is in a temporary folder on `sys.path`."""
    path = tmp_path_factory.mktemp("own")
    (path / "user_maze.py").write_text(MODULE)
    sys.path.insert(0, str(path))
    out = path / "run"
    words = [*FLAGS.split(), "--env", ENV, "--network", NETWORK, "--normalize-observation"]
    assert train_main([*words, "--total-steps", "32", "--out", str(out)]) == 0
    yield out
    sys.path.remove(str(path))


def test_user_module_must_be_named_or_trusted(trained, capsys, monkeypatch):
    config = json.loads((trained / "config.json").read_text())
    assert config["env"] == ENV and config["hyperparameters"]["network"] == NETWORK
    monkeypatch.delitem(sys.modules, "user_maze")
    assert train_main(["--resume", str(trained)]) == 2
    assert f"pass --env {ENV} too, or pass --trust" in capsys.readouterr().err
    with pytest.raises(FdgError, match="trust=True"):
        fdg.load(trained)
    assert "user_maze" not in sys.modules
    assert train_main(["--resume", str(trained), "--env", ENV]) == 2  # the network needs it too
    assert f"pass --network {NETWORK} too, or pass --trust" in capsys.readouterr().err
    words = ["--resume", str(trained), "--env", ENV, "--network", NETWORK, "--total-steps", "48"]
    assert train_main(words) == 0
    assert fdg.load(trained, trust=True).iteration == 3


def test_act_and_export_without_privileged_parts(trained, tmp_path):
    run = fdg.load(trained, trust=True)
    assert run.algorithm.env.single.size == 4
    rng = np.random.default_rng(0)
    seen = {
        "picture": rng.integers(0, 256, (3, 4, 4, 1), np.uint8),
        "told": (np.array([0, 1, 1]), rng.uniform(-1, 1, (3, 1)).astype(np.float32)),
    }
    actions = run.policy(seen)
    # Parts that only critics observe do not change actions.
    np.testing.assert_array_equal(run.policy({**seen, "bonus": np.ones((3, 1))}), actions)
    one = {"picture": seen["picture"][1], "told": (1, seen["told"][1][1])}
    assert run.policy(one) == actions[1]
    policy = fdg.load_exported(run.export(tmp_path / "policy.jax"))
    assert policy.facts["arguments"] == ["picture", "told.0", "told.1"]
    np.testing.assert_array_equal(policy(seen), actions)
    assert policy(one) == actions[1]
    for wrong, message in (
        ({"picture": seen["picture"]}, "no part 'told'"),
        (
            {**seen, "picture": np.zeros((3, 5, 4, 1))},
            r"of shape \[3, 5, 4, 1\]: probe:parts\['picture'\] has shape",
        ),
    ):
        with pytest.raises(FdgError, match=message):
            policy(wrong)
        with pytest.raises(FdgError):
            run.policy(wrong)
