"""CQL: the conservative gap by hand, and SAC's loss plus the gap.

Equation 4 and appendix F of Kumar et al. 2020 (arXiv 2006.04779).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algos
from algos.replay import Transition
from tests.algos.by_hand import CRITICS, ONE, column, keys


class ScalarCQL(algos.CQL):
    """Critics with one parameter each; a standard Gaussian actor."""

    _critics = CRITICS
    _actor = algos.Network(
        lambda key, observation: jnp.zeros(()), lambda x, observation: jnp.zeros((len(observation), 2)) + x
    )


def test_gap_by_hand():
    algorithm = ScalarCQL(env=ONE, num_actions=1)
    transition = Transition(column(0.0), column(1.0), *jnp.zeros((2, 1)), column(0.0))
    # Three actions with densities 1/2, 1/4 and 1; the first critic's values are 2, 1 and 0.
    actions, log_density = (
        jnp.array([1.0, 0.5, 0.0])[:, None, None],
        jnp.log(jnp.array([[0.5], [0.25], [1.0]])),
    )
    gap = algorithm._conservative_gap(jnp.array([2.0, 0.0]), transition, actions, log_density)
    first = math.log((math.exp(2) / 0.5 + math.exp(1) / 0.25 + 1.0) / 3) - 2.0
    second = math.log((1 / 0.5 + 1 / 0.25 + 1.0) / 3) - 0.0
    assert float(gap) == pytest.approx(first + second, rel=1e-5)


def test_gap_estimates_integral():
    """Critics return the action: the log of the integral of exp(a) from -1 to 1 is log(e - 1/e)."""
    algorithm = ScalarCQL(env=ONE, num_actions=4_000)
    transition = Transition(column(0.0), column(0.0), *jnp.zeros((2, 1)), column(0.0))
    actions, log_density = algorithm._sample_lowered_actions(jnp.float32(0.0), transition, keys(1, 3))
    assert actions.shape == (12_000, 1, 1) and float(jnp.max(jnp.abs(actions))) <= 1.0
    gap = algorithm._conservative_gap(jnp.array([1.0, 1.0]), transition, actions, log_density)
    assert float(gap) == pytest.approx(2 * math.log(math.e - 1 / math.e), abs=0.05)


def test_loss_is_sac_loss_plus_gap():
    """The gap changes only the critics' gradient: actor and temperature have SAC's gradients."""
    settings = {"env": ONE, "hidden": (8,), "layer_norm": False}
    algorithm, sac = algos.CQL(conservatism=3.0, num_envs=1, batch_size=4, **settings), algos.SAC(**settings)
    observation, action = jnp.ones((4, 1)), jnp.full((4, 1), 0.5)
    learned = jax.jit(sac._init_learned)(*jax.random.split(jax.random.key(1)), observation, action)
    transition = Transition(observation, action, jnp.ones(4), jnp.full(4, 0.9), observation)
    sampled = keys(4, 5)
    gradients = jax.jit(lambda *of: (algorithm.gradient(*of, sampled), sac.gradient(*of, sampled[:2])))
    (ours, _, metrics), (theirs, _, _) = gradients(learned.parameters, learned.target_critics, transition)
    for part in ("actor", "log_temperature"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ours, part), getattr(theirs, part))
    gap = jax.jit(
        jax.grad(
            lambda critics: algorithm._conservative_gap(
                critics,
                transition,
                *algorithm._sample_lowered_actions(learned.parameters.actor, transition, sampled[2:]),
            )
        )
    )(learned.parameters.critics)
    expected = jax.tree.map(lambda x, y: x + 3.0 * y, theirs.critics, gap)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours.critics, expected)
    assert float(metrics["conservative_gap"]) > 0
