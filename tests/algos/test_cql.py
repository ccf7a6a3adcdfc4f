"""CQL: the conservative gap by hand, and the loss of SAC.

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


class OneCQL(algos.CQL):
    """Critics that are numbers, whatever the action, or their product with it; a standard Gaussian actor."""

    _critics = CRITICS
    _actor = algos.Network(
        lambda key, observation: jnp.zeros(()), lambda x, observation: jnp.zeros((len(observation), 2)) + x
    )


def test_the_gap_of_cql_by_hand():
    algorithm = OneCQL(env=ONE, num_actions=1)
    transition = Transition(column(0.0), column(1.0), *jnp.zeros((2, 1)), column(0.0))
    # Three actions with densities 1/2, 1/4 and 1; the first critic gives 2, 1 and 0 for them.
    actions, log_density = (
        jnp.array([1.0, 0.5, 0.0])[:, None, None],
        jnp.log(jnp.array([[0.5], [0.25], [1.0]])),
    )
    gap = algorithm._conservative_gap(jnp.array([2.0, 0.0]), transition, actions, log_density)
    first = math.log((math.exp(2) / 0.5 + math.exp(1) / 0.25 + 1.0) / 3) - 2.0
    second = math.log((1 / 0.5 + 1 / 0.25 + 1.0) / 3) - 0.0
    assert float(gap) == pytest.approx(first + second, rel=1e-5)


def test_the_gap_of_cql_estimates_an_integral():
    """Critic 1 is the action itself: the log of the integral of exp(a) from -1 to 1 is log(e - 1/e)."""
    algorithm = OneCQL(env=ONE, num_actions=4_000)
    transition = Transition(column(0.0), column(0.0), *jnp.zeros((2, 1)), column(0.0))
    actions, log_density = algorithm._sample_lowered_actions(jnp.float32(0.0), transition, keys(1, 3))
    assert actions.shape == (12_000, 1, 1) and float(jnp.max(jnp.abs(actions))) <= 1.0
    gap = algorithm._conservative_gap(jnp.array([1.0, 1.0]), transition, actions, log_density)
    assert float(gap) == pytest.approx(2 * math.log(math.e - 1 / math.e), abs=0.05)


def test_the_loss_of_cql_is_that_of_sac_and_the_gap():
    """By the critics alone: the actor's and the temperature's gradients are those of SAC."""
    how = {"env": ONE, "hidden": (8,), "layer_norm": False}
    algorithm, sac = algos.CQL(conservatism=3.0, num_envs=1, batch_size=4, **how), algos.SAC(**how)
    seen, done = jnp.ones((4, 1)), jnp.full((4, 1), 0.5)
    learned = jax.jit(sac._init_learned)(*jax.random.split(jax.random.key(1)), seen, done)
    transition = Transition(seen, done, jnp.ones(4), jnp.full(4, 0.9), seen)
    drawn = keys(4, 5)
    gradients = jax.jit(lambda *of: (algorithm.gradient(*of, drawn), sac.gradient(*of, drawn[:2])))
    (mine, _, metrics), (theirs, _, _) = gradients(learned.parameters, learned.target_critics, transition)
    for part in ("actor", "log_temperature"):
        jax.tree.map(np.testing.assert_array_equal, getattr(mine, part), getattr(theirs, part))
    gap = jax.jit(
        jax.grad(
            lambda critics: algorithm._conservative_gap(
                critics,
                transition,
                *algorithm._sample_lowered_actions(learned.parameters.actor, transition, drawn[2:]),
            )
        )
    )(learned.parameters.critics)
    expected = jax.tree.map(lambda x, y: x + 3.0 * y, theirs.critics, gap)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), mine.critics, expected)
    assert float(metrics["conservative_gap"]) > 0
