"""MAPPO: a central value function explains what no agent's own can; agents that remember.

The losses L(theta) of the actor and L(phi) of the critic are those of Yu et al. 2022 (arXiv 2103.01955),
appendix A, "MAPPO details": PPO's, with its clipped value, as means over the batch and its agents
(`test_ppo.py` has them by hand). What the critic sees is section 4's "concatenation of local observations".
"""

import jax
import numpy as np
import pytest

import algos
import envs

QUICK = {
    "num_envs": 16, "num_steps": 16, "num_epochs": 4, "num_minibatches": 4, "learning_rate": 3e-3,
    "anneal_learning_rate": False, "total_steps": 1_000_000,
}  # fmt: skip


def run(algorithm, iterations):
    """State and metrics after so many iterations, in one program."""

    @jax.jit
    def program(key):
        return jax.lax.scan(lambda s, _: algorithm.iterate(s), algorithm.init(key), length=iterations)

    return program(jax.random.key(0))


@pytest.mark.parametrize(("algorithm_class", "error"), [(algos.MAPPO, 0.0), (algos.IPPO, 0.5)])
def test_only_a_central_value_function_knows_the_others(algorithm_class, error):
    """`probe:team`: an agent is paid the -1 or 1 that another one sees.

    Half the squared error of the best value: 0 for one that sees all, 1/2 for one that sees but its own.
    """
    algorithm = algorithm_class(
        env=envs.make("probe:team", num_agents=3), recurrent=False, hidden=(16,), **QUICK
    )
    _, metrics = run(algorithm, 60)
    assert np.mean(metrics["value_loss"][-5:]) == pytest.approx(error, abs=0.1)


def test_presets():
    env = envs.make("MPE_simple_spread_v3")
    assert algos.make("mappo", env).total_steps == 600_000 and algos.make("mappo", env).recurrent
    assert algos.make("ippo", env).total_steps == 10_000_000 and not algos.make("ippo", env).recurrent
