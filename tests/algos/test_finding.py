"""SAC, TD3 and their variants learn `probe:continuous`."""

import jax
import pytest

import algos
import envs
from tests.algos.linear_critics import QUICK

SMALL = {
    "batch_size": 64, "learning_starts": 64, "buffer_size": 4096, "learning_rate": 3e-3, "hidden": (16,),
}  # fmt: skip
# Iterations, and hyperparameters.
RUNS = {
    algos.SAC: (200, {**SMALL, "num_envs": 16, "updates_per_step": 0.25}),
    algos.TD3: (150, {**SMALL, "num_envs": 8, "target_rate": 0.05, "updates_per_step": 0.25}),
    algos.FastTD3: (
        200,
        {**SMALL, "num_envs": 16, "updates_per_step": 0.125, "critic_hidden": (16,)}
        | {"atoms": 21, "value_min": -3.0, "value_max": 1.0},
    ),
    algos.REDQ: (200, {**QUICK, "num_critics": 4}),
    algos.DroQ: (200, QUICK),
    algos.TQC: (200, {**QUICK, "quantiles": 5}),
    algos.CrossQ: (
        300,
        {**SMALL, "num_envs": 8, "batch_size": 32, "updates_per_step": 0.25, "critic_hidden": (16,)}
        | {"renorm_after": 100},
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("cls", RUNS)
def test_learns_probe(cls):
    iterations, fields = RUNS[cls]
    algorithm = cls(env=envs.make("probe:continuous"), **fields)

    @jax.jit
    def score(key):
        step = lambda state, _: algorithm.iterate(state)  # noqa: E731
        state = jax.lax.scan(step, algorithm.init(key), length=iterations)[0]
        return algorithm.evaluate(state, jax.random.key(1), 32)["return"]

    assert float(score(jax.random.key(0))) == pytest.approx(algorithm.env.single.optimal_return, abs=0.05)
