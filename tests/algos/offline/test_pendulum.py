"""Offline learning on Pendulum-v1 from a quarter of good actions and three quarters of random ones.

Episodes of the controller return about -180, those of random actions -1,230. Behaviour cloning of both is as
bad as random actions; IQL comes near the controller.

    python -m tests.algos.offline.test_pendulum  # prints the returns
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import algos
import envs
import fdg
import policies
from fdg.training.collecting import collect
from fdg.training.run import Run
from tests.algos.offline.controller import SwingUp

pytestmark = pytest.mark.whole  # takes minutes

SMALL = {"num_envs": 8, "num_steps": 16, "batch_size": 128, "hidden": (64, 64), "learning_rate": 1e-3}
SHORT_HORIZON = {"discount": 0.95, "target_rate": 0.01}
KINDS = {
    "bc": (algos.BC, {}),
    "iql": (
        algos.IQL,
        {**SHORT_HORIZON, "advantage_scale": 0.3, "expectile": 0.8, "normalize_observation": True},
    ),
    "rebrac": (algos.ReBRAC, {**SHORT_HORIZON, "actor_penalty": 0.1, "critic_penalty": 0.0}),
    "td3_bc": (algos.TD3BC, SHORT_HORIZON),
}


def mixture(path):
    collect(Run(SwingUp(noise=0.3), {}, 0), path, 4_000)
    collect(Run(SwingUp(noise=1_000.0), {}, 0), path, 12_000, seed=1)
    return str(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("data") / "mixed")


def return_after(name, path, updates, **extra):
    kind, fields = KINDS[name]
    algorithm = kind(
        env=envs.make("Pendulum-v1"), dataset=path, total_steps=updates, **{**SMALL, **fields, **extra}
    )
    engine = fdg.compile(algorithm, policies.GPUOnly())
    state, metrics = engine.run(engine.init(0), algorithm.num_iterations)
    assert all(np.all(np.isfinite(x)) for name, x in metrics.items() if "loss" in name)
    return float(algorithm.evaluate(state, jax.random.key(5), 32)["return"])


def test_cloning_a_mixture_is_poor(dataset):
    assert return_after("bc", dataset, 2_560) < -900


@pytest.mark.parametrize(("name", "minimum"), [("iql", -400), ("rebrac", -900)])
def test_learning_from_rewards_is_better(dataset, name, minimum):
    """After 5,120 gradient steps, IQL's return was -219; ReBRAC's was -574 and rising."""
    assert return_after(name, dataset, 5_120) > minimum


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = mixture(Path(folder, "mixed"))
        for kind in KINDS:
            print(kind, round(return_after(kind, found, 5_120)), flush=True)
