"""Ensembles of critics with one parameter each, for the tests of REDQ, DroQ and TQC."""

import functools
import math

import jax.numpy as jnp

import algos
from algos.sac import Parameters
from tests.algos import by_hand
from tests.algos.by_hand import HALF, NARROW, transitions

keys = functools.partial(by_hand.keys, each=6)

QUICK = {
    "num_envs": 8, "batch_size": 32, "learning_starts": 64, "buffer_size": 4096, "learning_rate": 3e-3,
    "updates_per_step": 0.5, "target_rate": 0.05, "policy_delay": 2, "hidden": (16,), "critic_hidden": (16,),
}  # fmt: skip


def linear(width):
    """Networks with one parameter each: critic `i` returns `c_i * action`, repeated `width` times."""

    def of_critics(c, observation, action):
        values = c[:, None] * action[None, :, 0]
        return values if width == 1 else jnp.broadcast_to(values[..., None], (*values.shape, width))

    return {
        "actor_network": NARROW,
        "critic_network": algos.Network(init=lambda key, observation, action: jnp.zeros(3), apply=of_critics),
    }


def _results(algorithm, is_due, log_temperature, weight=None):
    parameters = Parameters(HALF, jnp.array([3.0, 2.0, 4.0]), jnp.float32(log_temperature))
    transition = transitions(action=[1.0, -0.5], reward=[1.0, 2.0], discount=[0.5, 0.0])
    transition = transition._replace(weight=weight)
    return algorithm.gradient(parameters, jnp.array([4.0, 6.0, 8.0]), jnp.bool_(is_due), transition, keys(2))


def gradients(algorithm, is_due, log_temperature=-math.inf):
    gradient, _, losses = _results(algorithm, is_due, log_temperature)
    return gradient, losses


def weighted_errors(algorithm):
    """The losses with weights of one, and the samples' errors, at temperature 0."""
    _, error, losses = _results(algorithm, True, -math.inf, weight=jnp.ones(2))
    return losses, error
