"""What an evaluation of a language model says, from responses given by hand."""

import jax.numpy as jnp
import numpy as np

from algos.rlhf.responses import Responses
from algos.rlhf.speaker import evaluated
from envs.text import Prompts, Reward


def test_an_evaluation_counts_what_the_model_said_itself():
    own = jnp.array([[True, True, False], [True, False, False]])
    there = jnp.ones((2, 3), bool)  # the last tokens are a tool's
    prompts = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool))
    found = evaluated(
        Responses(prompts, jnp.zeros((2, 3), jnp.int32), there, own), Reward(jnp.array([1.0, 0.5]), {})
    )
    np.testing.assert_array_equal(found["lengths"], [2, 1])
    np.testing.assert_array_equal(found["returns"], [1.0, 0.5])
    assert float(found["return"]) == 0.75
